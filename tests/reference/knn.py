"""p_kNN and the mix with dictionaries."""

from __future__ import annotations

import math
from collections import defaultdict


def knn_distribution(tokens: list[int], similarity: list[float], k: int, temperature: float) -> dict[int, float] | None:
    """Token -> probability; None without neighbours."""
    found = [(t, s) for t, s in zip(tokens[:k], similarity[:k], strict=True) if s != -math.inf]
    if not found:
        return None
    best = max(s for _, s in found)
    weights: dict[int, float] = defaultdict(float)
    for token, score in found:
        weights[token] += math.exp((score - best) / temperature)
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def mix(lm: dict[int, float], knn: dict[int, float] | None, weight: float) -> dict[int, float]:
    if knn is None:
        return lm
    return {token: weight * knn.get(token, 0.0) + (1 - weight) * p for token, p in lm.items()}
