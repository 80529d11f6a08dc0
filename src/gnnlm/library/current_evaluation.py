"""Scoring the run's test split with what it serves now, without documents that share text with valid or test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gnnlm.predict.predictor import perplexity
from gnnlm.predict.split_scoring import SearchedText, score_surely
from gnnlm.retrieval.index import Allowed, keys_of
from gnnlm.retrieval.search import search_table
from gnnlm.run import Run
from gnnlm.run.snapshot import Snapshot


@dataclass(frozen=True)
class CurrentPerplexity:
    """The perplexity of test by predictor at a generation, and the documents that were left out of its store."""

    generation: int
    test_tokens: int
    perplexity: dict[str, float]
    left_out: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "test_tokens": self.test_tokens,
            "perplexity": self.perplexity,
            "left_out": list(self.left_out),
        }


def evaluate_current(run: Run) -> CurrentPerplexity:
    """Search and score every test position with the current generation; kNN weights stay as tuned."""
    snapshot, config = run.open_current(), run.config
    store, stream = snapshot.store, snapshot.streams["test"]
    numbers = _overlapping(snapshot)
    allowed = None
    if numbers:
        open_D = torch.ones(len(store.names), dtype=torch.bool)
        open_D[torch.tensor(numbers)] = False
        allowed = Allowed(positions=open_D.repeat_interleave(store.document_starts.diff()))
    keys_ND = torch.from_numpy(np.array(keys_of(run.artifact("encode"), "test")))
    table = search_table(
        snapshot.index, keys_ND, config.search.k, config.search.shard_queries, "search test", allowed=allowed
    )
    text = SearchedText(snapshot.encoded["test"], table, config.lm.continuous)
    names = snapshot.predictor.names
    scored = score_surely(snapshot.predictor, text, config.eval.block, "score test", names, ())
    found = {name: perplexity(-float(np.mean(scored.log_probs[name]))) for name in names}
    return CurrentPerplexity(
        snapshot.number, stream.token_count, found, tuple(store.names[number] for number in numbers)
    )


def _overlapping(snapshot: Snapshot) -> list[int]:
    """Return the live documents, numbered through all segments, that share text with valid or test."""
    found, first = [], 0
    for segment in snapshot.generation.segments:
        found += [first + number for number in segment.overlapping if number not in set(segment.removed)]
        first += segment.documents
    return found
