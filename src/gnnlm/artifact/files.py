"""Writing files atomically, and reporting a full disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from gnnlm.errors import ArtifactError


def sha256(file: BinaryIO) -> str:
    """The checksum of an open file, from its current position to its end."""
    digest = hashlib.sha256()
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha256(file)


def write_whole(path: Path, text: str) -> None:
    """Write text atomically: the file is the old one or the new one, never a part of either."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically: the file is the old one or the new one, never a part of either."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sync_directory(path: Path) -> None:
    """Make names that were created, renamed or removed in a directory survive a power failure."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Wrap a library that writes files: whatever it raises when it cannot becomes one `ArtifactError`.

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
            f"{what} needs {human_bytes(needed)} at {there}, but {human_bytes(free)} are free; "
            "free some space, or choose another run directory (run: in the config)"
        )


def free_space(folder: Path) -> tuple[Path, int]:
    """The nearest folder that exists, and the bytes that are free there."""
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
