"""Digests of large files, block by block: each block is checked when it is first read.

A file over `LARGE` bytes is not hashed when an artifact is opened. Its manifest has a CRC-32 of each block of `BLOCK`
bytes; reading some rows checks the blocks that hold them, once. Reading costs at most one pass over the file, however
the rows lie. The SHA-256 of the whole file identifies it, and is what a complete check computes.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gnnlm.artifact.manifest import BlockDigests, FileEntry
from gnnlm.errors import ArtifactError

BLOCK = 256 * 2**10
LARGE = 64 * 2**20  # files up to this size are hashed whole when they are first used
Array = npt.NDArray[Any]


def file_entry(path: Path) -> FileEntry:
    """Return what a manifest says of a file."""
    digest = hashlib.sha256()
    crcs: list[int] = []
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        while chunk := file.read(BLOCK):
            digest.update(chunk)
            if status.st_size > LARGE:
                crcs.append(zlib.crc32(chunk))
    digests = BlockDigests(bytes=BLOCK, crc32=np.array(crcs, ">u4").tobytes().hex()) if crcs else None
    return FileEntry(bytes=status.st_size, sha256=digest.hexdigest(), mtime_ns=status.st_mtime_ns, blocks=digests)


def crc32_of(path: Path, size: int | None = None) -> int:
    """Return the CRC-32 of a file, or of its first `size` bytes."""
    digest = 0
    left = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(left, 2**20))):
            digest = zlib.crc32(chunk, digest)
            left -= len(chunk)
    return digest


class Blocks:
    """The blocks of an open file, and which of them were checked."""

    def __init__(
        self, file: BinaryIO, size: int, digests: BlockDigests, damaged: Callable[[str], ArtifactError]
    ) -> None:
        """`damaged` makes an error from what is wrong with a block."""
        self._file = file
        self._damaged = damaged
        self._size = size
        self._bytes = digests.bytes
        self._crcs = np.frombuffer(bytes.fromhex(digests.crc32), ">u4")
        self._unread = np.ones(len(self._crcs), dtype=bool)

    @property
    def whole(self) -> bool:
        """Whether every block was checked."""
        return not self._unread.any()

    def check(self, first: int = 0, last: int | None = None) -> None:
        """Check the blocks with bytes from `first` up to `last`, except those already checked."""
        end = self._size if last is None else last
        if first < end:
            low, high = first // self._bytes, (end - 1) // self._bytes + 1
            self._check(np.flatnonzero(self._unread[low:high]) + low)

    def check_rows(self, rows: npt.NDArray[np.int64], start: int, row_bytes: int) -> None:
        """Check the blocks of some rows of an array that begins at byte `start`."""
        if self.whole or not rows.size or not row_bytes:
            return
        first_R = start + rows.reshape(-1) * row_bytes
        low_R, high_R = first_R // self._bytes, (first_R + row_bytes - 1) // self._bytes
        for step in range(int((high_R - low_R).max()) + 1):
            blocks_R = np.minimum(low_R + step, high_R)
            self._check(np.unique(blocks_R[self._unread[blocks_R]]))

    def _check(self, numbers: npt.NDArray[np.int64]) -> None:
        for number in numbers.tolist():
            begin, end = number * self._bytes, min((number + 1) * self._bytes, self._size)
            data = os.pread(self._file.fileno(), end - begin, begin)  # not by the map: a failing disk would be a crash
            if zlib.crc32(data) != self._crcs[number]:
                raise self._damaged(f"bytes {begin:,} to {end:,} have changed")
            self._unread[number] = False


class CheckedArray:
    """A memory-mapped array whose blocks are checked when first read.

    Read it by index, slice or array of indexes, as `ConcatenatedArrays`; the result is a plain array.
    """

    def __init__(self, array: Array, blocks: Blocks, start: int) -> None:
        """`start`: the byte of the file at which the array begins."""
        self.array, self._blocks, self._start = array, blocks, start
        self.shape, self.dtype, self.ndim, self.itemsize = array.shape, array.dtype, array.ndim, array.itemsize
        self._row_bytes = array.nbytes // max(1, len(array))

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        self._blocks.check()
        return np.asarray(self.array) if dtype is None else self.array.astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        self.check(key[0] if isinstance(key, tuple) and key else key)
        return np.asarray(self.array[key]) if self.ndim else self.array[key]

    def reshape(self, *shape: int) -> CheckedArray:
        return CheckedArray(self.array.reshape(*shape), self._blocks, self._start)

    def check(self, rows: Any = None) -> None:
        """Check what an index of the first axis reads; everything if the index is not a number, numbers or a slice."""
        if self._blocks.whole:
            return
        if isinstance(rows, slice):
            low, high, step = rows.indices(len(self))
            places = range(low, high, step)
            first, last = (min(places), max(places) + 1) if places else (0, 0)
            return self._blocks.check(self._start + first * self._row_bytes, self._start + last * self._row_bytes)
        numbers = np.asarray(rows)
        if numbers.dtype.kind not in "iu":
            return self._blocks.check()
        rows_R = numbers.astype(np.int64)
        self._blocks.check_rows(np.where(rows_R < 0, rows_R + len(self), rows_R), self._start, self._row_bytes)
