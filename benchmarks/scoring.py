"""The cost of an open book: tokens/s of the whole model against its base model, on a real run.

    .venv/bin/python benchmarks/scoring.py [--run runs/demo] [--json]

From tokens to log-probabilities of the test split's first tokens, everything in one process and on the same threads:
- base: the frozen LM and its softmax, at its fastest batch size;
- base + GNN at k = 8, 32, 128 with precomputed neighbours (what the paper's figure shows), through the run's cache;
- base + GNN + kNN with live search: k = 1024 neighbours looked up for every token, the first k of them in the graph.
`slowdown` is the time per token over that of the base model. The cache is built once per network and is not counted;
`gnnlm cache` prints how long it takes.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from common import arguments, open_run, report

from gnnlm.datastore.encode import encode_windows, round_states, text_windows
from gnnlm.datastore.store import Segment, Store
from gnnlm.predict.predictor import Predictor
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.retrieval.neighbours import NeighbourTable

BATCHES = (512, 1024, 2048)


class Scorer:
    """Scores the first documents of a run's test split with each predictor."""

    def __init__(self, run: str, tokens: int) -> None:
        self.run = open_run(run)
        self.parts, self.config = self.run.snapshot, self.run.config
        self.lm = self.parts.lm
        stream = self.parts.streams["test"]
        documents = int(np.searchsorted(stream.starts, tokens))
        self.end = int(stream.starts[documents])
        self.starts = torch.from_numpy(np.array(stream.starts[: documents + 1], dtype=np.int64))
        self.tokens = torch.from_numpy(np.array(stream.tokens[: self.end], dtype=np.int64))
        self.jobs = []
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            document = self.tokens[start : end - 1].numpy()
            self.jobs += text_windows(document, np.arange(end - start), self.lm, self.config.lm)
        self.index, self.table = self.parts.index, self.parts.searched("test").table

    def encoded(self, batch: int) -> Store:
        states = round_states(encode_windows(self.lm, self.jobs, batch, "state").states, self.config.store.dtype)
        return Store([Segment(torch.from_numpy(states), self.tokens, self.starts)])

    @torch.inference_mode()
    def base(self, batch: int) -> None:
        """The base model and its softmax."""
        self.score(SearchedText(self.encoded(batch), self.table), "base", 1)

    @torch.inference_mode()
    def gnn(self, batch: int, k: int) -> None:
        """Base and GNN states, one softmax."""
        self.score(SearchedText(self.encoded(batch), self.table), "gnn", k)

    @torch.inference_mode()
    def gnn_knn(self, batch: int, k: int) -> None:
        """Base and GNN states, live search, one softmax and one mix."""
        text = self.encoded(batch)
        found = self.index.search(text.states(torch.arange(len(text))), self.config.search.k)
        table = NeighbourTable(found.positions.numpy(), found.similarity.numpy())
        self.score(SearchedText(text, table), "gnn_knn", k)

    def score(self, text: SearchedText, name: str, k: int) -> None:
        predictor: Predictor = replace(self.parts.predictor, graph_k=k)
        for positions_N, prediction in text.predictions(predictor, self.config.eval.block, (name,)):
            targets_N = self.tokens[positions_N]
            real = targets_N >= 0
            prediction[real].target_log_probs(targets_N[real], (name,))


def seconds(work: object, *given: int) -> float:
    """The better of two times, without a warm-up: a pass is long."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        work(*given)  # type: ignore[operator]
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=3000, help="about how many test tokens are scored")
    parser.add_argument("--k", type=int, nargs="+", default=[8, 32, 128])
    given = parser.parse_args()
    scorer = Scorer(given.run, given.tokens)
    scorer.base(BATCHES[0])
    by_batch = {batch: seconds(scorer.base, batch) for batch in BATCHES}
    batch = min(by_batch, key=lambda size: by_batch[size])
    base = by_batch[batch]
    cases = []
    for k in given.k:
        base = min(base, seconds(scorer.base, batch))  # timed again with each case, so that slow moments affect both
        gnn, full = seconds(scorer.gnn, batch, k), seconds(scorer.gnn_knn, batch, k)
        cases.append({"k": k, "gnn_s": gnn, "full_s": full})
    count = scorer.end
    report(
        f"whole model, {count:,} test tokens, {len(scorer.index):,} rows in the store",
        [
            {
                "k": case["k"],
                "slowdown": case["gnn_s"] / base,
                "slowdown_with_search": case["full_s"] / base,
                "tokens_per_s": count / case["gnn_s"],
                "tokens_per_s_with_search": count / case["full_s"],
            }
            for case in cases
        ],
        given.json,
        base_tokens_per_s=round(count / base),
        base_batch_tokens=batch,
        cache=scorer.run.artifact("cache").facts["form"],
    )


if __name__ == "__main__":
    main()
