"""How the next token is chosen from a distribution.

A choice depends on the distribution, the tokens so far, and one uniform number that is keyed on (seed, sample, place).
So it does not matter in which batch, or after which draft, a distribution was computed.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from gnnlm.errors import ConfigError

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token; the filters apply in this order, each to what the last one left.

    `repetition_penalty` multiplies the log-probability of every token of the prompt and of the text so far. `top_k` of
    0, `top_p` of 1 and `min_p` of 0 filter nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name in ("top_k", "seed")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"{field.name}: expected {kind}, got {value!r}")
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 2**31)
        _within("top_p", self.top_p, 0.0, 1.0, above=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _within("seed", self.seed, 0, LARGEST_SEED)

    def choose(self, log_probs_V: Tensor, seen: Tensor, sample: int, place: int) -> int:
        """The token at a place of the text, after the tokens `seen`."""
        scores_V = log_probs_V
        if self.repetition_penalty != 1.0 and len(seen):
            scores_V = scores_V.clone()
            scores_V[seen] *= self.repetition_penalty  # log-probabilities are never positive
        if not self.temperature:
            return int(scores_V.argmax())
        probs_V = self.filtered(scores_V)
        total_V = probs_V.cumsum(0)
        # in the order of token ids: a rounding difference then moves a boundary by as little as itself
        wanted = uniform(self.seed, sample, place) * float(total_V[-1])
        place_ = int(torch.searchsorted(total_V, torch.tensor(wanted, dtype=total_V.dtype), right=True))
        return min(place_, int(probs_V.nonzero()[-1]))

    def filtered(self, scores_V: Tensor) -> Tensor:
        """Probabilities after temperature and filters, in double precision; not normalised.

        >>> Sampling(temperature=1.0, top_k=2).filtered(torch.tensor([0.5, 0.2, 0.3]).log()).round(decimals=3).tolist()
        [0.5, 0.0, 0.3]
        """
        probs_V = (scores_V.double() / self.temperature).softmax(0)
        if 0 < self.top_k < len(probs_V):
            probs_V = probs_V.masked_fill(probs_V < probs_V.topk(self.top_k).values[-1], 0.0)
        if self.top_p < 1.0:
            ordered, order = probs_V.sort(descending=True, stable=True)
            before = ordered.cumsum(0) - ordered  # the mass of the tokens that are likelier
            dropped = order[before >= self.top_p * float(probs_V.sum())]
            probs_V = probs_V.index_fill(0, dropped, 0.0)
        if self.min_p > 0.0:
            probs_V = probs_V.masked_fill(probs_V < self.min_p * float(probs_V.max()), 0.0)
        return probs_V


def uniform(seed: int, sample: int, place: int) -> float:
    """A number in [0, 1) that depends on nothing else.

    >>> uniform(1, 0, 5) == uniform(1, 0, 5) != uniform(1, 0, 6)
    True
    """
    return float(np.random.Generator(np.random.Philox(key=[seed, sample], counter=[place, 0, 0, 0])).random())


def _within(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name}: expected a number {bounds}, got {value}")
