"""Leases: who reads which generation, so that nothing is erased under a reader.

A reader's files are open, so a lease does not keep it from damage; it keeps erased text from living on in what is open.
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
    """A reader's claim on a generation; it ends when it is released, or with its process."""

    path: Path
    generation: int
    holder: Holder

    @classmethod
    def take(cls, root: Path, generation: int) -> Lease:
        """A new lease of this process. Where nothing can be written there is none, and no writer either."""
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
    """The leases of readers that may be alive; those of readers that are provably gone are removed.

    So are those that came with a copy of the run directory: their readers read the original.
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
    """Remove what readers of this machine left that were killed while they wrote a lease."""
    for path in (root / FOLDER).glob("*.json.new"):
        host, _, pid = path.name.rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and pid.isdecimal() and began(int(pid)) is None:
            _remove(path)


def _directory(lease: Path) -> int:
    """What tells the directory of a lease from a copy of it, also after the run was renamed."""
    return lease.parent.stat().st_ino


def _remove(path: Path, pid: int | None = None) -> None:
    """Remove a lease; with `pid`, only if this is that process, not one that was forked from it."""
    if pid is None or pid == os.getpid():
        with suppress(OSError):
            disk.remove_file(path)
