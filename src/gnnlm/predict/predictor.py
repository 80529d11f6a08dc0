"""The one prediction step: from states and neighbours to the requested predictions.

Validation during training, tuning, evaluation, the API and the benchmarks all use it.

Shapes: B texts, T tokens, N positions, K neighbours, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnlm.errors import ConfigError
from gnnlm.gnn.carry import Carry
from gnnlm.gnn.model import GnnModel, LayerAttention, SourceCache
from gnnlm.graph.batch import Context
from gnnlm.lm.head import Confidence, Head
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.knn import Mix, knn_target_log_probs, mix_log_probs, mixed_log_probs, neighbour_weights
from gnnlm.retrieval.neighbours import Neighbours

PREDICTORS = ("base", "knn", "gnn", "gnn_knn")
LABELS = {"base": "base", "knn": "+kNN", "gnn": "+GNN", "gnn_knn": "+GNN+kNN"}
STATE_OF = {"base": "base", "knn": "base", "gnn": "gnn", "gnn_knn": "gnn"}  # whose state each predictor uses
MIXED = ("knn", "gnn_knn")  # the predictors that mix p_kNN in


def perplexity(loss: float) -> float:
    """Return exp of a mean negative log-probability; infinity if that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


class Distribution(NamedTuple):
    """A predictor's log-probabilities over the vocabulary, and the weights of the mixture they come from."""

    log_probs_NV: Tensor
    knn_weight_N: Tensor  # of p_kNN in the mixture; 0 for a predictor without it
    neighbour_weights_NK: Tensor  # of the nearest neighbours in p_kNN


class LmScores(NamedTuple):
    """The log-probability of one token per position, [N], under a softmax, and how sure that is, if asked for."""

    log_probs: Tensor
    sure: Confidence | None = None


@dataclass(frozen=True)
class Prediction:
    """States for the frozen softmax, by origin (`base`, `gnn`), and the retrieved neighbours with their tokens.

    Tensors have any leading shape; `prediction[index]` picks positions of all of them. `real`, of that shape, is false
    at padding; `read` is the number of tokens of its text that were read before the prediction.
    """

    states: Mapping[str, Tensor]
    neighbours: Neighbours
    tokens: Tensor
    real: Tensor
    read: Tensor
    predictor: Predictor

    def __getitem__(self, index: Any) -> Prediction:
        states = {name: states[index] for name, states in self.states.items()}
        return Prediction(
            states,
            self.neighbours[index],
            self.tokens[index],
            self.real[index],
            self.read[index],
            self.predictor,
        )

    def lm_target_log_probs(self, targets_N: Tensor) -> dict[str, Tensor]:
        """Return the log-probability of one token per position, [N], under each softmax, before any mix."""
        head = self.predictor.head
        return {name: head.target_log_probs(states_ND, targets_N) for name, states_ND in self.states.items()}

    def lm_scores(self, targets_N: Tensor, confident: Collection[str]) -> dict[str, LmScores]:
        """Return the same, with how sure each softmax named in `confident` is."""
        head = self.predictor.head
        found = {}
        for name, states_ND in self.states.items():
            if name in confident:
                found[name] = LmScores(*head.target_confidence(states_ND, targets_N))
            else:
                found[name] = LmScores(head.target_log_probs(states_ND, targets_N))
        return found

    def neighbour_weights(self, name: str) -> Tensor:
        """Return the weights of the nearest neighbours in p_kNN, [N, k].

        For a predictor without p_kNN: those that all its neighbours would have.
        """
        mix = self.predictor.mixes[STATE_OF[name]]
        if name not in MIXED:
            return neighbour_weights(self.neighbours.similarity, mix.temperature)
        return mix.neighbour_weights(self.neighbours.similarity)

    def knn_weight(self, name: str, weights_NK: Tensor, sure: Confidence | None) -> Tensor:
        """Return the weight of p_kNN at each position, [N], in the predictor `knn` or `gnn_knn`.

        `weights_NK` are the neighbours' weights in p_kNN; `sure` is how sure the predictor's softmax is, for a gate.
        """
        mix = self.predictor.mixes[STATE_OF[name]]
        return mix.weight_of(mix.evidence(self.tokens, self.neighbours.similarity, weights_NK, self.read, sure))

    def mixed_target_log_probs(
        self, lm: Mapping[str, LmScores], targets_N: Tensor, wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """Return the log-probabilities of the wanted predictors, [N] each, given those of each softmax."""
        scores = {}
        for name in wanted:
            scores[name], sure = lm[STATE_OF[name]]
            if name in MIXED:
                weights_NK = self.neighbour_weights(name)
                knn_N = knn_target_log_probs(self.tokens, weights_NK, targets_N)
                scores[name] = mix_log_probs(scores[name], knn_N, self.knn_weight(name, weights_NK, sure))
        return scores

    def target_log_probs(self, targets_N: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return the log-probability of one token per position, [N], by predictor; needs [N] positions."""
        lm = self.lm_scores(targets_N, self.predictor.gated(wanted))
        return self.mixed_target_log_probs(lm, targets_N, wanted)

    def log_probs(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return log-probabilities over the vocabulary, [N, V], by predictor; of a prediction over [N] positions."""
        used = dict.fromkeys(STATE_OF[name] for name in wanted)
        lm = {state: self.predictor.head.log_probs(self.states[state]) for state in used}
        return {name: self._distribution(name, lm[STATE_OF[name]]).log_probs_NV for name in wanted}

    def distribution(self, name: str) -> Distribution:
        """Return one predictor's distribution; of a prediction over [N] positions."""
        return self._distribution(name, self.predictor.head.log_probs(self.states[STATE_OF[name]]))

    def _distribution(self, name: str, lm_NV: Tensor) -> Distribution:
        """Return a predictor's distribution, given its softmax."""
        weights_NK = self.neighbour_weights(name)
        if name not in MIXED:
            return Distribution(lm_NV, lm_NV.new_zeros(len(lm_NV)), weights_NK)
        gated = self.predictor.mixes[STATE_OF[name]].gate is not None
        weight_N = self.knn_weight(name, weights_NK, Confidence.of(lm_NV) if gated else None)
        return Distribution(mixed_log_probs(lm_NV, self.tokens, weights_NK, weight_N), weight_N, weights_NK)


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

    def gated(self, wanted: Collection[str]) -> set[str]:
        """The states whose softmax these predictors' gates look at."""
        mixed = {STATE_OF[name] for name in wanted if name in MIXED}
        return {state for state in mixed if self.mixes[state].gate is not None}

    @torch.inference_mode()
    def step(
        self,
        context: Context,
        neighbours: Neighbours,
        wanted: Collection[str] = PREDICTORS,
        carry: Carry | None = None,
        rollback: int = 0,
        watch: list[LayerAttention] | None = None,
    ) -> tuple[Prediction, Carry | None]:
        """What is predicted after each context token, [B, T], and what the next block of the same texts needs.

        `neighbours` are those of every token, [B, T, K]; the graph takes the nearest `graph_k`. `watch` gets
        each layer's attention.
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
        read_BT = context.position_BT.to(device)
        return Prediction(states, neighbours.to(device), tokens_BTK.to(device), real_BT, read_BT, self), carry
