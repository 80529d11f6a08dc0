"""Attention of tokens over lines of shared tables, without ever holding [tokens, sources, width].

Many tokens retrieve the same rows, so the states of the sources are lines of a table, and every token has a list of
line numbers. A chunk of tokens gathers its lines, uses them, and gathers them again in the backward pass: memory grows
with the chunk, not with the number of edges.

Two functions give the same result, equal to rounding:
- `attend` takes queries that are already in the tables' space. It scores and averages raw states; the caller projects
  each average once, instead of projecting every source. It is differentiable.
- `attend_projected` takes a table of keys and values, projected once. It does less work per edge and needs twice the
  memory. For a frozen network only.

Shapes: N tokens, H heads, d head width, S sources per token, C the tables' joint width, R lines of a table. In lower
case, n: the tokens of one chunk, c: the width of one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_VALUES = {"cpu": 2**20, "cuda": 2**27}  # values gathered at once; on a CPU these 4 MB stay in the cache


class GatherTable(Protocol):
    """A table whose lines are decoded, or found in several files, when they are gathered.

    It may decode into a space of its own (a rotated one, for example): `enter` maps queries into that space and `leave`
    maps averages out of it. Tables of projected keys and values have no space of their own.
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
    tables: Sequence[Tensor | GatherTable],
    lines_NS: Sequence[Tensor],
    dropout: float = 0.0,
) -> Tensor:
    """Return the average of each token's unmasked sources under softmax(query . source + bias), [N, H, C].

    A source is one line of each table, side by side. A token without a source gets zeros. `dropout` sets this share of
    the weights to zero and scales up the others.

    >>> query_NHC = torch.tensor([[[0.0, 0.0]], [[5.0, 0.0]]])
    >>> table_RC = torch.tensor([[9.0, 1.0], [-9.0, 3.0]])
    >>> lines_NS, mask_NS = torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2, dtype=torch.bool)
    >>> attend(query_NHC, torch.zeros(2, 1, 2), mask_NS, [table_RC], [lines_NS])
    tensor([[[0., 2.]],
    <BLANKLINE>
            [[9., 1.]]])
    """
    with torch.autocast(query_NHC.device.type, enabled=False):  # scores and sums stay in full precision
        dtype = torch.promote_types(query_NHC.dtype, torch.float32)
        bias_NHS, empty_N11 = _masked(bias_NHS.to(dtype), mask_NS)
        query_NHC = _map_gathered(tables, query_NHC.to(dtype), lambda table, part: table.enter(part))
        kept_NHS = F.dropout(torch.ones_like(bias_NHS), dropout) if dropout else None
        out: Tensor = _Attend.apply(query_NHC, bias_NHS, kept_NHS, tuple(lines_NS), *tables)
        return _map_gathered(tables, out, lambda table, part: table.leave(part)).masked_fill(empty_N11, 0.0)


def attend_projected(
    query_NHd: Tensor, bias_NHS: Tensor, mask_NS: Tensor, table_RC: Tensor | GatherTable, lines_NS: Tensor
) -> Tensor:
    """Return the same average over a table with keys and values side by side in each line, [N, H, d]."""
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
        *tables: Tensor | GatherTable,
    ) -> Tensor:
        widths = _widths(tables)
        weights_NHS, out_NHC = torch.empty_like(bias_NHS), torch.empty_like(query_NHC)
        queries, averages = query_NHC.split(widths, dim=-1), out_NHC.split(widths, dim=-1)
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
        ctx.tables = [None if isinstance(table, Tensor) else table for table in tables]
        ctx.save_for_backward(query_NHC, weights_NHS, *(table for table in tables if isinstance(table, Tensor)))
        return out_NHC

    @staticmethod
    def backward(ctx: Any, grad_NHC: Tensor) -> tuple[Tensor | None, ...]:
        query_NHC, weights_NHS, *plain = ctx.saved_tensors
        tables = [coded or plain.pop(0) for coded in ctx.tables]
        grad_tables = [
            torch.zeros_like(table) if isinstance(table, Tensor) and needed else None
            for table, needed in zip(tables, ctx.needs_input_grad[4:], strict=True)
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
            centred_nHS = grad_weights_nHS - (grad_weights_nHS * weights_nHS).sum(-1, keepdim=True)
            grad_scores_nHS = torch.mul(weights_nHS, centred_nHS, out=grad_bias_NHS[part])
            torch.cat([grad_scores_nHS @ found_nSc for found_nSc in found], dim=-1, out=grad_query_NHC[part])
            for number, grad_table in enumerate(grad_tables):
                if grad_table is not None:
                    grad_found = used_nHS.mT @ grads[number][part] + grad_scores_nHS.mT @ queries[number][part]
                    grad_table.index_add_(0, ctx.lines[number][part].reshape(-1), grad_found.flatten(0, 1))
        return grad_query_NHC, grad_bias_NHS, None, None, *grad_tables


def _widths(tables: Sequence[Tensor | GatherTable]) -> list[int]:
    return [table.shape[1] if isinstance(table, Tensor) else table.width for table in tables]


def _map_gathered(
    tables: Sequence[Tensor | GatherTable], joint: Tensor, change: Callable[[GatherTable, Tensor], Tensor]
) -> Tensor:
    """Apply `change` to the parts of a tensor [..., C] that belong to tables with `enter` and `leave`."""
    if all(isinstance(table, Tensor) for table in tables):
        return joint
    parts = zip(tables, joint.split(_widths(tables), dim=-1), strict=True)
    return torch.cat([part if isinstance(table, Tensor) else change(table, part) for table, part in parts], dim=-1)


def _masked(bias_NHS: Tensor, mask_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias with masked sources at minus infinity, and which tokens have no source, [N, 1, 1].

    The bias of tokens without a source stays finite, so that their softmax is not NaN.
    """
    empty_N1 = ~mask_NS.any(-1, keepdim=True)
    return bias_NHS.masked_fill(~(mask_NS | empty_N1)[:, None], float("-inf")), empty_N1[..., None]


def gathered(table: Tensor | GatherTable, lines_NS: Tensor) -> Tensor:
    """Return lines of a table in the space of unmapped queries, float32, [N, S, C]."""
    found = _gather(table, lines_NS, torch.float32)
    return found if isinstance(table, Tensor) else table.leave(found)


def _gather(table: Tensor | GatherTable, lines_nS: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(table, Tensor):
        return table.gather(lines_nS).to(dtype)
    return table.index_select(0, lines_nS.reshape(-1)).to(dtype).view(*lines_nS.shape, -1)


def _chunks(lines_NS: Tensor, width: int) -> list[slice]:
    tokens, sources = lines_NS.shape
    size = max(1, CHUNK_VALUES.get(lines_NS.device.type, 2**20) // max(1, sources * width))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax over the last dimension's unmasked entries; zeros, not NaN, where all are masked.

    >>> masked_softmax(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
