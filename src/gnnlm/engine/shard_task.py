"""Tasks: each does one shard of a stage's work, and gives arrays or a file."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gnnlm.artifact import Array, disk, writing
from gnnlm.errors import ArtifactError

CHECKSUM = "crc32"
Arrays = Mapping[str, Array]
Work = Callable[..., Any]  # takes the arguments of a task; returns its arrays, or writes and syncs the file `path`


@dataclass(frozen=True)
class Task:
    """One shard whose result is some arrays.

    `kind` says which work it is, `name` is its file where it has one, `arguments` are plain values. `reads` are paths
    in the run directory that an earlier task of the stage has left, such as a trained quantizer. The arrays of a task
    that is `kept` stay on the disk until the stage is finished, for an attempt that resumes it.
    """

    kind: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    kept: bool = False

    def write(self, work: Work, path: Path) -> None:
        """Do the work and write its result to a file."""
        save_arrays(path, work(**self.arguments))


@dataclass(frozen=True)
class FileTask(Task):
    """One shard whose result is a file of a library, which its work writes."""

    def write(self, work: Work, path: Path) -> None:
        work(**self.arguments, path=path)


def write_result(task: Task, work: Work, folder: Path) -> Path:
    """Return the file of a task, after doing the task unless its file exists."""
    path = folder / task.name
    if not path.exists():
        write_beside(path, partial(task.write, work))
    return path


def write_beside(path: Path, write: Callable[[Path], None]) -> None:
    """Give a file its name only when it is whole; processes that write the same file do not disturb each other."""
    disk.make_directories(path.parent)
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        write(beside)
        disk.rename(beside, path)
    finally:
        disk.remove_file(beside)


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write the arrays of a shard, with a checksum of their bytes, and sync the file."""
    with writing(path):
        save_file(dict(arrays), path, {CHECKSUM: _checksum(arrays)})


def load_arrays(path: Path) -> Arrays:
    """Return the arrays of a shard; remove a damaged file, so that its task is done again."""
    try:
        with safe_open(path, "np") as file:
            wanted = (file.metadata() or {}).get(CHECKSUM)
            arrays: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        whole = wanted == _checksum(arrays)
    except SafetensorError:
        whole = False
    if not whole:
        disk.remove_file(path)
        raise ArtifactError(f"{path} was damaged after it was written, and is removed; run the same command again")
    return arrays


def _checksum(arrays: Arrays) -> str:
    found = 0
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name]).data, zlib.crc32(name.encode(), found))
    return f"{found:08x}"
