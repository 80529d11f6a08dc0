"""The gate's weight at one position, with dictionaries and loops."""

from __future__ import annotations

import math

from gnnlm.predict.gate import LOGIT, SPREAD, Gate
from tests.reference.knn import knn_distribution


def gate_features(
    tokens: list[int], similarity: list[float], k: int, temperature: float, lm: list[float]
) -> list[float]:
    """What the gate sees at a position that has a neighbour; `lm` is the model's whole distribution."""
    knn = knn_distribution(tokens, similarity, k, temperature)
    assert knn is not None
    best = max(range(len(lm)), key=lambda token: lm[token])
    return [
        similarity[0],
        max(knn.values()),
        -sum(p * math.log(p) for p in knn.values() if p > 0),
        math.log(len(knn)),
        lm[best],
        -sum(p * math.log(p) for p in lm if p > 0),
        knn.get(best, 0.0),
    ]


def gate_weight(gate: Gate, found: list[float]) -> float:
    inputs = []
    for value, mean, spread in zip(found, gate.mean, gate.spread, strict=True):
        inputs.append(min(SPREAD, max(-SPREAD, (value - mean) / spread)))
    inputs.append(inputs[0] ** 2)
    logit = gate.bias
    for value, weight in zip(inputs, gate.weights, strict=True):
        logit += value * weight
    return 1 / (1 + math.exp(-min(LOGIT, max(-LOGIT, logit))))
