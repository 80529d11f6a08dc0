"""The one predictor: everything that scores, reports or writes goes through it.

Shapes: N positions, K neighbours, D width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnlm.gnn.model import Carry, GnnModel, SourceCache
from gnnlm.graph.assemble import Assembler
from gnnlm.lm.head import Head
from gnnlm.predict.knn import Mix, knn_log_probs, knn_target_log_probs, mix_log_probs

PREDICTORS = ("base", "knn", "gnn", "gnn_knn")
LABELS = {"base": "base", "knn": "+kNN", "gnn": "+GNN", "gnn_knn": "+GNN+kNN"}


def perplexity(loss: float) -> float:
    """exp of a mean negative log-probability; infinite where that is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Block:
    """Consecutive positions with their states under the base model and under the GNN."""

    positions_N: Tensor
    base_ND: Tensor
    gnn_ND: Tensor


@dataclass(frozen=True)
class Predictor:
    """Four log-probabilities for every position of a text."""

    head: Head
    model: GnnModel
    graph_k: int
    base_mix: Mix
    gnn_mix: Mix
    cache: SourceCache | None = None

    @torch.inference_mode()
    def blocks(self, source: Assembler, size: int) -> Iterator[Block]:
        """All positions of the source in order; the layers carry their states from block to block."""
        self.model.eval()
        device = self.head.device
        carry: Carry | None = None
        for positions_N in torch.arange(len(source.queries)).split(size):
            graph = source(positions_N[None], self.graph_k, states=self.cache is None).to(device)
            gnn_BND, carry = self.model(graph, carry, self.cache)
            yield Block(positions_N, graph.context_BTD[0], gnn_BND[0])

    @torch.inference_mode()
    def target_log_probs(
        self, block: Block, source: Assembler, seconds: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """Log-probability of the token at each position of the block that has one, by predictor.

        `seconds`, where given, is charged with the time of both softmaxes (`head`) and both mixes (`knn`).
        """
        began = time.perf_counter()
        device = block.base_ND.device
        targets_N = source.queries.tokens_P[block.positions_N]
        real = targets_N >= 0
        lines_N, real, targets_N = block.positions_N[real], real.to(device), targets_N[real].to(device)
        base = self.head.target_log_probs(block.base_ND[real], targets_N)
        gnn = self.head.target_log_probs(block.gnn_ND[real], targets_N)
        scores = {"base": base, "gnn": gnn}
        between = time.perf_counter()
        tokens_NK, similarity_NK = (t.to(device) for t in neighbour_tokens(source, lines_N))
        for name, lm, mix in (("knn", base, self.base_mix), ("gnn_knn", gnn, self.gnn_mix)):
            knn = knn_target_log_probs(tokens_NK, similarity_NK, targets_N, mix.k, mix.temperature)
            scores[name] = mix_log_probs(lm, knn, mix.weight_of(similarity_NK))
        if seconds is not None:
            seconds["head"] += between - began
            seconds["knn"] += time.perf_counter() - between
        return {name: scores[name] for name in PREDICTORS}

    @torch.inference_mode()
    def log_probs(self, block: Block, source: Assembler) -> dict[str, Tensor]:
        """Log-probabilities over the whole vocabulary at each position of the block, [N, V], by predictor."""
        tokens_NK, similarity_NK = (t.to(block.base_ND.device) for t in neighbour_tokens(source, block.positions_N))
        base, gnn = self.head.log_probs(block.base_ND), self.head.log_probs(block.gnn_ND)
        scores = {"base": base, "gnn": gnn}
        for name, lm, mix in (("knn", base, self.base_mix), ("gnn_knn", gnn, self.gnn_mix)):
            knn = knn_log_probs(tokens_NK, similarity_NK, self.head.vocab_size, mix.k, mix.temperature)
            scores[name] = mix_log_probs(lm, knn, mix.weight_of(similarity_NK))
        return {name: scores[name] for name in PREDICTORS}


def neighbour_tokens(source: Assembler, lines_N: Tensor) -> tuple[Tensor, Tensor]:
    """The next token and the similarity of each neighbour; -1 and minus infinity where there is none."""
    ids_NK = torch.from_numpy(source.ids[lines_N.numpy()]).long()
    similarity_NK = torch.from_numpy(source.similarity[lines_N.numpy()])
    tokens_NK = source.store.tokens_P[ids_NK.clamp(min=0)]
    return tokens_NK.masked_fill(ids_NK < 0, -1), similarity_NK
