"""Parts of an artifact read as one: their files, and their arrays end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from gnnlm.artifact.blocks import Array
from gnnlm.artifact.reader import Artifact


class ConcatenatedArrays:
    """Arrays end to end, read by index, slice or array of indexes; only what is read is copied.

    >>> both = ConcatenatedArrays([np.array([5, 6]), np.array([7, 8, 9])])
    >>> len(both), both[1:4].tolist(), both[np.array([[4, 0]])].tolist()
    (5, [6, 7, 8], [[9, 5]])
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = tuple(arrays)
        self.bases = np.cumsum([0, *map(len, self.arrays)])
        self.shape = (int(self.bases[-1]), *self.arrays[0].shape[1:])
        self.dtype, self.ndim, self.itemsize = self.arrays[0].dtype, self.arrays[0].ndim, self.arrays[0].itemsize

    def __len__(self) -> int:
        return int(self.bases[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = np.concatenate(self.arrays)
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            assert step == 1, "a slice of joined arrays has no step"
            return self._between(first, max(first, last))
        wanted = np.asarray(rows)
        assert wanted.dtype.kind in "iu", "joined arrays are read by index"
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        out = np.empty((*wanted.shape, *self.shape[1:]), self.dtype)
        number = np.searchsorted(self.bases, wanted, side="right") - 1
        for each in np.unique(number).tolist():
            here = number == each
            out[here] = self.arrays[each][wanted[here] - self.bases[each]]
        return out if wanted.ndim else out[()]

    def _between(self, first: int, last: int) -> Array:
        pieces = [
            array[max(0, first - base) : max(0, last - base)]
            for array, base in zip(self.arrays, self.bases[:-1].tolist(), strict=True)
            if base < last and first < base + len(array)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, self.arrays[0][:0]])


def concatenate(arrays: Sequence[Array]) -> Array:
    """Return several arrays as one, a single one as it is; the result may be used as `ConcatenatedArrays` are."""
    return arrays[0] if len(arrays) == 1 else cast(Array, ConcatenatedArrays(arrays))


@dataclass(frozen=True)
class ArtifactFiles:
    """The files of an artifact whose names begin with a prefix."""

    artifact: Artifact
    prefix: str = ""

    def array(self, name: str) -> Array:
        return self.artifact.array(self.prefix + name)
