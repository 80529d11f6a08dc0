"""The kNN distribution and the linear mix, in log space.

    p_kNN(w) = sum over neighbours with token w of exp(similarity / T), normalised over all neighbours
    p(w)     = lambda p_kNN(w) + (1 - lambda) p_LM(w)

A position without neighbours has no p_kNN; its mix is p_LM.

Shapes: N positions, K neighbours, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mix:
    """How many neighbours, at which temperature, with which weight.

    The weight may depend on the similarity of the nearest neighbour: `edges` divide the similarities into buckets, and
    `weights` has one weight per bucket. Without them, the weight is the same everywhere.
    """

    k: int
    temperature: float
    weight: float
    edges: Sequence[float] = ()
    weights: Sequence[float] = ()

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values if self.weights else {name: values[name] for name in ("k", "temperature", "weight")}

    def weight_of(self, similarity_NK: Tensor) -> Tensor:
        """The weight at each position, [N], given its neighbours' similarity, nearest first.

        >>> Mix(1, 1.0, 0.3, edges=(0.5,), weights=(0.1, 0.6)).weight_of(torch.tensor([[0.4, 0.3], [0.9, 0.2]]))
        tensor([0.1000, 0.6000])
        """
        nearest_N = similarity_NK[:, 0]
        if not self.weights:
            return torch.full_like(nearest_N, self.weight)
        return nearest_N.new_tensor(self.weights)[bucket_of(nearest_N, self.edges)]


def bucket_of(nearest_N: Tensor, edges: Sequence[float]) -> Tensor:
    """The bucket that each similarity falls into: 0 below the first edge."""
    return torch.bucketize(nearest_N.contiguous(), nearest_N.new_tensor(edges), right=True)


def neighbour_weights(similarity_NK: Tensor, temperature: float) -> Tensor:
    """Softmax of similarity / T over the real neighbours; zeros where there are none.

    >>> neighbour_weights(torch.tensor([[0.5, 0.5, float("-inf")]]), 0.1)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    weights_NK = (similarity_NK / temperature).softmax(-1)
    return torch.nan_to_num(weights_NK, nan=0.0)


def knn_target_log_probs(
    tokens_NK: Tensor, similarity_NK: Tensor, targets_N: Tensor, k: int, temperature: float
) -> Tensor:
    """log p_kNN of one token per position, [N]; NaN where there is no neighbour."""
    scores_NK = similarity_NK[:, :k] / temperature
    hit_NK = tokens_NK[:, :k] == targets_N[:, None]
    hits_N = scores_NK.masked_fill(~hit_NK, -math.inf).logsumexp(-1)
    return hits_N - scores_NK.logsumexp(-1)


def knn_log_probs(tokens_NK: Tensor, similarity_NK: Tensor, vocab: int, k: int, temperature: float) -> Tensor:
    """log p_kNN over the whole vocabulary, [N, V]; NaN where there is no neighbour."""
    weights_NK = neighbour_weights(similarity_NK[:, :k], temperature)
    probs_NV = weights_NK.new_zeros(len(weights_NK), vocab)
    probs_NV.scatter_add_(1, tokens_NK[:, :k].clamp(min=0), weights_NK)
    empty_N = torch.isneginf(similarity_NK[:, :k]).all(-1)
    return probs_NV.log().masked_fill(empty_N[:, None], math.nan)


def mix_log_probs(lm: Tensor, knn: Tensor, weight: float | Tensor) -> Tensor:
    """log(weight p_kNN + (1 - weight) p_LM), [N] or [N, V]; p_LM where `knn` is NaN; one weight, or one per position.

    >>> mix_log_probs(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, math.nan]).log(), 0.5).exp()
    tensor([0.2500, 0.5000])
    """
    weight = torch.as_tensor(weight, dtype=lm.dtype, device=lm.device)
    weight = weight[:, None] if weight.ndim < lm.ndim and weight.ndim else weight
    mixed = torch.logaddexp(knn + weight.log(), lm + torch.log1p(-weight))
    return torch.where(knn.isnan() | (weight == 0), lm, mixed)
