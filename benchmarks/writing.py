"""Does an open book write better? Continuations of held-out documents, under each predictor, against the true ones.

    .venv/bin/python benchmarks/writing.py [--run runs/demo] [--prompts 20] [--json]

From a place in each test document, 64 tokens are written after the 64 before it, greedily and sampled (temperature 0.8,
top-p 0.95). Of every continuation:
- chrF against the document's own next 64 tokens (sacrebleu);
- repetition: the share of its 4-grams that appeared before in it;
- copied: the share of its tokens that stand in the store in a run of at least 8, and the longest such run;
- book: the mean share of the book.
And of the true continuation: how often each predictor's likeliest token is the next one. Intervals are 95%, by
bootstrap over documents; `change` is the difference to the base model's text, paired by document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from common import arguments, open_run, report
from sacrebleu.metrics import CHRF

from gnnlm.book import Book, open_book
from gnnlm.write.suffix import SuffixIndex

TOKENS, BEFORE, RUN = 64, 64, 8
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """The share of n-grams that appeared before."""
    grams = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    return 1 - len(grams) / max(1, sum(grams.values()))


class Copies:
    """How much of a text stands in the store word for word."""

    def __init__(self, book: Book) -> None:
        self.tokens = [segment.tokens_P.numpy() for segment in book.model.store.segments]
        self.indexes = [SuffixIndex(tokens) for tokens in self.tokens]

    def longest_at(self, ids: Sequence[int]) -> list[int]:
        """The length of the longest run of the store that ends at each token, up to the order's depth."""
        out = []
        for end in range(1, len(ids) + 1):
            found = [index.ending(ids[:end]) for index in self.indexes]
            out.append(max(found, default=0))
        return out

    def of(self, ids: Sequence[int]) -> tuple[float, int]:
        """The share of tokens in runs of at least RUN, and the longest run."""
        lengths = self.longest_at(ids)
        covered = np.zeros(len(ids), dtype=bool)
        longest = 0
        for end, length in enumerate(lengths):
            longest = max(longest, length)
            if length >= RUN:
                covered[end + 1 - length : end + 1] = True
        return float(covered.mean()) if len(ids) else 0.0, longest


def interval(values: Sequence[float], rounds: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """The mean and its 95% interval by bootstrap."""
    array = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = array[rng.integers(len(array), size=(rounds, len(array)))].mean(1)
    return float(array.mean()), *(float(q) for q in np.quantile(means, [0.025, 0.975]))


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args()
    book, run = open_book(given.run), open_run(given.run)
    stream, lm = run.snapshot.streams["test"], book.model.lm
    texts = []
    for start, end in zip(stream.starts[:-1].tolist(), stream.starts[1:].tolist(), strict=True):
        ids = [int(token) for token in stream.tokens[start : end - 1]]
        if len(ids) >= BEFORE + given.tokens:
            texts.append((ids[:BEFORE], ids[BEFORE : BEFORE + given.tokens]))
    texts = texts[: given.prompts]
    copies, chrf = Copies(book), CHRF()
    top1: dict[str, list[float]] = {name: [] for name in book.predictors}
    for before, after in texts:
        prediction, _ = book.model.read([[*before, *after[:-1]]], None, book.predictors)
        for name, full in prediction[0, len(before) :].log_probs(book.predictors).items():
            top1[name].append(float((full.argmax(1).cpu() == torch.tensor(after)).float().mean()))
    rows = []
    for way, options in WAYS.items():
        base: dict[str, list[float]] = {}
        for name in book.predictors:
            values: dict[str, list[float]] = {key: [] for key in ("chrf", "repetition", "copied", "longest", "book")}
            for number, (before, after) in enumerate(texts, 1):
                (written,) = book.generate([before], predictor=name, max_tokens=given.tokens, sources=0, **options)
                share, longest = copies.of(written.ids)
                values["chrf"].append(chrf.sentence_score(written.text, [lm.detokenize(after)]).score)
                values["repetition"].append(repetition(written.ids))
                values["copied"].append(share)
                values["longest"].append(longest)
                values["book"].append(written.book)
                print(f"  {way} {name}: {number} of {len(texts)}", flush=True)
            row: dict[str, Any] = {"way": way, "predictor": name}
            measured = {**values, "top1": top1[name]}
            base = base or measured
            for key, some in measured.items():
                changes = [here - there for here, there in zip(some, base[key], strict=True)]
                for label, found in ((key, interval(some)), (f"{key}_change", interval(changes))):
                    row |= dict(zip((label, f"{label}_low", f"{label}_high"), found, strict=True))
            rows.append(row)
    truth = [copies.of(after) for _, after in texts]
    report(
        f"continuations of {len(texts)} test documents, {given.tokens} tokens; under a value, its change against base",
        rows,
        given.json,
        [in_words(row) for row in rows],
        documents=len(texts),
        true_copied=float(np.mean([share for share, _ in truth])),
        true_longest=float(np.mean([longest for _, longest in truth])),
    )


def in_words(row: dict[str, Any]) -> dict[str, Any]:
    """A row with each value and its change against base as one cell, with their 95% intervals."""

    def of(name: str, sign: str = "") -> str:
        value, low, high = (f"{row[name + end]:{sign}.3g}" for end in ("", "_low", "_high"))
        return f"{value} ({low} to {high})"

    names = [name for name in row if f"{name}_change" in row]
    return {
        "way": row["way"],
        "predictor": row["predictor"],
        **{
            name: of(name) if row["predictor"] == "base" else f"{of(name)}\n{of(f'{name}_change', '+')}"
            for name in names
        },
    }


if __name__ == "__main__":
    main()
