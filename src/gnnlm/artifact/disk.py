"""Every change that gnnlm makes on the disk: one function for each kind, with the syncs that make it durable.

Three rules keep a run whole through a power failure. A file is synced before a name that counts is given to it, or
before a file that counts names it. A directory is synced after names in it have changed, and before anything relies on
that. What replaces something takes its place in one step.

Tests set `watch`, which is told of each change before it is made: it can count the changes, refuse one, or end the
process there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

Change = Literal[
    "create", "write", "truncate", "sync", "sync directory", "rename", "exchange", "link", "mode",
    "remove", "make directory", "remove directory",
]  # fmt: skip

watch: Callable[[Change, Path], None] | None = None


def _about_to(change: Change, path: Path | str) -> None:
    if watch is not None:
        watch(change, Path(path))


# -- the bytes of a file ---------------------------------------------------------------------------------------------


def create(path: Path) -> BinaryIO:
    """Return an empty file, open for writing."""
    _about_to("create", path)
    return path.open("w+b")


def write(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write at the file's position."""
    _about_to("write", file.name)
    file.write(data)


def truncate(file: BinaryIO, size: int) -> None:
    _about_to("truncate", file.name)
    file.truncate(size)


def sync(file: BinaryIO) -> None:
    """Make what was written to an open file survive a power failure."""
    file.flush()
    _about_to("sync", file.name)
    os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Make what a library has written to a file survive a power failure."""
    with path.open("rb") as file:
        sync(file)


def write_file(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file and sync it; the file may be partial until this returns."""
    with create(path) as file:
        write(file, data)
        sync(file)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably: the old or the new one is there, never a part of either."""
    beside = path.with_name(path.name + ".new")
    write_file(beside, data)
    rename(beside, path)
    sync_directory(path.parent)


def copy(source: Path, place: Path) -> None:
    """Copy a file with its mode and times, and sync the copy."""
    with written(place):
        shutil.copy2(source, place)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Wrap a library that writes a file or a folder by path, and sync it afterwards."""
    _about_to("write", path)
    yield
    sync_tree(path)


def sync_tree(path: Path) -> None:
    """Sync a file, or everything below a folder."""
    if not path.is_dir():
        return sync_file(path)
    for entry in sorted(path.iterdir()):
        sync_tree(entry)
    sync_directory(path)


# -- names -----------------------------------------------------------------------------------------------------------


def sync_directory(path: Path) -> None:
    """Make names that were created, renamed or removed in a directory survive a power failure."""
    _about_to("sync directory", path)
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, durably; the directory must not exist."""
    if not path.parent.is_dir():
        make_directories(path.parent)
    _about_to("make directory", path)
    path.mkdir()
    sync_directory(path.parent)


def make_directories(path: Path) -> None:
    """Make a directory unless it exists."""
    if not path.is_dir():
        try:
            make_directory(path)
        except FileExistsError:  # another process was faster, or a file has the name
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def rename(path: Path, place: Path) -> None:
    """Rename a file or a folder; replace a file of that name."""
    _about_to("rename", path)
    path.replace(place)


def link(source: Path, place: Path) -> None:
    """Give a file a second name."""
    _about_to("link", place)
    os.link(source, place)


def set_mode(path: Path, mode: int) -> None:
    _about_to("mode", path)
    path.chmod(mode)


def remove_file(path: Path) -> None:
    """Remove a file if it exists."""
    if os.path.lexists(path):
        _about_to("remove", path)
        path.unlink(missing_ok=True)


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    _about_to("remove directory", path)
    path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a file, or a directory with everything below it, if it exists."""
    if not path.is_dir() or path.is_symlink():
        return remove_file(path)
    for entry in sorted(path.iterdir()):
        remove_tree(entry)
    remove_directory(path)


# -- taking the place of a directory ---------------------------------------------------------------------------------

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_HERE = -100  # AT_FDCWD
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)


def exchange(path: Path, other: Path) -> bool:
    """Swap two names in one step; False, with nothing changed, where the system or the file system cannot."""
    rename_at = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename_at is None:
        return False
    _about_to("exchange", path)
    if rename_at(_HERE, os.fsencode(path), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(path))
