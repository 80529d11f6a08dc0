"""From neighbours to graphs: joins context nodes with the windows of the rows that they retrieved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnlm.datastore.store import Store
from gnnlm.graph.batch import Context, Graph, Windows, build_graph, window_positions
from gnnlm.retrieval.neighbours import Neighbours


@dataclass(frozen=True)
class GraphBuilder:
    """Makes graphs over a store, with windows of `left` and `right` positions around each row."""

    store: Store
    left: int
    right: int

    def __call__(self, context: Context, neighbours: Neighbours, states: bool = True) -> Graph:
        """Return the graph of context blocks [B, T] with all the neighbours given, [B, T, K].

        Without `states`, windows hold only their positions in the store: for a network that reads from a cache.
        """
        return build_graph(
            context,
            neighbours.positions,
            neighbours.similarity,
            self.windows if states else self.places,
            distinct=states,
        )

    def windows(self, rows_U: Tensor) -> Windows:
        """Return windows with the states and tokens of the distinct positions they touch."""
        positions_UW, inside_UW = self._positions(rows_U)
        positions_P, place_UW = torch.unique(positions_UW, return_inverse=True)
        return Windows(rows_U, place_UW, inside_UW, self.store.states(positions_P), self.store.tokens(positions_P))

    def places(self, rows_U: Tensor) -> Windows:
        """Return windows as positions in the store, with the tokens of their slots."""
        positions_UW, inside_UW = self._positions(rows_U)
        return Windows(rows_U, positions_UW, inside_UW, torch.empty(0, self.store.width), torch.empty(0))

    def _positions(self, rows_U: Tensor) -> tuple[Tensor, Tensor]:
        return window_positions(rows_U, *self.store.bounds(rows_U), self.left, self.right)
