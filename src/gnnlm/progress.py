"""Messages and progress of long work, as records of the logger `gnnlm`.

The library prints nothing: `logging.basicConfig(level=logging.INFO)` shows the records in a Python program, and the
command line has a handler of its own (`cli/terminal.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO

from gnnlm import __version__

logger = logging.getLogger("gnnlm")
logger.addHandler(logging.NullHandler())
LINE_EVERY = 10.0  # seconds between the messages of a track
Message = tuple[int, str]  # level and text

_kept: list[Message] | None = None  # messages that are kept instead of logged


def say(message: str) -> None:
    log(logging.INFO, message)


def warn(message: str) -> None:
    log(logging.WARNING, message)


def log(level: int, message: str) -> None:
    if _kept is None:
        logger.log(level, message, stacklevel=3)  # the place that calls `say` or `warn`
    else:
        _kept.append((level, message))


@contextmanager
def kept_messages() -> Iterator[list[Message]]:
    """Keep messages instead of logging them; a worker sends them to the process that logs."""
    global _kept
    before = _kept
    _kept = []
    try:
        yield _kept
    finally:
        _kept = before


def be_silent() -> None:
    """Log nothing from now on: another process does."""
    logger.disabled = True


def line_of(record: logging.LogRecord) -> str:
    """Return a record as the command line and the log of a run show it."""
    message = record.getMessage()
    return f"warning: {message}" if record.levelno >= logging.WARNING else message


class RunLog(logging.Handler):
    """Appends each line of a message with its time to the log of a run."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # if the disk is full, the work itself reports it
            self.file.writelines(f"{now} {line}\n" for line in line_of(record).splitlines())
            self.file.flush()

    def note(self, message: str) -> None:
        """Append a message to this log only."""
        self.emit(logging.makeLogRecord({"msg": message, "levelno": logging.INFO}))


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append every message to the log of a run, and to no other run's log meanwhile."""
    outer = [handler for handler in logger.handlers if isinstance(handler, RunLog)]
    level = logger.level
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        run_log = RunLog(file)
        logger.handlers = [*(handler for handler in logger.handlers if handler not in outer), run_log]
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        run_log.note(f"gnnlm {__version__} starts building")
        try:
            yield
        except BaseException as error:
            run_log.note(f"stopped by {type(error).__name__}: {error}".removesuffix(": "))
            raise
        finally:
            logger.setLevel(level)
            logger.handlers = [*(handler for handler in logger.handlers if handler is not run_log), *outer]


def numbered(label: str, number: int, count: int) -> str:
    """Return the label of one of several pieces of work, counted from 0.

    >>> numbered("codec", 1, 3), numbered("codec", 0, 1)
    ('codec, segment 2 of 3', 'codec')
    """
    return label if count == 1 else f"{label}, segment {number + 1} of {count}"


class Bar(Protocol):
    """A live display of a track."""

    def show(self, track: Track) -> None:
        """Show the track as it is now."""

    def hide(self) -> None:
        """Take the track off the screen until it is shown again."""


make_bar: Callable[[], Bar | None] = lambda: None  # noqa: E731 (the command line sets another)


class Track:
    """The progress of work that takes long: a message every few seconds, or a live bar, and a message at the end.

    `done` is what an earlier try already did: it counts for the total, not for the rate. `later` is how many seconds
    of other work are still to come, for the time left. A `brief` track logs nothing when it ends.
    """

    def __init__(self, label: str, total: int, unit: str, done: int = 0, brief: bool = False) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = done
        self.brief = brief
        self.later = 0.0
        self.note = ""
        self._first = done
        self._paused = 0.0
        self._bar = make_bar() if _kept is None else None

    def __enter__(self) -> Track:
        self._start = time.monotonic()
        self._last = self._start
        if self._bar:
            self._bar.show(self)
        return self

    def advance(self, amount: int, note: str = "") -> None:
        self.done += amount
        self.note = note or self.note
        now = time.monotonic()
        if self._bar:
            self._bar.show(self)
        elif now - self._last >= LINE_EVERY and _kept is None:  # where a worker's messages are logged, a track is too
            self._last = now
            say(
                f"{self.label}: {self.done:,}/{self.total:,} {self.rate:,.0f} {self.unit}/s ETA {self.left} "
                f"{self.note}".rstrip()
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause during other work, whose time counts neither for the rate nor for `seconds`."""
        began = time.monotonic()
        if self._bar:
            self._bar.hide()
        try:
            yield
        finally:
            self._paused += time.monotonic() - began
            if self._bar:
                self._bar.show(self)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start - self._paused

    @property
    def rate(self) -> float:
        return (self.done - self._first) / max(self.seconds, 1e-9)

    @property
    def left(self) -> str:
        """The time left, `-` while it is not known."""
        return clock((self.total - self.done) / self.rate + self.later) if self.rate else "-"

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._bar:
            self._bar.hide()
        if kind is None and not self.brief:
            say(
                f"{self.label}: {self.done:,} {self.unit} in {clock(self.seconds)} ({self.rate:,.0f} {self.unit}/s) "
                f"{self.note}".rstrip()
            )


def human_time(seconds: float) -> str:
    """
    >>> human_time(0), human_time(50), human_time(5400), human_time(300000)
    ('-', '1 min', '1.5 h', '3.5 days')
    """
    if seconds == 0:
        return "-"
    if seconds < 3600:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def clock(seconds: float) -> str:
    """
    >>> clock(75)
    '1:15'
    """
    whole = int(seconds + 0.5)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
