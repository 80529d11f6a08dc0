"""Digests of files, JSON files, and reporting a full disk."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gnnlm.artifact import disk
from gnnlm.errors import ArtifactError


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write text atomically: the file is the old one or the new one, never a part of either."""
    disk.replace_file(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically: the file is the old one or the new one, never a part of either."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Wrap a library that writes a file or a folder: sync it, or raise one `ArtifactError`."""
    with telling(path), disk.written(path):
        yield


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Turn whatever is raised when a file cannot be written into one `ArtifactError`.

    safetensors, FAISS and numpy each report a full disk in their own way, some without an errno.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        words = " ".join(str(error).split())
        known = isinstance(error, OSError) and error.errno is not None
        if known and not is_disk_full(error):
            raise ArtifactError(
                f"{path} could not be written ({words[:120]}); check that you may write there"
            ) from error
        room = shutil.disk_usage(path.parent).free
        raise ArtifactError(
            f"{path} could not be written ({words[:120]}; {human_bytes(room)} are free); free some space and run "
            "the same command again: it resumes where it stopped"
        ) from error


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse before starting when the disk cannot hold what will be written."""
    there, free = free_space(folder)
    if needed > free:
        raise ArtifactError(
            f"{what} needs {human_bytes(needed)} at {there}, but {human_bytes(free)} are free; free some space",
            folder,
            "no room",
        )


def free_space(folder: Path) -> tuple[Path, int]:
    """Return the nearest folder that exists, and the free bytes there."""
    there = next(path for path in [folder, *folder.parents] if path.exists())
    return there, shutil.disk_usage(there).free


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(1536)
    '1.5 KB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"
