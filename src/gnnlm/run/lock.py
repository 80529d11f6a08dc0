"""One builder at a time: two processes that build in one run directory would overwrite each other's files."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnnlm.errors import ArtifactError

LOCK = ".lock"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold a run directory, which is made where it is not there; refused while another process holds it."""
    if root.exists() and not root.is_dir():
        raise ArtifactError(f"{root} is a file; name a directory (run: in the config)")
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtifactError(
                f"another gnnlm is building in {root}; wait for it, or choose another run directory"
            ) from None
        except OSError as error:
            raise ArtifactError(
                f"{root} cannot be locked ({error.strerror}); choose a run directory on a local disk"
            ) from error
        yield


def is_locked(root: Path) -> bool:
    """Whether another process is building there now."""
    try:
        with (root / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
