"""A task: one shard of a stage, which ends in one file."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from gnnlm.artifact import Array, disk, writing

Work = Callable[..., None]  # takes the arguments of a task and `path`, the file to write


@dataclass(frozen=True)
class Task:
    """One shard.

    `kind` says which work it is, `name` is its file, `arguments` are plain values. `reads` are paths in the run
    directory that an earlier task of the stage has left, such as a trained quantizer. The file of a task that is `kept`
    stays until the stage is finished, for those that resume it.
    """

    kind: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    kept: bool = False

    def do(self, work: Work, folder: Path) -> Path:
        """Do the work, unless its file is there. Two processes that do the same task do not disturb each other."""
        path = folder / self.name
        if not path.exists():
            disk.make_directories(folder)
            beside = folder / f"{self.name}.{uuid.uuid4().hex[:8]}.new"
            try:
                work(**self.arguments, path=beside)
                disk.sync_file(beside)
                disk.rename(beside, path)
            finally:
                disk.remove_file(beside)
        return path


def here(folder: Path, work: Work, tasks: Sequence[Task]) -> Iterator[Path]:
    """Do tasks one after the other in this process; a file is removed when the next one is asked for.

    So what is made of a file must survive a crash before the next one is asked for.
    """
    for task in tasks:
        path = task.do(work, folder)
        yield path
        if not task.kept:
            disk.remove_file(path)


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    with writing(path):
        save_file(dict(arrays), path)


def load_arrays(path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = load_file(path)
    return arrays
