"""The parts of the analysis in the order of the page, and the preparations that they read."""

from __future__ import annotations

from functools import partial
from typing import Any

from gnnlm.evaluate.analysis import (
    alternatives,
    calibration,
    complexity,
    components,
    gain_by_kind,
    gain_examples,
    growth,
    neighbour_counts,
    representation,
    search_quality,
    target_recall,
    tuning_surface,
    word_gains,
)
from gnnlm.evaluate.analysis.gnn_store import build_gnn_store
from gnnlm.evaluate.analysis.part import AnalysisPart, Preparation
from gnnlm.evaluate.analysis.score_cache import score_split

PREPARATIONS: dict[str, Preparation] = {
    preparation.name: preparation
    for preparation in (
        Preparation("scored-valid", partial(score_split, split="valid"), lambda run: 2 * run.seconds_to_score("valid")),
        Preparation("scored-test", partial(score_split, split="test"), lambda run: 2 * run.seconds_to_score("test")),
        Preparation("gnn-store", build_gnn_store, lambda run: 2 * run.seconds_of_network("train")),
    )
}
MODULES = (
    neighbour_counts,
    target_recall,
    representation,
    components,
    tuning_surface,
    gain_by_kind,
    calibration,
    word_gains,
    gain_examples,
    complexity,
    search_quality,
    alternatives,
    growth,
)
PARTS: dict[str, AnalysisPart[Any]] = {module.PART.name: module.PART for module in MODULES}
