"""Scoring a text whose states and neighbours are on disk, block after block, through the one prediction step."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Draft, fingerprint
from gnnlm.datastore.store import Store
from gnnlm.engine import Arrays, Spread, Task, here
from gnnlm.graph.batch import Context
from gnnlm.lm.head import Confidence
from gnnlm.predict.predictor import STATE_OF, Prediction, Predictor
from gnnlm.progress import Track
from gnnlm.retrieval.neighbours import NeighbourTable

Floats = npt.NDArray[np.float64]
PARTS = ("gnn", "head", "knn")  # what the seconds of scoring are spent on
SHARD = 16  # a shard is this many times as long as what is read again before it


@dataclass(frozen=True)
class SearchedText:
    """An encoded and searched split: its positions and the neighbours of each.

    `continuous`: the LM read on from one document to the next, so the split is one text.
    """

    text: Store
    table: NeighbourTable
    continuous: bool = False

    def context(self, positions_BT: Tensor) -> Context:
        """Make context nodes of some positions, [B, T]."""
        return Context(self.text.states(positions_BT), self.read(positions_BT), self.text.document_of(positions_BT))

    def read(self, positions: Tensor) -> Tensor:
        """Return the number of tokens of its text that are read before each position's prediction."""
        return positions if self.continuous else positions - self.text.bounds(positions)[0]

    def predictions(
        self,
        predictor: Predictor,
        block: int,
        wanted: Collection[str],
        positions: Tensor | None = None,
        shard: range | None = None,
    ) -> Iterator[tuple[Tensor, Prediction]]:
        """Yield all positions (or some, in order) in blocks: positions [N], and what is predicted there.

        `shard` is a range of blocks. Blocks before it are read for what the network carries over from them, as many
        as make its predictions the same to the last bit.
        """
        k = predictor.neighbours_needed(wanted)
        positions = torch.arange(len(self.text)) if positions is None else positions
        blocks = positions.split(block)
        shard = range(len(blocks)) if shard is None else shard
        carry = None
        for number in range(max(0, shard.start - blocks_before(predictor, block, wanted)), shard.stop):
            positions_N = blocks[number]
            context = self.context(positions_N[None])
            found = self.table.at(positions_N, k)
            prediction, carry = predictor.step(context, found[None], wanted, carry)
            if number in shard:
                yield positions_N, prediction[0]


@dataclass(frozen=True)
class SplitScores:
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
    """Return the log-probability of every token by predictor, and seconds spent by part (`gnn`, `head`, `knn`)."""
    found = score_surely(predictor, text, block, label, wanted, (), positions)
    return found.log_probs, found.seconds


def blocks_before(predictor: Predictor, block: int, wanted: Collection[str]) -> int:
    """Return how many blocks before a block its predictions depend on, to the last bit.

    A token attends to `context` tokens, and through each layer to as many more. Until a whole context is carried,
    tensors have other shapes, and may round differently.
    """
    if predictor.gnn is None or all(STATE_OF[name] == "base" for name in wanted):
        return 0
    options = predictor.gnn.options
    return 1 + math.ceil((options.layers + 1) * (options.context - 1) / block)


def shards_of(predictor: Predictor, block: int, wanted: Collection[str], count: int) -> list[range]:
    """Return the shards of a text of `count` positions: ranges of blocks."""
    blocks = math.ceil(count / block)
    size = SHARD * max(1, blocks_before(predictor, block, wanted))
    return [range(start, min(start + size, blocks)) for start in range(0, blocks, size)]


def score_surely(
    predictor: Predictor,
    text: SearchedText,
    block: int,
    label: str,
    wanted: Collection[str],
    confident: Collection[str],
    positions: Tensor | None = None,
    draft: Draft | None = None,
    spread: Spread = here,
) -> SplitScores:
    """Score every token; measure the confidence of the softmax of each state named in `confident`.

    With a draft, its folder keeps the shards that were scored, so that another attempt does not score them again.
    """
    count = len(text.text) if positions is None else len(positions)
    with Track(label, count, "tokens") as track:
        if draft is None:
            blocks = math.ceil(count / block)
            found = [score_blocks(predictor, text, block, wanted, confident, 0, blocks, positions, track)]
        else:
            assert positions is None, "shards are of whole texts"
            draft.commit()  # there is something to resume from now
            asked = {"block": block, "wanted": sorted(wanted), "confident": sorted(confident)}
            shards = shards_of(predictor, block, wanted, count)
            tasks = [
                Task(
                    "score",
                    f"{fingerprint(asked)}.{shard.start:010d}",
                    {**asked, "start": shard.start, "stop": shard.stop},
                    kept=True,
                )
                for shard in shards
            ]
            found = []
            scored = spread.arrays(draft.shards, partial(score_blocks, predictor, text), tasks)
            for shard, arrays in zip(shards, scored, strict=True):
                found.append(arrays)
                track.advance(min(shard.stop * block, count) - shard.start * block)
    joined = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    seconds = joined["seconds"].reshape(-1, len(PARTS)).sum(0)
    return SplitScores(
        {name: joined[f"log_probs.{name}"].astype(np.float64) for name in wanted},
        dict(zip(PARTS, seconds.tolist(), strict=True)),
        {
            name: Confidence(*(torch.from_numpy(joined[f"sure.{name}.{field}"]) for field in Confidence._fields))
            for name in confident
        },
    )


@torch.inference_mode()
def score_blocks(
    predictor: Predictor,
    text: SearchedText,
    block: int,
    wanted: Collection[str],
    confident: Collection[str],
    start: int,
    stop: int,
    positions: Tensor | None = None,
    track: Track | None = None,
) -> Arrays:
    """Score the blocks start..stop-1: log-probabilities of tokens, confidence of each softmax, seconds of each part."""
    found: dict[str, list[Tensor]] = {f"log_probs.{name}": [] for name in wanted}
    found |= {f"sure.{name}.{field}": [] for name in confident for field in Confidence._fields}
    asked = predictor.gated(wanted) | set(confident)
    seconds = dict.fromkeys(PARTS, 0.0)
    device = predictor.head.device
    began = time.perf_counter()
    for positions_N, prediction in text.predictions(predictor, block, wanted, positions, range(start, stop)):
        seconds["gnn"] += time.perf_counter() - began
        targets_N = text.text.tokens(positions_N)
        real = (targets_N >= 0).to(device)
        targets_N = targets_N[targets_N >= 0].to(device)
        began = time.perf_counter()
        prediction = prediction[real]
        lm = prediction.lm_scores(targets_N, asked)
        seconds["head"] += time.perf_counter() - began
        began = time.perf_counter()
        scores = prediction.mixed_target_log_probs(lm, targets_N, wanted)
        seconds["knn"] += time.perf_counter() - began
        for name in wanted:
            found[f"log_probs.{name}"].append(scores[name].cpu())
        for name in confident:
            for field, values in zip(Confidence._fields, lm[name].sure or (), strict=True):
                found[f"sure.{name}.{field}"].append(values.cpu())
        if track is not None:
            track.advance(len(positions_N))
        began = time.perf_counter()
    arrays: dict[str, npt.NDArray[Any]] = {name: torch.cat(values).numpy() for name, values in found.items()}
    return {**arrays, "seconds": np.array(list(seconds.values()))}
