"""What one block of a text passes on to the next: the layers' keys and values of its last tokens.

Shapes: B texts, M carried tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnlm.gnn.layer import KeysValues


@dataclass(frozen=True)
class Carry:
    """Each layer's keys and values, and the position and document number of their tokens (-1: padding).

    A carry is immutable: reading on from it, cropping, selecting and joining leave it unchanged.
    """

    layers: tuple[KeysValues, ...]
    position_BM: Tensor
    document_BM: Tensor

    def select(self, rows: Tensor) -> Carry:
        """Return some texts of the batch, in this order; a text may be taken more than once."""
        return self._map(lambda tensor: tensor[rows])

    def join(self, others: Sequence[Carry]) -> Carry:
        """Return the texts of all carries, one after the other; shorter ones get padding in front."""
        carries = [self, *others]
        slots = max(carry.document_BM.shape[1] for carry in carries)

        def joined(tensors: Sequence[Tensor], value: int = 0) -> Tensor:
            padding = [(0, 0) * (tensor.dim() - 2) + (slots - tensor.shape[1], 0) for tensor in tensors]
            return torch.cat([F.pad(tensor, pad, value=value) for tensor, pad in zip(tensors, padding, strict=True)])

        layers = tuple(
            (joined([key for key, _ in same]), joined([value for _, value in same]))
            for same in zip(*(carry.layers for carry in carries), strict=True)
        )
        positions = joined([carry.position_BM for carry in carries])
        return Carry(layers, positions, joined([carry.document_BM for carry in carries], -1))

    def dropping(self, drop_B: Tensor) -> Carry:
        """Return a carry without the last drop_B[b] tokens of text b: they become padding, which is never attended."""
        slots = self.document_BM.shape[1]
        most = int(drop_B.min()) if len(drop_B) else 0  # slots dropped from every text are cut off
        carry = self._map(lambda tensor: tensor[:, : slots - most]) if most else self
        rest_B1 = (drop_B - most)[:, None].to(carry.document_BM.device)
        # padding is never last here, so the last slots of a text are its last tokens
        gone_BM = torch.arange(slots - most, device=rest_B1.device) >= slots - most - rest_B1
        return replace(carry, document_BM=carry.document_BM.masked_fill(gone_BM, -1))._compact()

    def kept(self, tokens: int) -> Carry:
        """Return the last `tokens` slots, after padding has moved to the front."""
        carry = self._compact()
        drop = max(0, carry.document_BM.shape[1] - tokens)
        return carry._map(lambda tensor: tensor[:, drop:]) if drop else carry

    def _compact(self) -> Carry:
        """Move padding in front of each text's tokens, and drop columns that are padding in every text."""
        pad_BM = self.document_BM < 0
        if not bool(pad_BM.any()):
            return self
        order_BM = pad_BM.int().argsort(dim=1, descending=True, stable=True)
        lines_B1 = torch.arange(len(order_BM), device=order_BM.device)[:, None]
        first = int(pad_BM.sum(1).min())
        return self._map(lambda tensor: tensor[lines_B1, order_BM][:, first:])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Carry:
        layers = tuple((change(key), change(value)) for key, value in self.layers)
        return Carry(layers, change(self.position_BM), change(self.document_BM))
