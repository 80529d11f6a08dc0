"""From positions to graphs: joins a split's states with its neighbour table and the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.datastore.store import States
from gnnlm.graph.batch import Graph, Windows, build_graph, window_positions


@dataclass(frozen=True)
class Assembler:
    """Makes the graph of any block of lines of a neighbour table.

    `ids` and `similarity` are the table, [lines, k]; it may be memory-mapped. A line is a query position, unless
    `positions` tells which one it is.
    """

    queries: States
    store: States
    ids: npt.NDArray[Any]
    similarity: npt.NDArray[np.float32]
    left: int
    right: int
    positions: Tensor | None = None

    def at(self, lines: Tensor) -> Tensor:
        """The query positions of lines."""
        return lines if self.positions is None else self.positions[lines]

    def __call__(self, lines_BT: Tensor, k: int, states: bool = True) -> Graph:
        """The graph over the lines' positions with the k nearest rows of each.

        Without `states`, windows say where they stand in the store and hold nothing of it: for a network that
        has a cache to read from.
        """
        lines, positions_BT = lines_BT.numpy(), self.at(lines_BT)
        return build_graph(
            self.queries.gather(positions_BT),
            self.queries.document_P[positions_BT],
            torch.from_numpy(self.ids[lines, :k].astype(np.int64)),
            torch.from_numpy(self.similarity[lines, :k].astype(np.float32)),
            self.windows if states else self.places,
            distinct=states,
        )

    def windows(self, rows_U: Tensor) -> Windows:
        """Windows with the states and tokens of the distinct positions they touch."""
        bare = self.places(rows_U)
        positions_P, place_UW = torch.unique(bare.place_UW, return_inverse=True)
        states_PD, tokens_P = self.store.gather(positions_P), self.store.tokens_P[positions_P]
        return Windows(rows_U, place_UW, bare.slot_UW, states_PD, tokens_P)

    def places(self, rows_U: Tensor) -> Windows:
        """Windows as places in the store."""
        store = self.store
        positions_UW, inside_UW = window_positions(
            rows_U, store.first_P[rows_U], store.last_P[rows_U], self.left, self.right
        )
        return Windows(rows_U, positions_UW, inside_UW, torch.empty(0, store.width), store.tokens_P)
