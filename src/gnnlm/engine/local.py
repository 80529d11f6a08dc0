"""The local engine: tasks one after the other in this process, with all its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gnnlm.artifact import disk
from gnnlm.engine.engine_protocol import ObjectPool, Place, Recipe, Spread
from gnnlm.engine.shard_task import (
    Arrays,
    FileTask,
    Task,
    Work,
    load_arrays,
    save_arrays,
    write_beside,
    write_result,
)


class LocalSpread:
    """Does tasks in this process. Arrays are passed on as they are; only those that are kept are written."""

    def arrays(self, folder: Path, work: Work, tasks: Sequence[Task]) -> Iterator[Arrays]:
        """See `Spread.arrays`."""
        for task in tasks:
            path = folder / task.name
            if path.exists():  # kept by an earlier attempt, or finished by another engine
                arrays = load_arrays(path)
            else:
                arrays = work(**task.arguments)
                if task.kept:
                    write_beside(path, partial(save_arrays, arrays=arrays))
            yield arrays
            if not task.kept:
                disk.remove_file(path)

    def files(self, folder: Path, work: Work, tasks: Sequence[FileTask]) -> Iterator[Path]:
        """See `Spread.files`."""
        for task in tasks:
            yield write_result(task, work, folder)


class LocalEngine:
    """This process. It has everything at hand, so it needs no recipe."""

    @property
    def threads(self) -> int:
        import torch  # slow to import

        return torch.get_num_threads()

    def check(self, root: Path, models: Mapping[str, Callable[[], str]]) -> None:
        pass

    def spread(self, place: Place, recipe: Recipe) -> Spread:
        return here

    def groups(self, count: int) -> int:
        return 0

    def hold(self, place: Place, openers: Sequence[Callable[[Path], Any]]) -> ObjectPool:
        raise AssertionError("this process opens its segments itself")


here = LocalSpread()
HERE = LocalEngine()
