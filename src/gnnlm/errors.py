"""Errors that are reported to the user in one line; any other exception is a bug."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

Fault = Literal["missing", "damaged", "unreadable", "outdated", "erased", "other inputs", "no room"]


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM; not an Exception, so that no `except Exception` swallows it."""


class GnnlmError(Exception):
    """Shown to the user as one line: what was expected, what was found, what to do."""


class ConfigError(GnnlmError):
    """A config file or an override that cannot be used."""


class CorpusError(GnnlmError):
    """Text that is missing, unreadable or too little."""


class ModelError(GnnlmError):
    """A base model that cannot be found, loaded or trusted."""


class ArtifactError(GnnlmError):
    """An artifact that is missing, stale, damaged or does not fit on the disk.

    `fault` is what is wrong with the artifact at `path`. Artifacts do not know commands, so `advise` names the one that
    mends a fault; `run/advice.py` sets it.
    """

    advise: ClassVar[Callable[[ArtifactError], str]] = staticmethod(lambda error: "")

    def __init__(self, what: str, path: Path | None = None, fault: Fault | None = None) -> None:
        super().__init__(what)
        self.path = path
        self.fault = fault

    def __str__(self) -> str:
        advice = ArtifactError.advise(self)
        return f"{self.args[0]}; {advice}" if advice else str(self.args[0])


class VersionError(ArtifactError):
    """An artifact that another version of gnnlm has made; it need not be damaged."""


class LimitError(GnnlmError):
    """A limit of the machine for this process, such as the number of open files; nothing is damaged."""


class EngineError(GnnlmError):
    """A cluster that cannot be reached, or whose nodes cannot do the work."""


class TrainingError(GnnlmError):
    """Training that cannot continue."""
