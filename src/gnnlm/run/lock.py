"""One builder at a time: two processes that build in one run directory would overwrite each other's files."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnnlm.artifact import disk
from gnnlm.errors import ArtifactError

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
            raise ArtifactError(
                f"another gnnlm process is building in {root}; wait for it to finish, or choose another run directory"
            ) from None
        except OSError as error:
            raise ArtifactError(
                f"{root} cannot be locked ({error.strerror}); choose a run directory on a local disk"
            ) from error
        yield


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
