"""The graph of a batch, as tensors: no edge lists, no loop over tokens.

Context nodes are B blocks of T positions in the order of their texts. Neighbour nodes are the windows of the U rows
that the batch retrieves. Each slot of a window is a line in a table of the P positions that all windows touch. Two
context tokens that retrieve the same row share its window. Windows of different rows that overlap in the corpus share
the states read from the store, but not the updated states.

    intra, context:    j -> i where j <= i, i - j < context, same document    (band_mask)
    intra, neighbour:  adjacent slots of one window                           (GnnLayer.update_windows)
    inter:             slot w of row rows_BTK[b, t, k] -> token (b, t)        (rows_BTK, edge_BTK, slot_UW)

This module knows nothing of files, indexes or models.

Shapes: B blocks, T tokens, K neighbours, U rows, W window slots, P positions, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value", "Windows", "Graph")


@dataclass(frozen=True)
class Windows:
    """The windows of rows: each slot's line in a table, and whether the slot lies in the row's document."""

    rows_U: Tensor
    place_UW: Tensor
    slot_UW: Tensor
    states_PD: Tensor
    tokens_P: Tensor

    def to(self, device: torch.device) -> Windows:
        return _moved(self, device)


@dataclass(frozen=True)
class Context:
    """Context nodes: states, positions in their text (0: nothing was read yet) and document numbers (-1: padding)."""

    states_BTD: Tensor
    position_BT: Tensor
    document_BT: Tensor


@dataclass(frozen=True)
class Graph:
    """A batch of context blocks with their neighbours."""

    context_BTD: Tensor
    position_BT: Tensor
    document_BT: Tensor
    rows_BTK: Tensor
    edge_BTK: Tensor
    similarity_BTK: Tensor
    windows: Windows

    @cached_property
    def nearest_BT(self) -> Tensor:
        """The similarity of each token's nearest neighbour; minus infinity for a token without neighbours."""
        return self.similarity_BTK.masked_fill(~self.edge_BTK, -math.inf).amax(-1)

    def to(self, device: torch.device) -> Graph:
        return _moved(self, device)


def _moved(value: Value, device: torch.device) -> Value:
    return replace(value, **{field.name: getattr(value, field.name).to(device) for field in fields(value)})


def distinct_rows(neighbours_BTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct rows of a neighbour table, each entry's place among them, and which entries are real.

    >>> rows, place, real = distinct_rows(torch.tensor([[[9, 4], [9, -1]]]))
    >>> rows.tolist(), place.tolist(), real.tolist()
    ([4, 9], [[[1, 0], [1, 0]]], [[[True, True], [True, False]]])
    """
    real_BTK = neighbours_BTK >= 0
    found = neighbours_BTK[real_BTK]
    rows_U, place = torch.unique(found, return_inverse=True)
    if not len(rows_U):
        rows_U = torch.zeros(1, dtype=neighbours_BTK.dtype)  # a row that no edge uses, so that no tensor is empty
    rows_BTK = torch.zeros_like(neighbours_BTK)
    rows_BTK[real_BTK] = place
    return rows_U, rows_BTK, real_BTK


def window_positions(rows_U: Tensor, first_U: Tensor, last_U: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Return the positions of each row's window, and which of them lie inside the row's document.

    Slots outside get the position of the row itself, so that they can be gathered; the mask excludes them.

    >>> positions, inside = window_positions(torch.tensor([5]), torch.tensor([5]), torch.tensor([9]), 1, 1)
    >>> positions.tolist(), inside.tolist()
    ([[5, 5, 6]], [[False, True, True]])
    """
    positions_UW = rows_U[:, None] + torch.arange(-left, right + 1)
    inside_UW = (positions_UW >= first_U[:, None]) & (positions_UW <= last_U[:, None])
    return torch.where(inside_UW, positions_UW, rows_U[:, None]), inside_UW


def build_graph(
    context: Context,
    neighbours_BTK: Tensor,
    similarity_BTK: Tensor,
    windows_of: Callable[[Tensor], Windows],
    distinct: bool = True,
) -> Graph:
    """Join context blocks with the windows of the rows that they retrieve.

    Unless `distinct`, each neighbour has its own window, which is cheaper if nothing is computed per window.
    """
    if distinct:
        rows_U, rows_BTK, edge_BTK = distinct_rows(neighbours_BTK)
    else:
        rows_U, edge_BTK = neighbours_BTK.flatten().clamp(min=0), neighbours_BTK >= 0
        rows_BTK = torch.arange(len(rows_U), device=rows_U.device).view_as(neighbours_BTK)
    similarity_BTK = similarity_BTK.masked_fill(~edge_BTK, 0.0)
    return Graph(
        context.states_BTD,
        context.position_BT,
        context.document_BT,
        rows_BTK,
        edge_BTK,
        similarity_BTK,
        windows_of(rows_U),
    )


def band_mask(position_BS: Tensor, document_BS: Tensor, tokens: int, context: int) -> Tensor:
    """Return which of S source tokens each of the last `tokens` tokens attends to, [B, T, S].

    A token attends to itself and to the sources at the `context` - 1 positions before it in its document. Padding
    (document -1) attends to itself alone.

    >>> band_mask(torch.tensor([[4, 5, 6, 7]]), torch.tensor([[0, 0, 0, 1]]), 3, 2).int().tolist()
    [[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]]
    >>> band_mask(torch.tensor([[4, 9]]), torch.tensor([[0, 0]]), 1, 3).int().tolist()  # far apart in the text
    [[[0, 1]]]
    """
    first = document_BS.shape[1] - tokens
    behind_BTS = position_BS[:, first:, None] - position_BS[:, None, :]
    document_BT1 = document_BS[:, first:, None]
    band_BTS = (behind_BTS >= 0) & (behind_BTS < context) & (document_BT1 == document_BS[:, None, :])
    itself_TS = torch.eye(document_BS.shape[1], dtype=torch.bool, device=band_BTS.device)[first:]
    return torch.where(document_BT1 < 0, itself_TS, band_BTS)
