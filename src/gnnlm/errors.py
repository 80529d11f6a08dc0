"""What can go wrong and be said in one line. Everything else is a bug."""


class GnnlmError(Exception):
    """Reaches the user as one line: what was expected, what was got, what to do."""


class ConfigError(GnnlmError):
    """A config file or an override that cannot be used."""


class CorpusError(GnnlmError):
    """Text that is missing, unreadable or too little."""


class ModelError(GnnlmError):
    """A base model that cannot be found, loaded or trusted."""


class ArtifactError(GnnlmError):
    """An artifact that is missing, stale, damaged or does not fit on the disk."""


class TrainingError(GnnlmError):
    """Training that cannot go on."""
