"""The kNN distribution and the linear mix, in log space.

    p_kNN(w) = sum over neighbours with token w of exp(similarity / T), normalised over all neighbours
    p(w)     = lambda p_kNN(w) + (1 - lambda) p_LM(w)

A position without neighbours has no p_kNN; its mix is p_LM.

Shapes: N positions, K neighbours, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gnnlm.lm.head import Confidence
from gnnlm.predict.gate import Gate, features


@dataclass(frozen=True)
class Evidence:
    """What the weight at a position may depend on, [N] each; `features_NF` only for a gate."""

    nearest_N: Tensor  # the similarity of the nearest neighbour; minus infinity where there is none
    read_N: Tensor  # tokens of the text read so far
    features_NF: Tensor | None = None


@dataclass(frozen=True)
class Mix:
    """How many neighbours, at which temperature, with which weight.

    The weight is the same everywhere, or comes from a bucket of the nearest neighbour's similarity (`edges` divide the
    similarities, `weights` has one weight per bucket), or from a gate. All texts share the state that predicts their
    first token, so its similarity to the first token of every document is 1 and means nothing; where `first` is given,
    it is the weight there.
    """

    k: int
    temperature: float
    weight: float
    edges: Sequence[float] = ()
    weights: Sequence[float] = ()
    first: float | None = None
    gate: Gate | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, (), [])}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Mix:
        """Return a mix from the values of `as_dict`."""
        gate = values.get("gate")
        return cls(**{**values, "gate": None if gate is None else Gate(**gate)})

    def neighbour_weights(self, similarity_NK: Tensor) -> Tensor:
        """Return the weights of the k nearest neighbours in p_kNN, [N, k]."""
        return neighbour_weights(similarity_NK[:, : self.k], self.temperature)

    def evidence(
        self, tokens_NK: Tensor, similarity_NK: Tensor, weights_NK: Tensor, read_N: Tensor, sure: Confidence | None
    ) -> Evidence:
        """Return what the weight depends on; a gate also needs how sure the softmax is.

        Neighbours come nearest first; `weights_NK` are those of `neighbour_weights`.
        """
        if self.gate is None:
            return Evidence(similarity_NK[:, 0], read_N)
        assert sure is not None, "a gate looks at the softmax"
        return Evidence(similarity_NK[:, 0], read_N, features(tokens_NK, similarity_NK, weights_NK, sure))

    def weight_of(self, evidence: Evidence) -> Tensor:
        """Return the weight of p_kNN at each position, [N]; 0 without neighbours.

        >>> mix = Mix(1, 1.0, 0.3, edges=(0.5,), weights=(0.1, 0.6), first=0.0)
        >>> mix.weight_of(Evidence(torch.tensor([0.4, 0.9, 1.0]), torch.tensor([2, 1, 0])))
        tensor([0.1000, 0.6000, 0.0000])
        """
        nearest_N = evidence.nearest_N
        if self.gate is not None:
            assert evidence.features_NF is not None
            weight_N = self.gate.weight_of(evidence.features_NF).to(nearest_N.dtype)
        elif self.weights:
            weight_N = nearest_N.new_tensor(self.weights)[bucket_of(nearest_N, self.edges)]
        else:
            weight_N = torch.full_like(nearest_N, self.weight)
        if self.first is not None:
            weight_N = weight_N.masked_fill(evidence.read_N == 0, self.first)
        return weight_N.masked_fill(torch.isneginf(nearest_N), 0.0)


def bucket_of(nearest_N: Tensor, edges: Sequence[float]) -> Tensor:
    """Return the bucket of each similarity: 0 below the first edge."""
    return torch.bucketize(nearest_N.contiguous(), nearest_N.new_tensor(edges), right=True)


def neighbour_weights(similarity_NK: Tensor, temperature: float) -> Tensor:
    """Return the softmax of similarity / T over the real neighbours; zeros where there are none.

    >>> neighbour_weights(torch.tensor([[0.5, 0.5, float("-inf")]]), 0.1)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    weights_NK = (similarity_NK / temperature).softmax(-1)
    return torch.nan_to_num(weights_NK, nan=0.0)


def knn_target_log_probs(tokens_NK: Tensor, weights_NK: Tensor, targets_N: Tensor) -> Tensor:
    """Return log p_kNN of one token per position, [N]; NaN where there is no neighbour.

    `tokens_NK` may have more neighbours than `weights_NK`; the nearest count.

    >>> knn_target_log_probs(torch.tensor([[7, 3, 7]]), torch.tensor([[0.5, 0.5]]), torch.tensor([7])).exp()
    tensor([0.5000])
    """
    hit_NK = tokens_NK[:, : weights_NK.shape[1]] == targets_N[:, None]
    empty_N = ~weights_NK.any(-1)
    return (weights_NK * hit_NK).sum(-1).log().masked_fill(empty_N, math.nan)


def mixed_log_probs(lm_NV: Tensor, tokens_NK: Tensor, weights_NK: Tensor, weight_N: Tensor) -> Tensor:
    """Return log(weight p_kNN + (1 - weight) p_LM) over the vocabulary, [N, V]; log p_LM without neighbours.

    Only the neighbours' tokens are mixed one by one; the others' log-probabilities are shifted.

    >>> lm = torch.tensor([[0.5, 0.3, 0.2]]).log()
    >>> mixed_log_probs(lm, torch.tensor([[2, 2, 0]]), torch.full((1, 3), 1 / 3), torch.tensor([0.6])).exp()
    tensor([[0.4000, 0.1200, 0.4800]])
    """
    tokens_NK = tokens_NK[:, : weights_NK.shape[1]].clamp(min=0)
    mass_NK = torch.zeros_like(lm_NV).scatter_add_(1, tokens_NK, weights_NK.to(lm_NV)).gather(1, tokens_NK)
    empty_N = ~weights_NK.any(-1)
    weight_N1 = weight_N.masked_fill(empty_N, 0.0)[:, None].to(lm_NV)
    out_NV = lm_NV + torch.log1p(-weight_N1)
    both_NK = torch.logaddexp(mass_NK.log() + weight_N1.log(), out_NV.gather(1, tokens_NK))
    return out_NV.scatter_(1, tokens_NK, both_NK)


def mix_log_probs(lm: Tensor, knn: Tensor, weight: float | Tensor) -> Tensor:
    """Return log(weight p_kNN + (1 - weight) p_LM), [N] or [N, V]; log p_LM where `knn` is NaN.

    There is one weight, or one per position.

    >>> mix_log_probs(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, math.nan]).log(), 0.5).exp()
    tensor([0.2500, 0.5000])
    """
    weight = torch.as_tensor(weight, dtype=lm.dtype, device=lm.device)
    weight = weight[:, None] if weight.ndim < lm.ndim and weight.ndim else weight
    mixed = torch.logaddexp(knn + weight.log(), lm + torch.log1p(-weight))
    return torch.where(knn.isnan() | (weight == 0), lm, mixed)
