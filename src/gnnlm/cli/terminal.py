"""How the command line shows the library's messages and progress: on stderr, with a live bar on a terminal."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from gnnlm import progress
from gnnlm.progress import Track, line_of, logger

console = Console(stderr=True, highlight=False)


class TerminalHandler(logging.Handler):
    """Prints each message as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        console.print(line_of(record), markup=False, soft_wrap=True)


class LiveBar:
    """A track as a bar with its rate, the time left and its note."""

    def __init__(self) -> None:
        self.display = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._task = self.display.add_task("", rate="", left="", note="")

    def show(self, track: Track) -> None:
        self.display.update(
            self._task,
            description=track.label,
            completed=track.done,
            total=track.total,
            rate=f"{track.rate:,.0f} {track.unit}/s",
            left=track.left,
            note=track.note,
        )
        if not self.display.live.is_started:
            self.display.start()

    def hide(self) -> None:
        self.display.stop()


def show_messages() -> None:
    """Print what the library logs from now on."""
    logger.addHandler(TerminalHandler())
    logger.setLevel(logging.INFO)
    progress.make_bar = lambda: LiveBar() if console.is_terminal else None
