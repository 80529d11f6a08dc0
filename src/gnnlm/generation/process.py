"""The process that holds a lock or a lease, distinguished from later processes with the same number."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Holder:
    """A process: its machine, its number, and when it began, in a form that is only compared on that machine."""

    host: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), began(os.getpid()) or "")

    @classmethod
    def of(cls, values: object) -> Holder | None:
        """Return the holder that a file's JSON value describes; None if the value describes none."""
        if not isinstance(values, Mapping):
            return None
        host = values.get("host")
        pid = values.get("pid")
        started = values.get("started")
        if not isinstance(host, str) or not isinstance(pid, int) or not isinstance(started, str):
            return None
        return cls(host, pid, started)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended for certain; a process of another machine may always be alive."""
        return self.host == socket.gethostname() and began(self.pid) != self.started

    def as_json(self) -> dict[str, Any]:
        return {"host": self.host, "pid": self.pid, "started": self.started}

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def began(pid: int) -> str | None:
    """Return when a process of this machine began: the boot, and the time since; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        return "" if _answers(pid) else None  # a system without /proc: only whether it runs is known
    return f"{boot} {text.rpartition(')')[2].split()[19]}"


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
