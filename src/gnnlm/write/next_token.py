"""What a predictor says of the next token at some positions, and the record of the token that is chosen there.

Shapes: N positions, K neighbours, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnlm.predict.predictor import MIXED, Prediction
from gnnlm.write.text_state import Voters, WrittenToken


@dataclass(frozen=True)
class NextTokens:
    """Log-probabilities, and each neighbour's part in the probability of its token.

    A predictor without p_kNN takes nothing from single neighbours: their parts are then the weights that p_kNN would
    give them.
    """

    prediction: Prediction
    log_probs_NV: Tensor
    parts_NK: Tensor
    mixed: bool

    @classmethod
    def of(cls, prediction: Prediction, predictor: str) -> NextTokens:
        """Return a predictor's next tokens; of a prediction over [N] positions."""
        found = prediction.distribution(predictor)
        mixed = predictor in MIXED
        parts_NK = found.neighbour_weights_NK
        if mixed:
            parts_NK = parts_NK * found.knn_weight_N[:, None]
        unused = prediction.tokens.shape[-1] - parts_NK.shape[-1]  # neighbours that p_kNN does not look at
        return cls(prediction, found.log_probs_NV, torch.nn.functional.pad(parts_NK, (0, unused)), mixed)

    def record(self, position: int, token: int, top: int) -> WrittenToken:
        """Return the record of a token that is written at a position, with the `top` likeliest tokens there."""
        at = self.prediction[position]
        log_probs_V = self.log_probs_NV[position]
        log_prob = float(log_probs_V[token])
        hits = torch.nonzero(at.tokens == token)[:, 0]
        parts = self.parts_NK[position, hits]
        share = torch.zeros_like(parts)
        if self.mixed and log_prob > -math.inf:
            share = (parts.double() / math.exp(log_prob)).float()
        voters = at.neighbours[hits]
        return WrittenToken(
            token,
            log_prob,
            at.states["base"],
            Voters(voters.positions.cpu(), voters.similarity.cpu(), parts.cpu(), share.cpu()),
            likeliest(log_probs_V, top),
        )


def likeliest(log_probs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens and their log-probabilities, likeliest first.

    >>> likeliest(torch.tensor([-3.0, -1.0, -2.0]), 2)
    ((1, -1.0), (2, -2.0))
    """
    if not count:
        return ()
    best = log_probs_V.topk(min(count, len(log_probs_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
