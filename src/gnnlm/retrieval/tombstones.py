"""Searching a store that documents were removed from: the index of a segment that does not find them.

Shapes: N queries, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gnnlm.retrieval.index import Allowed, Index
from gnnlm.retrieval.neighbours import Neighbours
from gnnlm.retrieval.segmented import SegmentedIndex


class TombstonedIndex:
    """The index of a segment, without the rows of removed documents; k of the others are found all the same."""

    def __init__(self, index: Index, live_P: Tensor, rows: int) -> None:
        """`live_P` says which positions may be found, `rows` is how many of them are indexed."""
        self.whole = index
        self._rows = rows
        self.metric = index.metric
        self._allowed = Allowed(positions=live_P)

    def __len__(self) -> int:
        return self._rows

    def search(self, keys_ND: Tensor, k: int, allowed: Allowed | None = None) -> Neighbours:
        """See `Index.search`."""
        return self.whole.search(keys_ND, min(k, len(self)), self._both(allowed))

    def compare(self, keys_ND: Tensor, positions_NC: Tensor, k: int) -> Neighbours:
        """See `Index.compare`."""
        return self.whole.compare(keys_ND, positions_NC, k)

    def similarity(self, keys_ND: Tensor, positions_NC: Tensor) -> Tensor:
        """See `Index.similarity`."""
        return self.whole.similarity(keys_ND, positions_NC)

    def _both(self, allowed: Allowed | None) -> Allowed:
        if allowed is None:
            return self._allowed
        assert self._allowed.positions is not None
        live_P = self._allowed.positions
        return replace(allowed, positions=live_P if allowed.positions is None else live_P & allowed.positions)


def without_removed(whole: SegmentedIndex, live: Sequence[Tensor | None], rows: Sequence[int]) -> SegmentedIndex:
    """Return an index that does not find removed documents.

    `live` says for each segment which positions may be found, None if all may; `rows` is how many may be.
    """

    def opened(number: int) -> Index:
        live_P = live[number]
        index = whole.segment(number)
        return index if live_P is None else TombstonedIndex(index, live_P, rows[number])

    def assign(index: Index, keys_ND: Tensor) -> Any:
        """Assign queries with the index that is asked: the first segment may be held by another process."""
        assert whole.assign is not None
        return whole.assign(index.whole if isinstance(index, TombstonedIndex) else index, keys_ND)

    return SegmentedIndex(whole.bases, rows, whole.metric, opened, None if whole.assign is None else assign)
