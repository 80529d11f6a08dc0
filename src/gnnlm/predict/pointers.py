"""Search saving: follow the last neighbours instead of searching. Approximate.

A row that voted for the token that came has a successor in the store, after the same token in a similar context. If
enough successors are near enough, they are the neighbours of the next position, and the index is not searched
(RetoMaton, Alon et al. 2022). Similarities are always computed from the keys, so p_kNN is exact over the rows it has.

Shapes: K neighbours, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gnnlm.datastore.store import Store
from gnnlm.errors import ConfigError
from gnnlm.retrieval.index import Allowed, Index
from gnnlm.retrieval.neighbours import Neighbours


@dataclass(frozen=True)
class Pointers:
    """When successors are enough: at least `rows` of them, the best at most `drop` less similar than the last best."""

    rows: int = 8
    drop: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise ConfigError(f"pointers: rows must be a whole number of at least 1 (got {self.rows!r})")
        if not (isinstance(self.drop, (int, float)) and 0 <= self.drop < math.inf):
            raise ConfigError(f"pointers: drop must be a number of at least 0 (got {self.drop!r})")

    def follow(
        self, last: Neighbours, token: int, key_D: Tensor, k: int, index: Index, store: Store, allowed: Allowed | None
    ) -> Neighbours | None:
        """The successors of those of the last neighbours that have this token, nearest first; None: search."""
        if token < 0 or not last.k:
            return None
        rows_K = last.positions[last.positions >= 0]
        rows_K = rows_K[store.tokens(rows_K) == token] + 1
        rows_K = rows_K[rows_K < len(store)]
        rows_K = rows_K[store.tokens(rows_K) >= 0]
        if allowed is not None and allowed.positions is not None:
            rows_K = rows_K[allowed.positions[rows_K]]
        if len(rows_K) < self.rows:
            return None
        found = index.compare(key_D[None], rows_K[None], k)[0]
        if float(found.similarity[0]) < float(last.similarity[0]) - self.drop:
            return None
        return found.padded(k)
