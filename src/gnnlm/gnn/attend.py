"""Attention of tokens over rows of a shared table, without ever holding [tokens, sources, width].

The absorbed form: queries already live in the table's space, so raw rows are scored and averaged as they
are, and nothing is projected per edge. A chunk of tokens gathers its rows, is done with them, and gathers
them again in the backward pass: memory grows with the chunk, not with the number of edges.

Shapes: N tokens, H heads, D width, S sources per token, P rows of the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_VALUES = 2**20  # values gathered at once: 4 MB of float32 stay in the cache and cost no page faults


def attend(query_NHD: Tensor, bias_NHS: Tensor, table_PD: Tensor, index_NS: Tensor, mask_NS: Tensor) -> Tensor:
    """Average of table rows under softmax(query . row + bias) over the unmasked sources, [N, H, D].

    A token without a source gets zeros.
    """
    kind = table_PD.dtype
    with torch.autocast(table_PD.device.type, enabled=False):  # scores and sums stay in the table's precision
        out: Tensor = _Attend.apply(query_NHD.to(kind), bias_NHS.to(kind), table_PD, index_NS, mask_NS)
    return out


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension's unmasked entries; all zero, not NaN, where there are none.

    >>> masked_softmax(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_NHD: Tensor, bias_NHS: Tensor, table_PD: Tensor, index_NS: Tensor, mask_NS: Tensor
    ) -> Tensor:
        weights, averages = [], []
        for part in _chunks(index_NS, table_PD):
            rows_nSD = _gather(table_PD, index_NS[part])
            scores_nHS = torch.baddbmm(bias_NHS[part], query_NHD[part], rows_nSD.mT)
            weights.append(masked_softmax(scores_nHS, mask_NS[part, None]))
            averages.append(weights[-1] @ rows_nSD)
        weights_NHS = torch.cat(weights)
        ctx.save_for_backward(query_NHD, table_PD, index_NS, weights_NHS)
        return torch.cat(averages)

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        query_NHD, table_PD, index_NS, weights_NHS = ctx.saved_tensors
        grad_table_PD = torch.zeros_like(table_PD) if ctx.needs_input_grad[2] else None
        grad_queries, grad_scores = [], []
        for part in _chunks(index_NS, table_PD):
            rows_nSD, weights_nHS = _gather(table_PD, index_NS[part]), weights_NHS[part]
            grad_weights_nHS = grad_NHD[part] @ rows_nSD.mT
            centred = grad_weights_nHS - (grad_weights_nHS * weights_nHS).sum(-1, keepdim=True)
            grad_scores_nHS = weights_nHS * centred
            grad_scores.append(grad_scores_nHS)
            grad_queries.append(grad_scores_nHS @ rows_nSD)
            if grad_table_PD is not None:
                grad_rows_nSD = weights_nHS.mT @ grad_NHD[part] + grad_scores_nHS.mT @ query_NHD[part]
                grad_table_PD.index_add_(0, index_NS[part].reshape(-1), grad_rows_nSD.flatten(0, 1))
        return torch.cat(grad_queries), torch.cat(grad_scores), grad_table_PD, None, None


def _gather(table_PD: Tensor, index_nS: Tensor) -> Tensor:
    return table_PD.index_select(0, index_nS.reshape(-1)).view(*index_nS.shape, -1)


def _chunks(index_NS: Tensor, table_PD: Tensor) -> list[slice]:
    tokens, sources = index_NS.shape
    size = max(1, CHUNK_VALUES // max(1, sources * table_PD.shape[1]))
    return [slice(start, start + size) for start in range(0, tokens, size)] or [slice(0, 0)]
