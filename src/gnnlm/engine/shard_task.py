"""A task: one shard of a stage, which ends in one file."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gnnlm.artifact import Array, disk, writing
from gnnlm.errors import ArtifactError

CHECKSUM = "crc32"
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
    """Write the arrays of a shard, with a checksum of their bytes."""
    with writing(path):
        save_file(dict(arrays), path, {CHECKSUM: _checksum(arrays)})


def load_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a shard; a damaged file is removed, so that its task is done again."""
    try:
        with safe_open(path, "np") as file:
            wanted = (file.metadata() or {}).get(CHECKSUM)
            arrays: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        whole = wanted in (None, _checksum(arrays))  # an older version wrote none
    except SafetensorError:
        whole = False
    if not whole:
        disk.remove_file(path)
        raise ArtifactError(f"{path} was damaged after it was written, and is removed; run the same command again")
    return arrays


def _checksum(arrays: Mapping[str, Array]) -> str:
    found = 0
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name]).data, zlib.crc32(name.encode(), found))
    return f"{found:08x}"
