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
    """Makes the graph of any block of query positions.

    `ids` and `similarity` are the neighbour table of the queries, [positions, k]; it may be memory-mapped.
    """

    queries: States
    store: States
    ids: npt.NDArray[Any]
    similarity: npt.NDArray[np.float32]
    left: int
    right: int

    def __call__(self, positions_BT: Tensor, k: int) -> Graph:
        """The graph over the positions with the k nearest rows of each."""
        lines = positions_BT.numpy()
        return build_graph(
            self.queries.gather(positions_BT),
            self.queries.document_P[positions_BT],
            torch.from_numpy(self.ids[lines, :k].astype(np.int64)),
            torch.from_numpy(self.similarity[lines, :k].astype(np.float32)),
            self.windows,
        )

    def windows(self, rows_U: Tensor) -> Windows:
        store = self.store
        positions_UW, inside_UW = window_positions(
            rows_U, store.first_P[rows_U], store.last_P[rows_U], self.left, self.right
        )
        return Windows(store.gather(positions_UW), store.tokens_P[positions_UW], inside_UW)
