"""Neighbour quality: how often the target is among the retrieved tokens, and what that brings (paper, Table 4).

    R = the number of the k retrieved rows whose next token is the target

Test tokens are sorted into buckets of about the same size by R. Equal values of R stay together, so that a bucket is a
range.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gnnlm.datastore.store import Store
from gnnlm.evaluate.analysis.figure import axes_of, bars_of
from gnnlm.evaluate.analysis.section import Figure, Section, Table, number, percent, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS
from gnnlm.predict.score import SearchedText

BUCKETS = 5
CHUNK = 2048
PAPER = (  # WikiText-103, k = 1,024: range, base, +GNN+kNN
    ("[0, 4)", -7.14, -7.15),
    ("[4, 27)", -3.84, -3.46),
    ("[27, 137)", -2.21, -1.71),
    ("[137, 463)", -1.19, -0.80),
    ("[463, 1024]", -0.30, -0.21),
)


def hits_of(
    text: SearchedText, store: Store, positions_N: Tensor, targets_N: Tensor
) -> Iterator[npt.NDArray[np.bool_]]:
    """Which retrieved rows, nearest first, have the target as their next token: [n, K], some positions at a time."""
    for start in range(0, len(positions_N), CHUNK):
        part = slice(start, start + CHUNK)
        found = text.table.at(positions_N[part])
        tokens_nK = store.tokens(found.positions.clamp(min=0)).masked_fill_(found.positions < 0, -1)
        yield (tokens_nK == targets_N[part, None]).numpy()


def recall_counts(text: SearchedText, store: Store, positions_N: Tensor, targets_N: Tensor) -> Ints:
    """R of each position, [N]."""
    counts: Ints = np.concatenate([hit_nK.sum(1) for hit_nK in hits_of(text, store, positions_N, targets_N)])
    return counts


def equal_buckets(values: Ints, buckets: int) -> list[tuple[int, int]]:
    """Ranges low..high (both included) that hold about the same number of values; fewer where many are equal.

    >>> equal_buckets(np.array([0, 0, 0, 1, 2, 3]), 3)
    [(0, 0), (1, 2), (3, 3)]
    """
    ordered = np.sort(values)
    ranges: list[tuple[int, int]] = []
    first = 0
    while first < len(ordered):
        share = -(-(len(ordered) - first) // max(1, buckets - len(ranges)))
        high = int(ordered[min(len(ordered), first + share) - 1])
        after, before = np.searchsorted(ordered, high, "right"), np.searchsorted(ordered, high, "left")
        if before > first and share - (before - first) > after - first - share:
            pass  # closer to the share with all of the equal values than without them
        elif before > first:
            high, after = int(ordered[before - 1]), before
        ranges.append((int(ordered[first]), high))
        first = int(after)
    return ranges


def measure(subject: Subject) -> dict[str, Any]:
    best = subject.best
    counts = recall_counts(subject.test, subject.parts.store, subject.positions_N, subject.targets_N)
    base, book = subject.scores["base"], subject.scores[best]
    buckets = []
    for low, high in equal_buckets(counts, BUCKETS):
        here = np.flatnonzero((counts >= low) & (counts <= high))
        buckets.append(_bucket(base[here], book[here], best) | {"low": low, "high": high})
    whole = _bucket(base, book, best)
    return {"k": subject.test.table.k, "predictor": best, "found": float((counts > 0).mean()), "buckets": buckets,
            "all": whole}  # fmt: skip


def _bucket(base: Floats, book: Floats, best: str) -> dict[str, Any]:
    before, after = float(base.mean()), float(book.mean())
    return {
        "tokens": len(base),
        "base": before,
        best: after,
        "absolute": after - before,
        "relative": (after - before) / -before if before else 0.0,
    }


def show(found: dict[str, Any]) -> Section:
    best, buckets = found["predictor"], found["buckets"]
    label = LABELS[best]
    figures = [number("base"), number(label), number("absolute"), percent("relative", 0)]
    columns = [text("recall"), number("tokens", 0), *figures]
    rows = [_row(f"{b['low']} to {b['high']}", b, best) for b in buckets] + [_row("all", found["all"], best)]
    paper = [[name, None, base, book, book - base, (book - base) / -base] for name, base, book in PAPER]
    most = max(buckets, key=lambda b: b["absolute"])
    least = min(buckets, key=lambda b: b["absolute"])
    said = (
        f"{label} gains most where {most['low']} to {most['high']} of the {found['k']:,} retrieved tokens are the "
        f"target ({most['absolute']:+.2f} nats a token), and least where {least['low']} to {least['high']} are "
        f"({least['absolute']:+.2f})."
    )
    figure, (panel,) = axes_of(1, height=3.2)
    names = [f"{b['low']}-{b['high']}" for b in buckets]
    bars_of(panel, names, {"base": [-b["base"] for b in buckets], best: [-b[best] for b in buckets]})
    panel.set_xlabel(f"retrieved tokens that are the target, of {found['k']:,}")
    panel.set_ylabel("nats a token (less is better)")
    return Section(
        "recall",
        "Neighbour quality",
        [
            f"Recall is the number of the {found['k']:,} retrieved tokens that are the token to predict, as in the "
            f"paper. {100 * found['found']:.0f}% of the test tokens have a recall above 0. Figures are mean "
            "log-probabilities in nats; relative improvement is against the base model's.",
            said,
            "The paper's figures are for WikiText-103 with k = 1,024 and 103 million tokens in the store; only the "
            "pattern can be compared.",
        ],
        [
            Table("recall", "Mean log-probability by recall of the target", columns, rows),
            Table("recall_paper", "The paper's, WikiText-103", columns, paper),
        ],
        [Figure("recall", "Mean loss by recall of the target", said, figure)],
        [said],
    )


def _row(name: str, bucket: dict[str, Any], best: str) -> list[Any]:
    return [name, bucket["tokens"], bucket["base"], bucket[best], bucket["absolute"], bucket["relative"]]
