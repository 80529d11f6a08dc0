"""The one prediction step: from states and neighbours to the requested predictions.

Validation during training, tuning, evaluation, the API and the benchmarks all go through it.

Shapes: B texts, T tokens, N positions, K neighbours, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnlm.errors import ConfigError
from gnnlm.gnn.model import Carry, GnnModel, SourceCache
from gnnlm.graph.batch import Context
from gnnlm.lm.head import Head
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.knn import Mix, knn_log_probs, knn_target_log_probs, mix_log_probs
from gnnlm.retrieval.neighbours import Neighbours

PREDICTORS = ("base", "knn", "gnn", "gnn_knn")
LABELS = {"base": "base", "knn": "+kNN", "gnn": "+GNN", "gnn_knn": "+GNN+kNN"}
STATE_OF = {"base": "base", "knn": "base", "gnn": "gnn", "gnn_knn": "gnn"}  # whose state each predictor uses
MIXED = ("knn", "gnn_knn")  # the predictors that mix p_kNN in


def perplexity(loss: float) -> float:
    """exp of a mean negative log-probability; infinite if it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Prediction:
    """States for the frozen softmax, by origin (`base`, `gnn`), and the retrieved neighbours with their tokens.

    Tensors have any leading shape; `prediction[index]` picks positions of all of them. `real`, of that shape, is false
    at padding.
    """

    states: Mapping[str, Tensor]
    neighbours: Neighbours
    tokens: Tensor
    real: Tensor
    predictor: Predictor

    def __getitem__(self, index: Any) -> Prediction:
        states = {name: states[index] for name, states in self.states.items()}
        return Prediction(states, self.neighbours[index], self.tokens[index], self.real[index], self.predictor)

    def knn_weight(self, name: str) -> Tensor:
        """The weight of p_kNN at each position in a predictor that has one."""
        return self.predictor.mixes[STATE_OF[name]].weight_of(self.neighbours.similarity)

    def lm_target_log_probs(self, targets_N: Tensor) -> dict[str, Tensor]:
        """Log-probability of one token per position, [N], under each softmax, before any mix."""
        head = self.predictor.head
        return {name: head.target_log_probs(states_ND, targets_N) for name, states_ND in self.states.items()}

    def mixed_target_log_probs(
        self, lm: Mapping[str, Tensor], targets_N: Tensor, wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """The log-probabilities of the wanted predictors, [N] each, given those of each softmax."""
        scores = {}
        for name in wanted:
            scores[name] = lm[STATE_OF[name]]
            if name in MIXED:
                mix = self.predictor.mixes[STATE_OF[name]]
                knn = knn_target_log_probs(self.tokens, self.neighbours.similarity, targets_N, mix.k, mix.temperature)
                scores[name] = mix_log_probs(scores[name], knn, mix.weight_of(self.neighbours.similarity))
        return scores

    def target_log_probs(self, targets_N: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """Log-probability of one token per position, [N], by predictor; of a prediction over [N] positions."""
        return self.mixed_target_log_probs(self.lm_target_log_probs(targets_N), targets_N, wanted)

    def log_probs(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """Log-probabilities over the whole vocabulary, [N, V], by predictor; of a prediction over [N] positions."""
        head = self.predictor.head
        used = dict.fromkeys(STATE_OF[name] for name in wanted)
        lm = {name: head.log_probs(self.states[name]) for name in used}
        scores = {}
        for name in wanted:
            scores[name] = lm[STATE_OF[name]]
            if name in MIXED:
                mix = self.predictor.mixes[STATE_OF[name]]
                knn = knn_log_probs(self.tokens, self.neighbours.similarity, head.vocab_size, mix.k, mix.temperature)
                scores[name] = mix_log_probs(scores[name], knn, mix.weight_of(self.neighbours.similarity))
        return scores


@dataclass(frozen=True)
class Predictor:
    """A frozen softmax, a store, and what uses the neighbours: kNN mixes and optionally a graph network."""

    head: Head
    graphs: GraphBuilder
    gnn: GnnModel | None
    graph_k: int
    mixes: Mapping[str, Mix]  # by the state that is mixed with p_kNN: `base`, `gnn`
    cache: SourceCache | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The available predictors: all four, or two without a graph network."""
        return PREDICTORS if self.gnn is not None else ("base", "knn")

    def check(self, wanted: Collection[str]) -> None:
        """Refuse a predictor that does not exist, or that this run does not have."""
        for name in wanted:
            if name not in PREDICTORS:
                raise ConfigError(f"no predictor named {name!r}; this run has {', '.join(self.names)}")
            if name not in self.names:
                raise ConfigError(
                    f"predictor {name} needs a graph network, and this run was built without one (gnn.layers: 0); "
                    f"this run has {', '.join(self.names)}"
                )

    def neighbours_needed(self, wanted: Collection[str]) -> int:
        """How many neighbours of each position these predictors use."""
        ks = [self.mixes[STATE_OF[name]].k for name in wanted if name in MIXED]
        return max([*ks, *(self.graph_k for name in wanted if STATE_OF[name] == "gnn")], default=0)

    @torch.inference_mode()
    def step(
        self,
        context: Context,
        neighbours: Neighbours,
        wanted: Collection[str] = PREDICTORS,
        carry: Carry | None = None,
        rollback: int = 0,
        watch: list[Tensor] | None = None,
    ) -> tuple[Prediction, Carry | None]:
        """What is predicted after each context token, [B, T], and what the next block of the same texts needs.

        `neighbours` are those of every token, [B, T, K]; the graph takes the nearest `graph_k`. `watch` gets
        each layer's attention over the edges from neighbours, [B, T, H, S].
        """
        device = self.head.device
        base_BTD = context.states_BTD.to(device)
        states = {"base": base_BTD} if any(STATE_OF[name] == "base" for name in wanted) else {}
        if any(STATE_OF[name] == "gnn" for name in wanted):
            assert self.gnn is not None
            graph = self.graphs(context, neighbours.nearest(self.graph_k), states=self.cache is None).to(device)
            states["gnn"], carry = self.gnn(graph, carry, self.cache, rollback, watch)
        tokens_BTK = self.graphs.store.tokens(neighbours.positions.clamp(min=0))
        tokens_BTK = tokens_BTK.masked_fill_(neighbours.positions < 0, -1)
        real_BT = (context.document_BT >= 0).to(device)
        return Prediction(states, neighbours.to(device), tokens_BTK.to(device), real_BT, self), carry
