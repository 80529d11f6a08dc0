"""Scoring a text whose states and neighbours are on disk, block after block, through the one prediction step."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.datastore.store import Segment
from gnnlm.graph.batch import Context
from gnnlm.lm.head import Confidence
from gnnlm.predict.predictor import Prediction, Predictor
from gnnlm.progress import Track
from gnnlm.retrieval.neighbours import NeighbourTable

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SearchedText:
    """An encoded and searched split: its positions and the neighbours of each.

    `continuous`: the LM read on from one document to the next, so the split is one text.
    """

    text: Segment
    table: NeighbourTable
    continuous: bool = False

    def context(self, positions_BT: Tensor) -> Context:
        """Context nodes of some positions, [B, T]."""
        return Context(self.text.states(positions_BT), self.read(positions_BT), self.text.document_of(positions_BT))

    def read(self, positions: Tensor) -> Tensor:
        """The number of tokens of its text that are read before each position's prediction."""
        return positions if self.continuous else positions - self.text.bounds(positions)[0]

    def predictions(
        self, predictor: Predictor, block: int, wanted: Collection[str], positions: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Prediction]]:
        """All positions (or some, in order) in blocks: positions [N], and what is predicted there."""
        k = predictor.neighbours_needed(wanted)
        positions = torch.arange(len(self.text)) if positions is None else positions
        carry = None
        for positions_N in positions.split(block):
            context, found = self.context(positions_N[None]), self.table.at(positions_N, k)
            prediction, carry = predictor.step(context, found[None], wanted, carry)
            yield positions_N, prediction[0]


@dataclass(frozen=True)
class Scored:
    """The log-probability of every token by predictor, the seconds spent by part (`gnn`, `head`, `knn`), and how sure
    each softmax was that was asked about it."""

    log_probs: dict[str, Floats]
    seconds: dict[str, float]
    sure: dict[str, Confidence]


def score_text(
    predictor: Predictor,
    text: SearchedText,
    block: int,
    label: str,
    wanted: Collection[str],
    positions: Tensor | None = None,
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Log-probability of every token by predictor, and seconds spent by part (`gnn`, `head`, `knn`)."""
    found = score_surely(predictor, text, block, label, wanted, (), positions)
    return found.log_probs, found.seconds


@torch.inference_mode()
def score_surely(
    predictor: Predictor,
    text: SearchedText,
    block: int,
    label: str,
    wanted: Collection[str],
    confident: Collection[str],
    positions: Tensor | None = None,
) -> Scored:
    """Score every token, and keep how sure the softmax of each state named in `confident` was."""
    parts: dict[str, list[Tensor]] = {name: [] for name in wanted}
    sure: dict[str, list[Confidence]] = {name: [] for name in confident}
    asked = predictor.gated(wanted) | set(confident)
    seconds = {"gnn": 0.0, "head": 0.0, "knn": 0.0}
    device = predictor.head.device
    with Track(label, len(text.text) if positions is None else len(positions), "tokens") as track:
        began = time.perf_counter()
        for positions_N, prediction in text.predictions(predictor, block, wanted, positions):
            seconds["gnn"] += time.perf_counter() - began
            targets_N = text.text.tokens(positions_N)
            real, targets_N = (targets_N >= 0).to(device), targets_N[targets_N >= 0].to(device)
            began, prediction = time.perf_counter(), prediction[real]
            lm = prediction.lm_scores(targets_N, asked)
            seconds["head"] += time.perf_counter() - began
            began = time.perf_counter()
            scores = prediction.mixed_target_log_probs(lm, targets_N, wanted)
            seconds["knn"] += time.perf_counter() - began
            for name, values in parts.items():
                values.append(scores[name].cpu())
            for name, found in sure.items():
                found.append(Confidence(*(each.cpu() for each in lm[name].sure or ())))
            track.advance(len(positions_N))
            began = time.perf_counter()
    return Scored(
        {name: torch.cat(values).double().numpy() for name, values in parts.items()},
        seconds,
        {name: Confidence(*map(torch.cat, zip(*found, strict=True))) for name, found in sure.items()},
    )
