"""An index of several segments: each is searched by itself, and the nearest of all are kept.

Shapes: N queries, k neighbours, C candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from gnnlm.corpus.stream import Stream
from gnnlm.engine import ObjectPool
from gnnlm.retrieval.exact import sorted_neighbours
from gnnlm.retrieval.index import Allowed, Index
from gnnlm.retrieval.neighbours import Neighbours

Assign = Callable[[Any, Tensor], Any]


class SegmentedIndex:
    """The indexes of the segments of a store, each opened when it is first searched.

    A segment's index counts positions from the segment's beginning. A merged result is what one index over all rows
    finds, if the segments' indexes are exact: nearest first, ties by position.
    """

    def __init__(
        self,
        bases: Sequence[int],
        rows: Sequence[int],
        metric: str,
        opened: Callable[[int], Index],
        assign: Assign | None = None,
    ) -> None:
        """`bases` is where each segment begins, and the end of the last; `rows` is how many rows each has.

        `assign` does, with one segment's index, what all segments would do alike with the queries of a search.
        """
        self.bases = tuple(bases)
        self.rows = tuple(rows)
        self.metric = metric
        self.assign = assign
        self._bases = torch.tensor(self.bases)
        self.segment = lru_cache(maxsize=None)(opened)  # the index of a segment, by its number

    @classmethod
    def over(
        cls, stream: Stream, metric: str, opened: Callable[[int], Index], assign: Assign | None = None
    ) -> SegmentedIndex:
        rows = [len(segment.tokens) - (len(segment.starts) - 1) for segment in stream.segments]
        return cls(stream.bases.tolist(), rows, metric, opened, assign)

    def between(self, first: int, last: int) -> SegmentedIndex:
        """Return the index of the segments first..last-1; its positions count from the first of them."""
        bases = [base - self.bases[first] for base in self.bases[first : last + 1]]
        rows = self.rows[first:last]
        return SegmentedIndex(bases, rows, self.metric, lambda number: self.segment(first + number), self.assign)

    def __len__(self) -> int:
        return sum(self.rows)

    def search(self, keys_ND: Tensor, k: int, allowed: Allowed | None = None) -> Neighbours:
        """See `Index.search`."""
        if len(self.rows) == 1:
            return cast(Neighbours, self._ask("search", {0: (keys_ND, k, allowed)})[0])
        k = min(k, len(self))
        asked = dict[int, tuple[Any, ...]]()
        if not len(keys_ND) or not k:
            return Neighbours.none(len(keys_ND), k=k)
        queries = self.assigned(keys_ND)
        for number in range(len(self.rows)):
            base, end = self.bases[number : number + 2]
            here = None if allowed is None else allowed.within(base, end)
            if here is not None and here.positions is not None and not bool(here.positions.any()):
                continue
            asked[number] = (queries, k, here)
        found = []
        for number, near in self._ask("search", asked).items():
            positions = torch.where(near.positions < 0, -1, near.positions + self.bases[number])
            found.append(Neighbours(positions, near.similarity))
        if not found:
            return Neighbours.none(len(keys_ND), k=k)
        return merged(found, k).padded(k)

    def assigned(self, keys_ND: Tensor) -> Any:
        """Return the queries in the form in which each segment searches them."""
        return keys_ND if self.assign is None else self.assign(self.segment(0), keys_ND)

    def compare(self, keys_ND: Tensor, positions_NC: Tensor, k: int) -> Neighbours:
        """See `Index.compare`."""
        if len(self.rows) == 1:
            return cast(Neighbours, self._ask("compare", {0: (keys_ND, positions_NC, k)})[0])
        return sorted_neighbours(positions_NC, self.similarity(keys_ND, positions_NC).to(positions_NC.device), k)

    def similarity(self, keys_ND: Tensor, positions_NC: Tensor) -> Tensor:
        """See `Index.similarity`."""
        number_NC = torch.searchsorted(self._bases, positions_NC.cpu(), right=True) - 1
        out_NC = torch.full(positions_NC.shape, -math.inf)
        places = dict[int, tuple[Tensor, ...]]()
        asked = dict[int, tuple[Any, ...]]()
        for number in number_NC[number_NC >= 0].unique().tolist():  # missing neighbours (-1) are in none
            places[number] = line_M, column_M = torch.nonzero(number_NC == number, as_tuple=True)
            rows_M = positions_NC.cpu()[line_M, column_M] - self.bases[number]
            asked[number] = (keys_ND[line_M], rows_M[:, None])
        for number, found_M1 in self._ask("similarity", asked).items():
            out_NC[places[number]] = found_M1[:, 0].cpu()
        return out_NC

    def _ask(self, method: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of the indexes of some segments, each with its own arguments."""
        return {number: getattr(self.segment(number), method)(*given) for number, given in requests.items()}


class SpreadIndex(SegmentedIndex):
    """Groups of segments that are held elsewhere, and searched at the same time; the groups are its segments."""

    def __init__(self, whole: SegmentedIndex, cuts: Sequence[int], held: ObjectPool) -> None:
        """`cuts` says with which segment of the whole index each group begins, and the number of segments."""
        groups = list(itertools.pairwise(cuts))
        rows = [sum(whole.rows[first:last]) for first, last in groups]
        super().__init__([whole.bases[cut] for cut in cuts], rows, whole.metric, self._elsewhere)
        self._held = held

    @staticmethod
    def _elsewhere(number: int) -> Index:
        raise AssertionError(f"group {number} is held elsewhere")

    def _ask(self, method: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        sent = {number: tuple(_on_cpu(value) for value in given) for number, given in requests.items()}
        return self._held.ask(method, sent)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def merged(found: Sequence[Neighbours], k: int) -> Neighbours:
    """Merge the results of several searches for the same queries into the k nearest.

    >>> near = [Neighbours(torch.tensor([[p]]), torch.tensor([[0.5]])) for p in (7, 3)]
    >>> merged(near, 1).positions.tolist()
    [[3]]
    """
    positions_NC = torch.cat([each.positions for each in found], dim=1)
    return sorted_neighbours(positions_NC, torch.cat([each.similarity for each in found], dim=1), k)
