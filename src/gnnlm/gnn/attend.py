"""Attention of tokens over lines of shared tables, without ever holding [tokens, sources, width].

Two forms, equal to rounding:
- `attend`, the absorbed form: queries are already in the tables' space, so raw states are scored and averaged
  directly, and nothing is projected per edge or per source. It is differentiable.
- `attend_projected`: the table holds keys and values that were projected once and for all. Less work per edge,
  twice the memory: for a frozen network.

A chunk of tokens gathers its lines, releases them, and gathers them again in the backward pass: memory grows with
the chunk, not with the number of edges.

Shapes: N tokens, H heads, d head width, S sources per token, C the tables' joint width, R lines of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_VALUES = {"cpu": 2**20, "cuda": 2**27}  # gathered at once; 4 MB stay in a CPU's cache and cost no page faults


class CodedTable(Protocol):
    """A table that is decoded or joined as it is gathered, in its own space; queries are mapped into it, averages out.

    Keys and values that were projected are gathered as they are: they are never coded.
    """

    @property
    def width(self) -> int: ...

    def gather(self, lines: Tensor) -> Tensor: ...

    def enter(self, queries: Tensor) -> Tensor: ...

    def leave(self, averages: Tensor) -> Tensor: ...


def attend(
    query_NHC: Tensor,
    bias_NHS: Tensor,
    mask_NS: Tensor,
    tables: Sequence[Tensor | CodedTable],
    lines_NS: Sequence[Tensor],
    dropout: float = 0.0,
) -> Tensor:
    """Average of sources under softmax(query . source + bias) over the unmasked ones, [N, H, C].

    A source is a line of each table, side by side. A token without a source gets zeros. `dropout` sets this share of
    the weights to zero and raises the others to make up for it.
    """
    with torch.autocast(query_NHC.device.type, enabled=False):  # scores and sums stay in full precision
        kind = torch.promote_types(query_NHC.dtype, torch.float32)
        bias_NHS, empty_N11 = _masked(bias_NHS.to(kind), mask_NS)
        query_NHC = _each(tables, query_NHC.to(kind), lambda table, part: table.enter(part))
        kept_NHS = F.dropout(torch.ones_like(bias_NHS), dropout) if dropout else None
        out: Tensor = _Attend.apply(query_NHC, bias_NHS, kept_NHS, tuple(lines_NS), *tables)
        return _each(tables, out, lambda table, part: table.leave(part)).masked_fill(empty_N11, 0.0)


def attend_projected(
    query_NHd: Tensor, bias_NHS: Tensor, mask_NS: Tensor, table_RC: Tensor | CodedTable, lines_NS: Tensor
) -> Tensor:
    """The same over keys and values stored side by side in each line, [N, H, d]; for inference only."""
    heads, head_width = query_NHd.shape[1:]
    bias_NHS, empty_N11 = _masked(bias_NHS, mask_NS)
    out_NHd = torch.empty_like(query_NHd)
    for part in _chunks(lines_NS, *_widths([table_RC])):
        lines_nS = lines_NS[part]
        found = _gather(table_RC, lines_nS, query_NHd.dtype).view(*lines_nS.shape, 2, heads, head_width)
        key_nHSd, value_nHSd = found.permute(2, 0, 3, 1, 4)
        out_NHd[part] = F.scaled_dot_product_attention(
            query_NHd[part, :, None], key_nHSd, value_nHSd, attn_mask=bias_NHS[part, :, None], scale=1.0
        )[:, :, 0]
    return out_NHd.masked_fill_(empty_N11, 0.0)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_NHC: Tensor,
        bias_NHS: Tensor,
        kept_NHS: Tensor | None,
        lines: tuple[Tensor, ...],
        *tables: Tensor | CodedTable,
    ) -> Tensor:
        widths = _widths(tables)
        queries = query_NHC.split(widths, dim=-1)
        weights_NHS, out_NHC = torch.empty_like(bias_NHS), torch.empty_like(query_NHC)
        averages = out_NHC.split(widths, dim=-1)
        for part in _chunks(lines[0], sum(widths)):
            found = [_gather(table, at[part], query_NHC.dtype) for table, at in zip(tables, lines, strict=True)]
            scores_nHS = bias_NHS[part]
            for query_NHc, found_nSc in zip(queries, found, strict=True):
                scores_nHS = torch.baddbmm(scores_nHS, query_NHc[part], found_nSc.mT)
            weights_NHS[part] = scores_nHS.softmax(-1)
            used_nHS = weights_NHS[part] if kept_NHS is None else weights_NHS[part] * kept_NHS[part]
            for average_NHc, found_nSc in zip(averages, found, strict=True):
                average_NHc[part] = used_nHS @ found_nSc
        ctx.widths, ctx.lines, ctx.kept_NHS = widths, lines, kept_NHS
        ctx.tables = [None if isinstance(t, Tensor) else t for t in tables]
        ctx.save_for_backward(query_NHC, weights_NHS, *(t for t in tables if isinstance(t, Tensor)))
        return out_NHC

    @staticmethod
    def backward(ctx: Any, grad_NHC: Tensor) -> tuple[Tensor | None, ...]:
        query_NHC, weights_NHS, *plain = ctx.saved_tensors
        tables = [coded or plain.pop(0) for coded in ctx.tables]
        wanted = [
            torch.zeros_like(t) if isinstance(t, Tensor) and needed else None
            for t, needed in zip(tables, ctx.needs_input_grad[4:], strict=True)
        ]
        grads, queries = grad_NHC.split(ctx.widths, dim=-1), query_NHC.split(ctx.widths, dim=-1)
        grad_query_NHC, grad_bias_NHS = torch.empty_like(query_NHC), torch.empty_like(weights_NHS)
        for part in _chunks(ctx.lines[0], sum(ctx.widths)):
            weights_nHS = weights_NHS[part]
            found = [_gather(table, at[part], query_NHC.dtype) for table, at in zip(tables, ctx.lines, strict=True)]
            grad_weights_nHS = torch.zeros_like(weights_nHS)
            for grad_NHc, found_nSc in zip(grads, found, strict=True):
                grad_weights_nHS = torch.baddbmm(grad_weights_nHS, grad_NHc[part], found_nSc.mT)
            used_nHS = weights_nHS
            if ctx.kept_NHS is not None:
                used_nHS, grad_weights_nHS = weights_nHS * ctx.kept_NHS[part], grad_weights_nHS * ctx.kept_NHS[part]
            centred = grad_weights_nHS - (grad_weights_nHS * weights_nHS).sum(-1, keepdim=True)
            grad_scores_nHS = torch.mul(weights_nHS, centred, out=grad_bias_NHS[part])
            torch.cat([grad_scores_nHS @ found_nSc for found_nSc in found], dim=-1, out=grad_query_NHC[part])
            for number, grad_table in enumerate(wanted):
                if grad_table is not None:
                    grad_found = used_nHS.mT @ grads[number][part] + grad_scores_nHS.mT @ queries[number][part]
                    grad_table.index_add_(0, ctx.lines[number][part].reshape(-1), grad_found.flatten(0, 1))
        return grad_query_NHC, grad_bias_NHS, None, None, *wanted


def _widths(tables: Sequence[Tensor | CodedTable]) -> list[int]:
    return [table.shape[1] if isinstance(table, Tensor) else table.width for table in tables]


def _each(
    tables: Sequence[Tensor | CodedTable], joint: Tensor, change: Callable[[CodedTable, Tensor], Tensor]
) -> Tensor:
    """Change the parts of a tensor that belong to coded tables."""
    if all(isinstance(table, Tensor) for table in tables):
        return joint
    parts = zip(tables, joint.split(_widths(tables), dim=-1), strict=True)
    return torch.cat([part if isinstance(table, Tensor) else change(table, part) for table, part in parts], dim=-1)


def _masked(bias_NHS: Tensor, mask_NS: Tensor) -> tuple[Tensor, Tensor]:
    """The bias with masked sources at minus infinity, and the tokens without any source, whose bias stays finite."""
    empty_N1 = ~mask_NS.any(-1, keepdim=True)
    return bias_NHS.masked_fill(~(mask_NS | empty_N1)[:, None], float("-inf")), empty_N1[..., None]


def gathered(table: Tensor | CodedTable, lines_NS: Tensor) -> Tensor:
    """Some lines of a table in the space of queries, float32, [N, S, C]."""
    found = _gather(table, lines_NS, torch.float32)
    return found if isinstance(table, Tensor) else table.leave(found)


def _gather(table: Tensor | CodedTable, lines_nS: Tensor, kind: torch.dtype) -> Tensor:
    if not isinstance(table, Tensor):
        return table.gather(lines_nS).to(kind)
    return table.index_select(0, lines_nS.reshape(-1)).to(kind).view(*lines_nS.shape, -1)


def _chunks(lines_NS: Tensor, width: int) -> list[slice]:
    tokens, sources = lines_NS.shape
    size = max(1, CHUNK_VALUES.get(lines_NS.device.type, 2**20) // max(1, sources * width))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension's unmasked entries; all zero, not NaN, where there are none.

    >>> masked_softmax(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
