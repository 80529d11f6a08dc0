"""Chunked attention over a shared table against a plain loop, and its gradients against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gnnlm.gnn.attend as module
from gnnlm.gnn.attend import attend


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
    g = torch.Generator().manual_seed(seed)
    query, bias, table = (
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 2, 4), (5, 2, 6), (7, 4))
    )
    index = torch.randint(0, 7, (5, 6), generator=g)
    mask = torch.rand(5, 6, generator=g) > 0.4
    mask[3] = False
    return query, bias, table, index, mask


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
def test_forward_and_backward(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_VALUES", chunk)
    query, bias, table, index, mask = inputs()
    got, want = attend(query, bias, table, index, mask), plain(query, bias, table, index, mask)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (got[3] == 0).all()
    weight = torch.randn_like(want)
    ours = torch.autograd.grad((got * weight).sum(), (query, bias, table))
    theirs = torch.autograd.grad((want * weight).sum(), (query, bias, table))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    query, bias, table, index, mask = inputs(1)
    assert torch.autograd.gradcheck(lambda q, b, t: attend(q, b, t, index, mask), (query, bias, table))
