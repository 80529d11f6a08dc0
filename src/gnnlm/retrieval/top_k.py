"""The k nearest of the rows that queries are compared with, a few rows of some queries at a time.

A row that was compared is one 64-bit number: the bits of its distance above those of its position. Distances are not
negative, so these numbers sort as (distance, position) do, and one partition finds the nearest, ties by position.

Shapes: N queries, n queries of a list, R rows, C numbers that a query has room for, k neighbours.
"""

from __future__ import annotations

import sys
from threading import Lock

import numpy as np
import numpy.typing as npt

assert sys.byteorder == "little"  # a number's first half is its position

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
NUMBERS_AT_ONCE = 2**25  # numbers of all queries that are held at once: 256 MB
NONE, POSITION = np.iinfo(np.int64).max, 2**32 - 1


class _Space:
    """Memory that all searches of this process use in turn: fresh pages take time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._held: dict[str, Floats] = {}

    def of(self, name: str, size: int) -> Floats:
        """Return memory for so many values of 32 bits."""
        if name not in self._held or len(self._held[name]) < size:
            self._held[name] = np.empty(size, np.float32)
        return self._held[name][:size]


SPACE = _Space()


class NearestRows:
    """Room for the nearest rows of each query so far. Where it is full, it is cut to the k nearest.

    The distance of a query's k-th nearest is then its bound: rows beyond it are not kept. Memory is that of `SPACE`,
    whose lock the caller holds.
    """

    def __init__(self, queries: int, k: int, rows: int, barred: tuple[Numbers, Numbers] | None = None) -> None:
        """`rows` is the most that are added at once; `barred` bounds the positions that each query may not have."""
        self._k = k
        self._room = self.room(k, rows)
        self._barred = barred
        self._held_NC = SPACE.of("nearest", 2 * queries * self._room).view(np.int64).reshape(queries, self._room)
        self._filled_N = np.zeros(queries, np.int64)
        self._bounds_N = np.full(queries, np.inf, np.float32)

    @staticmethod
    def room(k: int, rows: int) -> int:
        return 2 * k + rows

    @staticmethod
    def at_once(k: int, rows: int) -> int:
        """Return the number of queries that memory allows at once."""
        return max(1, NUMBERS_AT_ONCE // NearestRows.room(k, rows))

    def add(self, lines_n: Numbers, distances_nR: Floats, positions_R: npt.NDArray[np.int32]) -> None:
        """Keep those of some rows that are within the bounds of these queries; each query is named once."""
        kept = np.flatnonzero(distances_nR <= self._bounds_N[lines_n, None])
        ends = np.searchsorted(kept, len(positions_R) * np.arange(len(lines_n) + 1))
        counts_n = np.diff(ends)
        numbers_nR2 = SPACE.of("numbers", 2 * distances_nR.size).view(np.int32).reshape(*distances_nR.shape, 2)
        numbers_nR2[..., 0], numbers_nR2[..., 1] = positions_R, distances_nR.view(np.int32)
        numbers = numbers_nR2.view(np.int64).ravel()[kept]
        if self._barred is not None:
            low, high = (np.repeat(end[lines_n], counts_n) for end in self._barred)
            positions = numbers & POSITION
            numbers[(positions >= low) & (positions <= high)] = NONE
        if (self._filled_N[lines_n] + counts_n).max(initial=0) > self._room:
            self.cut(2 * self._k)  # such a query holds more: it has room for 2 k and all that is added
        begins_n = lines_n * self._room + self._filled_N[lines_n] - ends[:-1]
        self._held_NC.ravel()[np.repeat(begins_n, counts_n) + np.arange(len(numbers))] = numbers
        self._filled_N[lines_n] += counts_n

    def cut(self, beyond: int | None = None) -> None:
        """Cut each query that holds more than `beyond` rows (k by default) to its k nearest."""
        k = self._k
        for lines_m in np.array_split(lines := np.flatnonzero(self._filled_N > (beyond or k)), len(lines) // 256 + 1):
            held_mC = self._held_NC[lines_m, : self._filled_N[lines_m].max(initial=k)]
            held_mC[np.arange(held_mC.shape[1]) >= self._filled_N[lines_m, None]] = NONE
            held_mC.partition(k - 1, axis=1)
            self._held_NC[lines_m, :k] = held_mC[:, :k]
            self._filled_N[lines_m] = k
            self._bounds_N[lines_m] = _distances(held_mC[:, k - 1])

    def fill(self, positions_Nk: Numbers, scores_Nk: Floats) -> None:
        """Fill in the nearest positions and minus their distances, nearest first; if there are too few, -1 and -inf."""
        self.cut()
        held_Nk = self._held_NC[:, : self._k]
        held_Nk[np.arange(self._k) >= self._filled_N[:, None]] = NONE
        held_Nk.sort(axis=1)
        distances_Nk = _distances(held_Nk)
        np.negative(distances_Nk, out=scores_Nk)
        positions_Nk[:] = np.where(np.isinf(distances_Nk), -1, held_Nk & POSITION)


def _distances(numbers: Numbers) -> Floats:
    """Return the distances of some numbers; infinity where there is no row."""
    found = (numbers >> 32).astype(np.int32).view(np.float32)
    return np.where(np.isnan(found), np.float32(np.inf), found)
