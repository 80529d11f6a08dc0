"""Neighbour quality: how often the target is among the retrieved tokens, and what that brings (paper, Table 4).

    R = the number of the k retrieved rows whose next token is the target

Test tokens are sorted into buckets of about the same size by R. Equal values of R stay together, so that a bucket is a
range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gnnlm.datastore.store import Store
from gnnlm.evaluate.analysis.figure import axes_of, bars_of
from gnnlm.evaluate.analysis.section import Figure, Section, Table, number, percent, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.bootstrap import Ints
from gnnlm.predict.predictor import LABELS
from gnnlm.predict.split_scoring import SearchedText

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
    buckets = []
    for low, high in equal_buckets(counts, BUCKETS):
        here = np.flatnonzero((counts >= low) & (counts <= high))
        buckets.append(_bucket(subject, here) | {"low": low, "high": high})
    whole = _bucket(subject, np.arange(len(counts)))
    return {"k": subject.test.table.k, "predictor": best, "found": float((counts > 0).mean()), "buckets": buckets,
            "all": whole}  # fmt: skip


def _bucket(subject: Subject, here: Ints) -> dict[str, Any]:
    """Mean log-probabilities of some test tokens; the absolute improvement has its paired 95% interval."""
    base, book = (subject.scores[name][here] for name in ("base", subject.best))
    before, after, changed = float(base.mean()), float(book.mean()), subject.changed(book, base, here)
    low, high = (None if end is None else -math.log1p(end) for end in (changed["change_high"], changed["change_low"]))
    return {
        "tokens": len(base),
        "base": before,
        subject.best: after,
        "absolute": after - before,
        "absolute_low": low,
        "absolute_high": high,
        "relative": (after - before) / -before if before else 0.0,
    }


def show(found: dict[str, Any]) -> Section:
    best, buckets = found["predictor"], found["buckets"]
    label = LABELS[best]
    figures = [number("base"), number(label), text("absolute, 95%"), percent("relative", 0)]
    columns = [text("recall"), number("tokens", 0), *figures]
    rows = [_row(_range(b), b, best) for b in buckets] + [_row("all", found["all"], best)]
    paper = [[name, None, base, book, f"{book - base:+.2f}", (book - base) / -base] for name, base, book in PAPER]
    most = max(buckets, key=lambda b: b["absolute"])
    least = min(buckets, key=lambda b: b["absolute"])
    said = (
        f"{label} gains most where {_range(most)} of the {found['k']:,} retrieved tokens are the target "
        f"({most['absolute']:+.2f} nats a token), and least where {_range(least)} are ({least['absolute']:+.2f})."
    )
    figure, (panel,) = axes_of(1, height=3.2)
    names = [_range(b) for b in buckets]
    bars_of(panel, names, {"base": [-b["base"] for b in buckets], best: [-b[best] for b in buckets]})
    panel.set_xlabel(f"retrieved tokens that are the target, of {found['k']:,}")
    panel.set_ylabel("nats a token (less is better)")
    return Section(
        "recall",
        "Neighbour quality",
        [
            f"Recall is the number of the {found['k']:,} retrieved tokens that are the token to predict, as in the "
            f"paper. {100 * found['found']:.0f}% of the test tokens have a recall above 0. Figures are mean "
            "log-probabilities in nats; relative improvement is against the base model's. Intervals are by paired "
            "bootstrap over documents.",
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
    return [name, bucket["tokens"], bucket["base"], bucket[best], _absolute(bucket), bucket["relative"]]


def _range(bucket: dict[str, Any]) -> str:
    low, high = bucket["low"], bucket["high"]
    return str(low) if low == high else f"{low} to {high}"


def _absolute(bucket: dict[str, Any]) -> str:
    """
    >>> _absolute({"absolute": 0.5, "absolute_low": -0.1, "absolute_high": 0.75})
    '+0.50 (-0.10 to +0.75)'
    """
    low, high = bucket["absolute_low"], bucket["absolute_high"]
    return f"{bucket['absolute']:+.2f}" + ("" if low is None else f" ({low:+.2f} to {high:+.2f})")
