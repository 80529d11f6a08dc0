"""The cost of a generation step: milliseconds of the base model, of search, of the GNN and of the mix.

    .venv/bin/python benchmarks/reading.py [--run runs/demo] [--json]

The texts are the run's test documents, concatenated and cut to the length of the past. The tokens that follow are read
next, one at a time or in a block of 8, in batches of 1 and 8 texts. Everything runs in one process, on the same
threads, and the parts of a step are timed one after the other in the same rounds:
- base: the frozen model with its cache, and its softmax;
- search: k = 1024 neighbours (or the k of the run's kNN) of every new token, through the run's own index;
- gnn: the graph network with 128 neighbours (the run's graph_k), through the run's cache of rows;
- mix: p_kNN and its mix with the softmax of the GNN's state, over the whole vocabulary.
`beside_base` is (search + gnn + mix) / base: the relative cost that retrieval adds to a step. `block_of_8` is the time
of a whole step for 8 tokens over that of a step for one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import arguments, open_run, report
from torch import Tensor

from gnnlm.book import open_book
from gnnlm.graph.batch import Context
from gnnlm.lm.head import Confidence
from gnnlm.predict.knn import mixed_log_probs
from gnnlm.predict.open_book import ROLLBACK, OpenBook, Past

ROUNDS = 12


@dataclass
class Step:
    """One step from a past, in parts that can be timed separately."""

    book: OpenBook
    past: Past
    new: list[list[int]]

    def base(self) -> None:
        read, _ = self.book.reader.read(self.new, self.past.lm)
        self.real = read.real_BT
        self.states_BTD = self.book.rounded(read.states_BTD)
        self.keys_BTD = self.states_BTD if read.keys_BTD is None else self.book.rounded(read.keys_BTD)
        self.lm_NV: Tensor = self.book.predictor.head.log_probs(self.states_BTD.flatten(0, 1))

    def search(self) -> None:
        k = self.book.predictor.neighbours_needed(("gnn_knn",))
        self.found = self.book.search(self.keys_BTD, self.real, k, None)

    def gnn(self) -> None:
        predictor, past = self.book.predictor, self.past
        assert predictor.gnn is not None
        offsets = torch.tensor(past.lengths)[:, None] + 1 + torch.arange(self.states_BTD.shape[1])
        context = Context(self.states_BTD, offsets, torch.zeros_like(offsets))
        near = self.found.nearest(predictor.graph_k)
        graph = predictor.graphs(context, near, states=predictor.cache is None)
        predictor.gnn(graph, past.carry, predictor.cache, ROLLBACK)

    def mix(self) -> None:
        """The mix with the base model's softmax instead of the GNN's: the cost is the same."""
        predictor, mix = self.book.predictor, self.book.predictor.mixes["gnn"]
        tokens = predictor.graphs.store.tokens(self.found.positions.clamp(min=0)).flatten(0, 1)
        similarity = self.found.similarity.flatten(0, 1)
        read = torch.ones(len(similarity), dtype=torch.long)
        sure = None if mix.gate is None else Confidence.of(self.lm_NV)
        weights = mix.neighbour_weights(similarity)
        weight = mix.weight_of(mix.evidence(tokens, similarity, weights, read, sure))
        mixed_log_probs(self.lm_NV, tokens, weights, weight)

    def whole(self) -> None:
        prediction, _ = self.book.read(self.new, self.past, ("gnn_knn",))
        prediction[prediction.real].log_probs(("gnn_knn",))


@torch.inference_mode()
def measure(book: OpenBook, text: list[int], past: int, batch: int, block: int) -> dict[str, Any]:
    step_ = len(text) // (2 * batch)
    starts = [number * step_ for number in range(batch)]
    _, read = book.read([text[start : start + past] for start in starts], None, ("gnn_knn",))
    step = Step(book, read, [text[start + past : start + past + block] for start in starts])
    parts: dict[str, Callable[[], None]] = {
        name: getattr(step, name) for name in ("base", "search", "gnn", "mix", "whole")
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(ROUNDS + 2):
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            if number > 1:
                times[name].append(1e3 * (time.perf_counter() - began))
    ms = {name: statistics.median(values) for name, values in times.items()}
    beside = (ms["search"] + ms["gnn"] + ms["mix"]) / ms["base"]
    figures = {f"{name}_ms": value for name, value in ms.items()}
    return {"past": past, "batch": batch, "tokens": block, **figures, "beside_base": beside}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--past", type=int, nargs="+", default=[200, 900])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    book, run = open_book(given.run).model, open_run(given.run)
    stream = run.snapshot.streams["test"]
    text = [int(token) for token in stream.tokens if token >= 0]
    cases = []
    for past in given.past:
        for batch in given.batch:
            one, eight = (measure(book, text, past, batch, block) for block in (1, 8))
            cases += [one, {**eight, "block_of_8": eight["whole_ms"] / one["whole_ms"]}]
            cases[-2]["block_of_8"] = None
    report(
        f"reading on, {len(book.index):,} rows in the store, k = {book.predictor.neighbours_needed(('gnn_knn',))}, "
        f"{book.predictor.graph_k} in the graph",
        cases,
        given.json,
        rows_from=given.run,
    )


if __name__ == "__main__":
    main()
