"""Progress of long work: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from gnnlm import __version__

console = Console(stderr=True, highlight=False)
LINE_EVERY = 10.0  # seconds between lines where there is no terminal


_log: TextIO | None = None  # the log of the run that is being built


_kept: list[str] | None = None  # messages that are kept instead of shown


def say(message: str) -> None:
    if _kept is not None:
        _kept.append(message)
        return
    console.print(message, markup=False, soft_wrap=True)
    _record(message)


def be_silent() -> None:
    """Print nothing from now on: another process speaks."""
    console.quiet = True


def warn(message: str) -> None:
    say(f"warning: {message}")


@contextmanager
def kept_messages() -> Iterator[list[str]]:
    """Keep what is said instead of showing it: a worker sends it to where everything is shown."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Also append every message to a file, each line with its time."""
    global _log
    before = _log
    with path.open("a", encoding="utf-8", errors="backslashreplace") as _log:
        _record(f"gnnlm {__version__} starts building")
        try:
            yield
        except BaseException as error:
            _record(f"stopped by {type(error).__name__}: {error}".removesuffix(": "))
            raise
        finally:
            _log = before


def _record(message: str) -> None:
    if _log is None:
        return
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # if the disk is full, the work itself reports it
        _log.writelines(f"{now} {line}\n" for line in message.splitlines())
        _log.flush()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} {task.fields['unit']}/s")


def numbered(label: str, number: int, count: int) -> str:
    """The label of one of several pieces of work, counted from 0.

    >>> numbered("codec", 1, 3), numbered("codec", 0, 1)
    ('codec, segment 2 of 3', 'codec')
    """
    return label if count == 1 else f"{label}, segment {number + 1} of {count}"


class Track:
    """Shows the progress of work that takes long.

    `done` is what an earlier try already did: it counts for the total, not for the rate. `later` is how many seconds
    of other work are still to come, for the ETA. A `brief` track says nothing when it ends.
    """

    def __init__(self, label: str, total: int, unit: str, done: int = 0, brief: bool = False) -> None:
        self.label, self.total, self.unit, self.done, self.brief = label, total, unit, done, brief
        self.later = 0.0
        self._first = done
        self._note = ""
        self._paused = 0.0
        self._live: Progress | None = None
        if console.is_terminal and _kept is None:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                _Rate(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[note]}"),
                console=console,
                transient=True,
                get_time=lambda: time.monotonic() - self._paused,
            )

    def __enter__(self) -> Track:
        self._start = time.monotonic()
        self._last = self._start
        if self._live:
            self._live.start()
            self._task = self._live.add_task(
                self.label, total=self.total, completed=self.done, unit=self.unit, left="", note=""
            )
        return self

    def advance(self, amount: int, note: str = "") -> None:
        self.done += amount
        self._note = note or self._note
        now = time.monotonic()
        left = clock((self.total - self.done) / self.rate + self.later) if self.rate else "-"
        if self._live:
            self._live.update(self._task, completed=self.done, total=self.total, left=left, note=self._note)
        elif now - self._last >= LINE_EVERY and _kept is None:  # where all is shown, the whole of it is tracked
            self._last = now
            say(f"{self.label}: {self.done:,}/{self.total:,} {self.rate:,.0f} {self.unit}/s "
                f"ETA {left} {self._note}".rstrip())  # fmt: skip

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause during other work, whose time counts neither for the rate nor for `seconds`."""
        began = time.monotonic()
        if self._live:
            self._live.stop()
        try:
            yield
        finally:
            self._paused += time.monotonic() - began
            if self._live:
                self._live.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start - self._paused

    @property
    def rate(self) -> float:
        return (self.done - self._first) / max(self.seconds, 1e-9)

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        if kind is None and not self.brief:
            say(f"{self.label}: {self.done:,} {self.unit} in {clock(self.seconds)} "
                f"({self.rate:,.0f} {self.unit}/s) {self._note}".rstrip())  # fmt: skip
        sys.stderr.flush()


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
