"""Chunked attention over a shared table against a plain loop, and its gradients against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gnnlm.gnn.attend as module
from gnnlm.gnn.attend import attend, attend_projected


def plain(query: Tensor, bias: Tensor, table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    out = []
    for n in range(len(query)):
        heads = []
        for h in range(query.shape[1]):
            rows = [(s, table[index[n, s]]) for s in range(index.shape[1]) if mask[n, s]]
            if not rows:
                heads.append(torch.zeros_like(query[n, h]))
                continue
            weights = torch.stack([query[n, h] @ row + bias[n, h, s] for s, row in rows]).softmax(0)
            heads.append(sum(w * row for w, (_, row) in zip(weights, rows, strict=True)))
        out.append(torch.stack(heads))
    return torch.stack(out)


def inputs(seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, bias, two tables side by side (3 + 2 wide), lines in each, mask; token 3 has no source."""
    g = torch.Generator().manual_seed(seed)
    query, bias, left, right = (
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 2, 5), (5, 2, 6), (7, 3), (4, 2))
    )
    lines = torch.randint(0, 7, (5, 6), generator=g)
    other = torch.randint(0, 4, (5, 6), generator=g)
    mask = torch.rand(5, 6, generator=g) > 0.4
    mask[3] = False
    return query, bias, left, right, lines, other, mask


def joined(left: Tensor, right: Tensor, lines: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """One table with a line for every source."""
    table = torch.cat([left[lines], right[other]], dim=-1).flatten(0, 1)
    return table, torch.arange(lines.numel()).view_as(lines)


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
def test_forward_and_backward(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_VALUES, "cpu", chunk)
    query, bias, left, right, lines, other, mask = inputs()
    got = attend(query, bias, mask, (left, right), (lines, other))
    table, index = joined(left, right, lines, other)
    want = plain(query, bias, table, index, mask)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (got[3] == 0).all()
    weight = torch.randn_like(want)
    ours = torch.autograd.grad((got * weight).sum(), (query, bias, left, right))
    theirs = torch.autograd.grad((want * weight).sum(), (query, bias, left, right))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    query, bias, left, right, lines, other, mask = inputs(1)
    assert torch.autograd.gradcheck(
        lambda q, b, x, y: attend(q, b, mask, (x, y), (lines, other)), (query, bias, left, right)
    )


@pytest.mark.parametrize("chunk", [1, 10**6])
def test_dropout(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are dropped after the softmax; those that remain make up for them; gradients know which they are."""
    monkeypatch.setitem(module.CHUNK_VALUES, "cpu", chunk)
    query, bias, left, right, lines, other, mask = inputs(4)

    def dropped(q: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attend(q, b, mask, (x, y), (lines, other), dropout=0.4)

    assert torch.autograd.gradcheck(dropped, (query, bias, left, right))
    torch.manual_seed(0)
    kept = torch.nn.functional.dropout(torch.ones_like(bias), 0.4)
    table, index = joined(left, right, lines, other)
    scores = torch.einsum("nhc,nsc->nhs", query, table[index]) + bias
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num() * kept
    want = torch.einsum("nhs,nsc->nhc", weights, table[index])
    torch.testing.assert_close(dropped(query, bias, left, right), want)


def test_half_precision_tables_are_read_exactly() -> None:
    query, bias, left, right, lines, other, mask = (t.detach() for t in inputs(2))
    tables = (left.half(), right.half())
    got = attend(query, bias, mask, tables, (lines, other))
    want = attend(query, bias, mask, [t.double() for t in tables], (lines, other))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
def test_projected(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads side by side in each line: every head is an attention of its own."""
    monkeypatch.setitem(module.CHUNK_VALUES, "cpu", chunk)
    g = torch.Generator().manual_seed(3)
    _, bias, _, _, lines, _, mask = (t.detach() for t in inputs(3))
    query = torch.randn(5, 2, 4, generator=g, dtype=torch.float64)
    table = torch.randn(7, 16, generator=g, dtype=torch.float64)
    got = attend_projected(query, bias, mask, table, lines)
    for head in range(2):
        keys, values = table[:, head * 4 : head * 4 + 4], table[:, 8 + head * 4 : 12 + head * 4]
        for n in range(5):
            real = mask[n].nonzero()[:, 0]
            scores = keys[lines[n, real]] @ query[n, head] + bias[n, head, real]
            want = scores.softmax(0) @ values[lines[n, real]] if len(real) else torch.zeros(4, dtype=torch.float64)
            torch.testing.assert_close(got[n, head], want, rtol=1e-12, atol=1e-12)
