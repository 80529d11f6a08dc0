"""The interface of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gnnlm.engine.shard_task import Arrays, FileTask, Task, Work


class Spread(Protocol):
    """Where the tasks of a stage are done; files of unfinished stages are in a folder of its draft."""

    def arrays(self, folder: Path, work: Work, tasks: Sequence[Task]) -> Iterator[Arrays]:
        """Yield the arrays of tasks, in order.

        A task's file, if it has one, is removed when the next arrays are asked for, unless the task is `kept`. So what
        is made of its arrays must survive a crash by then.
        """
        ...

    def files(self, folder: Path, work: Work, tasks: Sequence[FileTask]) -> Iterator[Path]:
        """Yield the files of tasks, in order, for the caller to move."""
        ...


class Recipe(Protocol):
    """Makes the work of a kind of task in a process that has nothing but the run directory; it can be pickled."""

    def __call__(self, root: Path, kind: str) -> Work: ...


@dataclass(frozen=True)
class Place:
    """A run directory, and the paths in it that tasks read."""

    root: Path
    needs: tuple[str, ...]


class ObjectPool(Protocol):
    """Objects that are opened once and called often, each by its number."""

    def ask(self, method: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of some of the objects, all at the same time, each with its own arguments."""
        ...


class Engine(Protocol):
    @property
    def threads(self) -> int:
        """The number of threads a task computes with; another number may round differently."""
        ...

    def check(self, root: Path, models: Mapping[str, Callable[[], str]]) -> None:
        """Refuse machines that cannot build in a run directory as this one does; models are named and identified."""
        ...

    def spread(self, place: Place, recipe: Recipe) -> Spread:
        """Return what does the tasks of a stage."""
        ...

    def groups(self, count: int) -> int:
        """Return in how many groups to hold `count` segments; 0 if this process should open them itself."""
        ...

    def hold(self, place: Place, openers: Sequence[Callable[[Path], Any]]) -> ObjectPool:
        """Open objects wherever they are to be called, each given the run directory; reopen one that is lost."""
        ...
