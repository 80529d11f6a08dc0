"""What this machine has: memory and disk that are free."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gnnlm.artifact import free_space

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Bytes of memory and of disk that are free."""

    memory: float
    disk: float

    @classmethod
    def here(cls, folder: Path) -> Machine:
        """This machine, for a run in this folder, whether or not it exists yet."""
        return cls(free_memory(), float(free_space(folder.absolute())[1]))


def free_memory() -> float:
    """Bytes that this process may still take: what is free, within the limit of its container."""
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError, StopIteration):
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        free = 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        free = min(free, float(limit - int((CGROUP / "memory.current").read_text(encoding="ascii"))))
    return free
