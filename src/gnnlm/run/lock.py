"""One writer at a time: two processes that build or change a run directory would overwrite each other's files.

The lock is the system's, and ends with its process. The file also says who holds it: for the message, and for file
systems on which another machine's lock is not seen.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gnnlm.artifact import disk
from gnnlm.errors import ArtifactError
from gnnlm.generation import Holder

LOCK = ".lock"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock a run directory, creating it if needed; refuse while another process holds the lock."""
    if root.exists() and not root.is_dir():
        raise ArtifactError(f"{root} is a file; name a directory (run: in the config)")
    disk.make_directories(root)
    with (root / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(root)
            who = "" if holder is None else f" ({holder})"
            raise ArtifactError(
                f"another gnnlm process is building in {root}{who}; wait for it to finish, or choose another run "
                "directory"
            ) from None
        except OSError as error:
            raise ArtifactError(
                f"{root} cannot be locked ({error.strerror}); choose a run directory on a local disk"
            ) from error
        if (holder := _holder(root)) is not None and holder.host != Holder.here().host:
            raise ArtifactError(
                f"{holder} has locked {root}, and cannot be asked from here whether it still runs; wait for it, or, if "
                f"it has ended, delete {root / LOCK}"
            )
        ours = (
            not (root / LOCK).stat().st_size or _named(root) is not None
        )  # any other file of this name stays as it is
        if ours:
            _write(file.fileno(), json.dumps(Holder.here().as_json()))
        try:
            yield
        finally:
            if ours:
                _write(file.fileno(), "")


def _holder(root: Path) -> Holder | None:
    """Who holds the lock by its file; None if nobody does, or if it was left by a process that has ended."""
    holder = _named(root)
    return None if holder is None or holder.is_gone else holder


def _named(root: Path) -> Holder | None:
    try:
        return Holder.of(json.loads((root / LOCK).read_bytes()))
    except (OSError, ValueError):
        return None


def _write(number: int, text: str) -> None:
    with suppress(OSError):  # a full disk: the lock itself holds
        os.ftruncate(number, 0)
        os.write(number, text.encode())


def is_locked(root: Path) -> bool:
    """Whether another process is building in this run directory now."""
    try:
        with (root / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
