"""Arrays that grow on the disk, row by row."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from gnnlm.artifact import disk
from gnnlm.artifact.blocks import Array


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return what an .npy file of a C-ordered array begins with."""
    header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


class ArrayWriter:
    """Appends rows to an .npy file of known shape.

    Plain writes, not a memory map: a full disk is then an error that can be reported, not a crash.
    """

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], committed: tuple[int, int] | None
    ) -> None:
        """Begin a file, or resume after the rows that were committed, given their size in bytes and their CRC-32."""
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        header = npy_header(shape, dtype)
        self._start = len(header)
        if committed is None:
            self._file = disk.create(path)
            self._digest = 0
            self._write(header)
        else:
            size, self._digest = committed
            self._file = path.open("r+b")
            disk.truncate(self._file, size)
            self._file.seek(0, os.SEEK_END)

    @property
    def rows(self) -> int:
        return (self._file.tell() - self._start) // self._row_bytes

    def append(self, rows: Array) -> None:
        assert rows.shape[1:] == self.shape[1:], (rows.shape, self.shape)
        self._write(np.ascontiguousarray(rows, dtype=self.dtype).data)

    def _write(self, data: bytes | memoryview) -> None:
        disk.write(self._file, data)
        self._digest = zlib.crc32(data, self._digest)

    def sync(self) -> tuple[int, int]:
        """Fsync appended rows; return the size of the file and its CRC-32."""
        if not self._file.closed:
            disk.sync(self._file)
        return self.path.stat().st_size, self._digest

    def check_whole(self) -> None:
        assert self.rows == self.shape[0], f"{self.path}: {self.rows} rows written, {self.shape[0]} promised"

    def close(self) -> None:
        self._file.close()
