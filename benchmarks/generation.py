"""Writing speed: tokens/s of each predictor, with and without drafts, against transformers' own greedy generate.

    .venv/bin/python benchmarks/generation.py [--run runs/demo] [--json]

Everything in one process and on the same threads, 64 tokens from each prompt, greedy, prompts one after another (batch
1) or eight at a time. In domain, prompts are the first 32 tokens of the run's test documents; out of domain, they are
sentences unlike the store (below). The base model's own figures are `generate` of transformers with its cache and with
torch's own linear layers (without gnnlm/matmul.py), and the same with `prompt_lookup_num_tokens=8`. Each prompt is
timed under all of them in turn, so that slow moments affect all.
`ratio` is tokens/s over those of the base model; `worst_prompt` the smallest such ratio of a single prompt (batch).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import arguments, open_run, report

from gnnlm import matmul
from gnnlm.book import Book, open_book

PROMPT = 32
OUT_OF_DOMAIN = [
    "The old fisherman rowed out before dawn, and the harbour",
    "To make the bread, dissolve the yeast in warm water and",
    "In the summer of 1846 the expedition crossed the mountains",
    "My grandmother used to say that every garden has",
    "The striker turned past two defenders and shot",
    "Rain fell all night on the tin roof, so in the morning",
    "The committee voted to postpone the decision until",
    "Her first novel, published when she was only twenty,",
    "Scientists believe that the whales migrate because",
    "The train to Vienna leaves at half past seven, but",
    "When the curtain rose, the audience saw a single chair",
    "The recipe calls for three ripe tomatoes, a clove of garlic",
    "After the storm the islanders rebuilt the lighthouse",
    "He tuned the violin slowly, listening to each string",
    "The price of wheat rose again this week as farmers",
    "On the third day of the trial the witness admitted",
    "Children in the village learned to swim before they could",
    "The painting shows a young woman reading a letter by",
    "Snow covered the pass, and the mules refused to go",
    "The mayor opened the new bridge with a short speech about",
]


@dataclass
class Times:
    """Tokens and seconds of one way of writing, prompt by prompt."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: int = 0

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


class Ways:
    """All ways to write from a batch of prompts."""

    def __init__(self, book: Book, tokens: int) -> None:
        self.book, self.tokens = book, tokens
        self.lm: Any = book.model.lm

    def plain(self, prompts: Sequence[list[int]], times: Times, **options: Any) -> None:
        """transformers' own generate; prompts are padded on the left."""
        longest = max(map(len, prompts))
        start = self.lm.start_token
        ids = torch.tensor([[start] * (longest - len(p)) + [start, *p] for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + 1) for p in prompts])
        few, matmul.FEW = matmul.FEW, 0
        try:
            began = time.perf_counter()
            out = self.lm.model.generate(
                ids, attention_mask=mask, max_new_tokens=self.tokens, do_sample=False, pad_token_id=start, **options
            )
            times.seconds.append(time.perf_counter() - began)
        finally:
            matmul.FEW = few
        new = out[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(sorted(self.lm.end_tokens))).int().cumsum(1).cumsum(1) <= 1
        times.tokens.append(int(ended.sum()))

    def book_way(self, prompts: Sequence[list[int]], times: Times, **options: Any) -> None:
        began = time.perf_counter()
        written = self.book.generate(prompts, max_tokens=self.tokens, **options)
        times.seconds.append(time.perf_counter() - began)
        times.tokens.append(sum(len(one.ids) for one in written))
        times.steps += sum(one.steps + 1 for one in written)


@torch.inference_mode()
def measure(ways: Ways, prompts: list[list[int]], batch: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    batches = [prompts[start : start + batch] for start in range(0, len(prompts) // batch * batch, batch)]
    work: list[Callable[[Sequence[list[int]], Times], None]] = [
        lambda p, t: ways.plain(p, t),
        *([lambda p, t: ways.plain(p, t, prompt_lookup_num_tokens=8)] if batch == 1 else []),
        *(lambda p, t, options=case: ways.book_way(p, t, **options) for case in cases),  # type: ignore[misc]
    ]
    for way in work:
        way(batches[0], Times())  # a warm-up, in which drafting learns what a step costs
    times = [Times() for _ in work]
    for number, some in enumerate(batches, 1):
        for way, taken in zip(work, times, strict=True):
            way(some, taken)
        print(f"  prompts {number * batch} of {len(batches) * batch}", flush=True)
    base, lookup = times[0], times[1] if batch == 1 else None
    rows = []
    for case, taken in zip(cases, times[-len(cases) :], strict=True):
        each = [
            (t / s) / (bt / bs)
            for t, s, bt, bs in zip(taken.tokens, taken.seconds, base.tokens, base.seconds, strict=True)
        ]
        rows.append(
            {
                "batch": batch,
                "predictor": case["predictor"],
                "draft": case["draft"],
                "tokens_per_s": taken.rate,
                "base_tokens_per_s": base.rate,
                "ratio": taken.rate / base.rate,
                "prompt_lookup_ratio": lookup.rate / base.rate if lookup else None,
                "tokens_per_step": sum(taken.tokens) / taken.steps,
                "worst_prompt": min(each),
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--prompts", type=int, default=20, help="prompts for each domain")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write after each")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--domain", nargs="+", default=["in", "out"])
    parser.add_argument("--predictor", nargs="+", default=["gnn_knn", "base"])
    given = parser.parse_args()
    book, run = open_book(given.run), open_run(given.run)
    stream = run.snapshot.streams["test"]
    inside = [
        [int(token) for token in stream.tokens[start : min(start + PROMPT, end - 1)]]
        for start, end in zip(stream.starts[:-1], stream.starts[1:], strict=True)
    ]
    prompts = {
        "in": inside[: given.prompts],
        "out": [book.model.lm.tokenize(text)[0] for text in OUT_OF_DOMAIN[: given.prompts]],
    }
    cases: list[dict[str, Any]] = [{"predictor": name, "draft": True} for name in given.predictor]
    if "gnn_knn" in given.predictor:
        cases.append({"predictor": "gnn_knn", "draft": False})
    rows = []
    for domain in given.domain:
        for batch in given.batch:
            print(f"{domain} domain, batch {batch}", flush=True)
            rows += [
                {"domain": domain, **row} for row in measure(Ways(book, given.tokens), prompts[domain], batch, cases)
            ]
    report(
        f"writing {given.tokens} tokens, {len(book.model.index):,} rows in the store, k = "
        f"{book.model.predictor.neighbours_needed(('gnn_knn',))}, {book.model.predictor.graph_k} in the graph",
        rows,
        given.json,
        prompts={name: len(some) for name, some in prompts.items()},
    )


if __name__ == "__main__":
    main()
