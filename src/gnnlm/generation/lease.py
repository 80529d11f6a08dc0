"""Leases: which process reads which generation, so that erasing waits for readers.

Readers hold their files open, so they need no lease to be safe. A lease keeps erased text from living on in open files.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gnnlm.artifact import disk, write_json
from gnnlm.generation.process import Holder, began

FOLDER = "leases"


@dataclass(eq=False)
class Lease:
    """A reader's claim on a generation; ends when released, or with its process."""

    path: Path
    generation: int
    holder: Holder

    @classmethod
    def take(cls, root: Path, generation: int) -> Lease:
        """Return a new lease of this process; without write access no file is made, and nobody can erase either."""
        holder = Holder.here()
        name = f"{holder.host}-{holder.pid}-{secrets.token_hex(4)}.json"
        lease = cls(root / FOLDER / name, generation, holder)
        weakref.finalize(lease, _remove, lease.path, holder.pid)  # also at the end of the interpreter
        lease._write()
        return lease

    def move(self, generation: int) -> None:
        """Read another generation from now on."""
        self.generation = generation
        self._write()

    def release(self) -> None:
        _remove(self.path)

    def _write(self) -> None:
        with suppress(OSError):
            disk.make_directories(self.path.parent)
            known = {"generation": self.generation, "directory": _directory(self.path)}
            write_json(self.path, {**self.holder.as_json(), **known})


def leases_of(root: Path) -> Iterator[Lease]:
    """Yield the leases of readers that may be alive; remove those of readers that have ended.

    Leases that came with a copy of the run directory are removed too: their readers read the original.
    """
    _remove_unfinished(root)
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            values = None
        known = values if isinstance(values, dict) else {}
        holder, generation = Holder.of(values), known.get("generation")
        copied = known.get("directory") not in (None, _directory(path))
        if holder is None or holder.is_gone or copied or not isinstance(generation, int):
            _remove(path)
        else:
            yield Lease(path, generation, holder)


def _remove_unfinished(root: Path) -> None:
    """Remove unfinished leases of readers of this machine that were killed while writing."""
    for path in (root / FOLDER).glob("*.json.new"):
        host, _, pid = path.name.rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and pid.isdecimal() and began(int(pid)) is None:
            _remove(path)


def _directory(lease: Path) -> int:
    """Return a number that differs between the directory of a lease and its copies, and survives renaming the run."""
    return lease.parent.stat().st_ino


def _remove(path: Path, pid: int | None = None) -> None:
    """Remove a lease; with `pid`, only if this is that process, not one that was forked from it."""
    if pid is None or pid == os.getpid():
        with suppress(OSError):
            disk.remove_file(path)
