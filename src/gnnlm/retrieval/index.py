"""The interface of an index: its keys, its rows, and what a search may find.

A key is the state (or the last feed-forward's input), scaled to unit length under cosine. Rows without a token (the
position past a document's last) are not indexed: there is nothing to copy from them.

Every segment of the store is searched by itself, and the results are merged (`segmented.py`). Exact search is
`exact.py`; everything approximate is FAISS, in `faiss_index.py`. What `index.kind` stands for is in `auto_index.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact, concatenate
from gnnlm.corpus.stream import Stream, TokenStream, split_files
from gnnlm.retrieval.neighbours import Neighbours

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The rows of an index: all positions that have a token, which are all but the last of each document.

    `starts` is where each document begins, and the end, [documents + 1]; so a row's position takes no memory.

    >>> rows = Rows(torch.tensor([0, 3, 5]))
    >>> len(rows), rows.positions(torch.tensor([0, 1, 2])).tolist(), rows.all().tolist()
    (3, [0, 1, 3], [0, 1, 3])
    """

    starts: Tensor

    @classmethod
    def of(cls, stream: TokenStream) -> Rows:
        return cls(torch.from_numpy(np.array(stream.starts)))

    def __len__(self) -> int:
        return int(self.starts[-1]) - (len(self.starts) - 1)

    @cached_property
    def _first_rows(self) -> Tensor:
        return self.starts[:-1] - torch.arange(len(self.starts) - 1)

    def positions(self, rows: Tensor) -> Tensor:
        """Return the position of each row: the row plus the number of documents that end before it."""
        return rows + torch.searchsorted(self._first_rows, rows.contiguous(), right=True) - 1

    def all(self) -> Tensor:
        return self.positions(torch.arange(len(self)))

    def open(self, positions_P: Tensor) -> Tensor:
        """Return which rows may be found, given which positions may."""
        has_token_P = torch.ones(len(positions_P), dtype=torch.bool)
        has_token_P[self.starts[1:] - 1] = False
        return positions_P[has_token_P]


@dataclass(frozen=True)
class SomeRows:
    """Some of the rows, by position: those of documents that are not removed."""

    positions_R: Tensor

    def __len__(self) -> int:
        return len(self.positions_R)

    def positions(self, rows: Tensor) -> Tensor:
        return self.positions_R[rows]


def live_rows(stream: Stream, live: Sequence[Tensor | None]) -> Rows | SomeRows:
    """Return the rows of a stream that may be found; `live` marks such positions of each segment, None if all."""
    rows = Rows.of(stream)
    if all(live_P is None for live_P in live):
        return rows
    sizes = [len(segment.tokens) for segment in stream.segments]
    each = [torch.ones(size).bool() if one is None else one for size, one in zip(sizes, live, strict=True)]
    positions_R = rows.all()
    return SomeRows(positions_R[torch.cat(each)[positions_R]])


@dataclass(frozen=True)
class Allowed:
    """Which store positions the queries of a search may find.

    `barred` is a range low..high (both included) for each query that it may not find, [N] each; `positions` says for
    every position of the store whether queries may find it, [P].
    """

    barred: tuple[Tensor, Tensor] | None = None
    positions: Tensor | None = None

    def within(self, first: int, last: int) -> Allowed:
        """Return the same for the positions from `first` on, before `last`, counted from there.

        >>> barred = (torch.tensor([3, 0]), torch.tensor([6, 2]))
        >>> [end.tolist() for end in Allowed(barred).within(5, 9).barred]
        [[0, 0], [1, -1]]
        """
        positions = None if self.positions is None else self.positions[first:last]
        if self.barred is None:
            return Allowed(None, positions)
        low = (self.barred[0] - first).clamp(min=0)
        high = (self.barred[1] - first).clamp(max=last - first - 1)
        inside = low <= high
        if not bool(inside.any()):
            return Allowed(None, positions)
        return Allowed((low.where(inside, 0), high.where(inside, -1)), positions)


class Index(Protocol):
    """Finds the positions whose keys are nearest."""

    metric: str

    def __len__(self) -> int:
        """Return how many rows can be found."""
        ...

    def search(self, keys_ND: Tensor, k: int, allowed: Allowed | None = None) -> Neighbours:
        """Return the k nearest allowed positions of each query, [N, k], nearest first, ties by position.

        Similarity is the cosine, or minus the squared distance. If fewer are allowed, the remaining entries are -1 and
        minus infinity.
        """
        ...

    def compare(self, keys_ND: Tensor, positions_NC: Tensor, k: int) -> Neighbours:
        """Return the k nearest of some indexed positions of each query, by similarities computed from the keys."""
        ...

    def similarity(self, keys_ND: Tensor, positions_NC: Tensor) -> Tensor:
        """Return the similarity of each query with some indexed positions, computed from the keys, [N, C]."""
        ...


def as_keys(states: Tensor, metric: str) -> Tensor:
    """Return states as float32 keys; unit length under cosine.

    >>> as_keys(torch.tensor([[3.0, 4.0]]), "cosine")
    tensor([[0.6000, 0.8000]])
    """
    keys = states.float()
    if metric == "cosine":
        keys = keys / keys.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return keys


def keys_of(encoded: Artifact, split: str) -> Array:
    """Return the search keys of a split, through all its segments: its states, or the keys stored with them."""
    return concatenate([files.array(key_file(encoded)) for files in split_files(encoded, split)])


def segment_keys(encoded: Artifact, number: int) -> Array:
    """Return the search keys of one segment of train."""
    return encoded.parts[number].array(key_file(encoded))


def key_file(encoded: Artifact) -> str:
    return "states.npy" if encoded.facts["key"] == "state" else "keys.npy"
