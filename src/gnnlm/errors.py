"""Errors that are reported to the user in one line; any other exception is a bug."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not an Exception, so that no `except Exception` on the way swallows it."""


class GnnlmError(Exception):
    """Shown to the user as one line: what was expected, what was found, what to do."""


class ConfigError(GnnlmError):
    """A config file or an override that cannot be used."""


class CorpusError(GnnlmError):
    """Text that is missing, unreadable or too little."""


class ModelError(GnnlmError):
    """A base model that cannot be found, loaded or trusted."""


class ArtifactError(GnnlmError):
    """An artifact that is missing, stale, damaged or does not fit on the disk."""


class VersionError(ArtifactError):
    """An artifact that another version of gnnlm has made; nothing says that it is damaged."""


class LimitError(GnnlmError):
    """More of something than the machine allows this process, such as open files; nothing is damaged."""


class EngineError(GnnlmError):
    """A cluster that cannot be reached, or whose nodes cannot do the work."""


class TrainingError(GnnlmError):
    """Training that cannot continue."""
