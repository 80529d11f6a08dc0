"""How the next token is chosen from a distribution.

A choice depends on the distribution, the tokens so far, and one uniform number that is keyed on (seed, sample, place).
So it does not matter in which batch, or after which draft, a distribution was computed.

Shapes: V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnlm.write.generate_options import GenerateOptions


def choose_token(options: GenerateOptions, log_probs_V: Tensor, seen: Tensor, sample: int, place: int) -> int:
    """Return the token at a place of the text, after the tokens `seen`.

    `repetition_penalty` multiplies the log-probability of every token of the prompt and of the text so far.
    Temperature 0 takes the likeliest token.
    """
    scores_V = log_probs_V
    if options.repetition_penalty != 1.0 and len(seen):
        scores_V = scores_V.clone()
        scores_V[seen] *= options.repetition_penalty  # log-probabilities are never positive
    if not options.temperature:
        return int(scores_V.argmax())
    probs_V = filtered_probs(options, scores_V)
    total_V = probs_V.cumsum(0)
    # in the order of token ids: a rounding difference then moves a boundary by as little as itself
    drawn = uniform(options.seed, sample, place) * float(total_V[-1])
    token = int(torch.searchsorted(total_V, torch.tensor(drawn, dtype=total_V.dtype), right=True))
    return min(token, int(probs_V.nonzero()[-1]))


def filtered_probs(options: GenerateOptions, scores_V: Tensor) -> Tensor:
    """Return probabilities after temperature and filters, in double precision; not normalised.

    The filters apply in this order, each to what the last one left: `top_k`, `top_p`, `min_p`.

    >>> options = GenerateOptions(temperature=1.0, top_k=2)
    >>> filtered_probs(options, torch.tensor([0.5, 0.2, 0.3]).log()).round(decimals=3).tolist()
    [0.5, 0.0, 0.3]
    """
    probs_V = (scores_V.double() / options.temperature).softmax(0)
    if 0 < options.top_k < len(probs_V):
        probs_V = probs_V.masked_fill(probs_V < probs_V.topk(options.top_k).values[-1], 0.0)
    if options.top_p < 1.0:
        ordered, order = probs_V.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered  # the mass of the tokens that are likelier
        dropped = order[before >= options.top_p * float(probs_V.sum())]
        probs_V = probs_V.index_fill(0, dropped, 0.0)
    if options.min_p > 0.0:
        probs_V = probs_V.masked_fill(probs_V < options.min_p * float(probs_V.max()), 0.0)
    return probs_V


def uniform(seed: int, sample: int, place: int) -> float:
    """Return a number in [0, 1) that depends on nothing else.

    >>> uniform(1, 0, 5) == uniform(1, 0, 5) != uniform(1, 0, 6)
    True
    """
    return float(np.random.Generator(np.random.Philox(key=[seed, sample], counter=[place, 0, 0, 0])).random())
