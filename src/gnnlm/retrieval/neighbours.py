"""Neighbours: the one value that search, tables, the graph, kNN and citations exchange.

Shapes: K neighbours; any shape of queries before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Neighbours:
    """Store positions found for some queries and their similarity, nearest first; -1 and minus infinity for none."""

    positions: Tensor
    similarity: Tensor

    @classmethod
    def none(cls, *queries: int, k: int = 0) -> Neighbours:
        """Make the result of queries that found nothing.

        >>> Neighbours.none(2, k=1).positions.tolist()
        [[-1], [-1]]
        """
        return cls(torch.full((*queries, k), -1), torch.full((*queries, k), -math.inf))

    @classmethod
    def joined(cls, parts: Sequence[Neighbours]) -> Neighbours:
        """Concatenate the queries of all parts, padded to the most neighbours."""
        k = max(part.k for part in parts)
        padded = [part.padded(k) for part in parts]
        return cls(torch.cat([p.positions for p in padded]), torch.cat([p.similarity for p in padded]))

    @property
    def k(self) -> int:
        return self.positions.shape[-1]

    def nearest(self, k: int) -> Neighbours:
        """Return the k nearest of each query."""
        return self if k >= self.k else Neighbours(self.positions[..., :k], self.similarity[..., :k])

    def padded(self, k: int) -> Neighbours:
        """Cut or pad to exactly k entries for each query."""
        if k <= self.k:
            return self.nearest(k)
        missing = Neighbours.none(*self.positions.shape[:-1], k=k - self.k)
        return Neighbours(
            torch.cat([self.positions, missing.positions.to(self.positions.device)], dim=-1),
            torch.cat([self.similarity, missing.similarity.to(self.similarity.device)], dim=-1),
        )

    def listed(self) -> Iterator[list[tuple[int, float]]]:
        """Yield position and similarity of the real neighbours of each query, [N, K].

        >>> list(Neighbours(torch.tensor([[3, -1]]), torch.tensor([[0.5, -math.inf]])).listed())
        [[(3, 0.5)]]
        """
        for positions, similarity in zip(self.positions.tolist(), self.similarity.tolist(), strict=True):
            yield [(row, score) for row, score in zip(positions, similarity, strict=True) if row >= 0]

    def __getitem__(self, queries: Any) -> Neighbours:
        return Neighbours(self.positions[queries], self.similarity[queries])

    def to(self, device: torch.device | str) -> Neighbours:
        return Neighbours(self.positions.to(device), self.similarity.to(device))


@dataclass(frozen=True)
class NeighbourTable:
    """The neighbours of a text's positions, on disk: a line for each of `queried`, or for every position."""

    ids: npt.NDArray[Any]
    similarity: npt.NDArray[np.float32]
    queried: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def k(self) -> int:
        return int(self.ids.shape[1])

    def positions(self, lines: Tensor) -> Tensor:
        """Return the query positions of some lines."""
        return lines if self.queried is None else self.queried[lines]

    def at(self, positions: Tensor, k: int | None = None) -> Neighbours:
        """Return the k nearest neighbours of query positions; none where a position was not queried."""
        k = self.k if k is None else min(k, self.k)
        lines = positions
        known = None
        if self.queried is not None:
            lines = torch.searchsorted(self.queried, positions.contiguous()).clamp(max=len(self.queried) - 1)
            known = self.queried[lines] == positions
        found = Neighbours(
            torch.from_numpy(self.ids[lines.numpy(), :k].astype(np.int64)),
            torch.from_numpy(self.similarity[lines.numpy(), :k].astype(np.float32)),
        )
        if known is None or bool(known.all()):
            return found
        return Neighbours(
            found.positions.masked_fill(~known[..., None], -1),
            found.similarity.masked_fill(~known[..., None], -math.inf),
        )
