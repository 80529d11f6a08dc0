"""A learned gate: the weight of p_kNN from features of a position, by logistic regression.

    lambda = sigmoid(w . f + b)

The features f are those of `FEATURES`, standardised with their mean and spread on valid. All of them are finite
wherever there is a neighbour, for any k and either metric.

Shapes: N positions, K neighbours, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnlm.lm.head import Confidence

FEATURES = (
    "similarity",  # of the nearest neighbour
    "knn max",  # the probability of p_kNN's best token
    "knn entropy",
    "knn tokens",  # log of the number of distinct tokens among the neighbours
    "lm max",
    "lm entropy",
    "agreement",  # what p_kNN gives to the model's best token
)
SPREAD = 4.0  # a feature counts as at most this far from its mean on valid, in standard deviations
LOGIT = 10.0  # keeps the weight away from 0 and 1 by 5e-5


def features(tokens_NK: Tensor, similarity_NK: Tensor, weights_NK: Tensor, sure: Confidence) -> Tensor:
    """Return what the gate sees, float64 [N, F].

    Neighbours come nearest first; those that have a weight in p_kNN count.
    """
    tokens_NK = tokens_NK[:, : weights_NK.shape[1]]
    probs_NK, tokens = token_probs(tokens_NK, weights_NK.double())
    agreement_N = (weights_NK * (tokens_NK == sure.token[:, None])).sum(-1)
    columns = (
        similarity_NK[:, 0],
        probs_NK.amax(-1),
        torch.special.entr(probs_NK).sum(-1),
        tokens.clamp(min=1).log(),
        sure.log_prob.exp(),
        sure.entropy,
        agreement_N,
    )
    return torch.stack([column.double() for column in columns], dim=-1)


def token_probs(tokens_NK: Tensor, weights_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of each distinct token, by token id and padded with zeros, and the number of tokens.

    >>> token_probs(torch.tensor([[7, 3, 7]]), torch.tensor([[0.5, 0.25, 0.25]]))
    (tensor([[0.2500, 0.7500, 0.0000]]), tensor([2]))
    """
    tokens_NK, order_NK = tokens_NK.sort(-1)
    new_NK = torch.ones_like(tokens_NK)
    new_NK[:, 1:] = tokens_NK[:, 1:] != tokens_NK[:, :-1]
    place_NK = new_NK.cumsum(-1) - 1
    probs_NK = torch.zeros_like(weights_NK).scatter_add_(-1, place_NK, weights_NK.gather(-1, order_NK))
    return probs_NK, (new_NK * (tokens_NK >= 0)).sum(-1)


@dataclass(frozen=True)
class Gate:
    """The mean and spread of each feature on valid, its weight, the weight of the similarity's square, and the bias."""

    mean: Sequence[float]
    spread: Sequence[float]
    weights: Sequence[float]
    bias: float

    def weight_of(self, features_NF: Tensor) -> Tensor:
        """Return the weight of p_kNN at each position, float64 [N], above 0 and below 1."""
        inputs_NF = standardised(features_NF, self.mean, self.spread)
        logits_N = inputs_NF @ inputs_NF.new_tensor(self.weights) + self.bias
        return logits_N.clamp(-LOGIT, LOGIT).sigmoid()


def standardised(features_NF: Tensor, mean: Sequence[float], spread: Sequence[float]) -> Tensor:
    """Return the inputs of the regression, [N, F + 1]: standardised features, and the square of the similarity.

    With the square, the weight may fall again, or rise faster, where neighbours are very similar.
    """
    scaled_NF = (features_NF - features_NF.new_tensor(mean)) / features_NF.new_tensor(spread)
    scaled_NF = torch.nan_to_num(scaled_NF, nan=0.0).clamp(-SPREAD, SPREAD)
    return torch.cat([scaled_NF, scaled_NF[:, :1].square()], dim=-1)
