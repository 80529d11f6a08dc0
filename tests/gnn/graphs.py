"""Random graphs for the tests of the network."""

from __future__ import annotations

from typing import Any

import torch

from gnnlm.graph.batch import Context, Graph, Windows, build_graph


def random_graph(
    *, blocks: int = 2, tokens: int = 7, k: int = 3, width: int = 8, window: int = 3, vocab: int = 11, seed: int = 0
) -> Graph:
    """Two documents per block, shared rows, missing neighbours, a token without any, windows cut at document ends."""
    g = torch.Generator().manual_seed(seed)
    double: dict[str, Any] = {"generator": g, "dtype": torch.float64}
    neighbours = torch.randint(0, 6, (blocks, tokens, k), generator=g)
    neighbours[torch.rand(neighbours.shape, generator=g) < 0.2] = -1
    neighbours[0, 2] = -1
    cut = torch.rand(blocks, generator=g) * tokens
    document = (torch.arange(tokens)[None] >= cut[:, None]).long() + 2 * torch.arange(blocks)[:, None]

    def windows_of(rows: torch.Tensor) -> Windows:
        slots = torch.rand(len(rows), window, generator=g) > 0.25
        slots[:, window // 2] = True
        positions = 2 * len(rows)  # fewer than slots: some are shared
        return Windows(
            rows,
            torch.randint(0, positions, (len(rows), window), generator=g),
            slots,
            torch.randn(positions, width, **double),
            torch.randint(-1, vocab, (positions,), generator=g),
        )

    position = torch.arange(tokens).expand(blocks, tokens)
    return build_graph(
        Context(torch.randn(blocks, tokens, width, **double), position, document),
        neighbours,
        torch.rand(blocks, tokens, k, **double) * 0.05 + 0.9,
        windows_of,
    )
