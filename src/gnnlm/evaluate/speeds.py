"""Tokens per second of each predictor, from the seconds that its parts took."""

from __future__ import annotations

from collections.abc import Collection, Mapping

PARTS = {  # what each predictor spends time on
    "base": ("encode", "head"),
    "knn": ("encode", "head", "search", "knn"),
    "gnn": ("encode", "head", "search", "gnn"),
    "gnn_knn": ("encode", "head", "search", "gnn", "knn"),
}


def seconds_each(seconds: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """The seconds of scoring several predictors at once as those of one.

    The pass made a softmax for each state and a mix for each predictor that has one.
    """
    shared = len(names) / 2
    return {part: value / shared if part in ("head", "knn") else value for part, value in seconds.items()}


def speeds(names: Collection[str], seconds: Mapping[str, float], tokens: int) -> dict[str, float]:
    return {name: tokens / sum(seconds[part] for part in PARTS[name]) for name in names}
