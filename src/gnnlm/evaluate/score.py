"""Scoring a split under all four predictors, with the time each part takes."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from gnnlm.graph.assemble import Assembler
from gnnlm.predict.predictor import PREDICTORS, Predictor
from gnnlm.progress import Track


def score_rows(
    predictor: Predictor, source: Assembler, block: int, label: str
) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, float]]:
    """Log-probability of every token by predictor, and seconds spent by part (`gnn`, `head`, `knn`)."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in PREDICTORS}
    seconds = {"gnn": 0.0, "head": 0.0, "knn": 0.0}
    with Track(label, len(source.queries), "tokens") as track:
        began = time.perf_counter()
        for piece in predictor.blocks(source, block):
            seconds["gnn"] += time.perf_counter() - began
            scores = predictor.target_log_probs(piece, source, seconds)
            for name, values in parts.items():
                values.append(scores[name].cpu())
            track.advance(len(piece.positions_N))
            began = time.perf_counter()
    return {name: torch.cat(values).double().numpy() for name, values in parts.items()}, seconds
