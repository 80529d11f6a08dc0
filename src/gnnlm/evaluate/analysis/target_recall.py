"""Neighbour quality: how often the target is among the retrieved tokens, and what that brings (paper, Table 4).

    R = the number of the k retrieved rows whose next token is the target

Test tokens are sorted into buckets of about the same size by R. Equal values of R stay together, so that a bucket is a
range.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import ConfigDict

from gnnlm.evaluate.analysis.figure import axes_of, bars_of
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.analysis.token_buckets import equal_buckets, recall_counts
from gnnlm.evaluate.table import Table, number, percent, text
from gnnlm.predict.bootstrap import Ints
from gnnlm.predict.predictor import LABELS

BUCKETS = 5
PAPER = (  # WikiText-103, k = 1,024: range, base, +GNN+kNN
    ("[0, 4)", -7.14, -7.15),
    ("[4, 27)", -3.84, -3.46),
    ("[27, 137)", -2.21, -1.71),
    ("[137, 463)", -1.19, -0.80),
    ("[463, 1024]", -0.30, -0.21),
)


class RecallBucket(PartResult):
    """Test tokens whose recall is low..high: mean log-probabilities by predictor, and the improvement over base.

    `low` and `high` are None for all tokens. The absolute improvement has its paired 95% interval.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]

    low: int | None = None
    high: int | None = None
    tokens: int
    base: float
    absolute: float
    absolute_low: float | None
    absolute_high: float | None
    relative: float

    def of(self, predictor: str) -> float:
        """The mean log-probability under a predictor other than base."""
        return self.__pydantic_extra__[predictor]

    @property
    def range(self) -> str:
        if self.low is None:
            return "all"
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"

    @property
    def absolute_words(self) -> str:
        if self.absolute_low is None:
            return f"{self.absolute:+.2f}"
        return f"{self.absolute:+.2f} ({self.absolute_low:+.2f} to {self.absolute_high:+.2f})"


class RecallResult(PartResult):
    """`found` is the share of the test tokens with a recall above 0."""

    k: int
    predictor: str
    found: float
    buckets: list[RecallBucket]
    all: RecallBucket


def measure(subject: Subject) -> RecallResult:
    counts = recall_counts(subject.test, subject.snapshot.store, subject.positions_N, subject.targets_N)
    buckets = []
    for low, high in equal_buckets(counts, BUCKETS):
        bucket = _bucket(subject, np.flatnonzero((counts >= low) & (counts <= high)))
        buckets.append(bucket.model_copy(update={"low": low, "high": high}))
    return RecallResult(
        k=subject.test.table.k,
        predictor=subject.best,
        found=float((counts > 0).mean()),
        buckets=buckets,
        all=_bucket(subject, np.arange(len(counts))),
    )


def _bucket(subject: Subject, here: Ints) -> RecallBucket:
    base = subject.scores["base"][here]
    best = subject.scores[subject.best][here]
    before, after = float(base.mean()), float(best.mean())
    change = subject.changed(best, base, here)
    return RecallBucket(
        tokens=len(here),
        base=before,
        absolute=after - before,
        absolute_low=None if change.change_high is None else -math.log1p(change.change_high),
        absolute_high=None if change.change_low is None else -math.log1p(change.change_low),
        relative=(after - before) / -before if before else 0.0,
        **{subject.best: after},
    )


def show(result: RecallResult) -> AnalysisSection:
    best, buckets = result.predictor, result.buckets
    label = LABELS[best]
    most = max(buckets, key=lambda bucket: bucket.absolute)
    least = min(buckets, key=lambda bucket: bucket.absolute)
    finding = (
        f"{label} gains most where {most.range} of the {result.k:,} retrieved tokens are the target "
        f"({most.absolute:+.2f} nats a token), and least where {least.range} are ({least.absolute:+.2f})."
    )
    own = Table.of(
        "recall",
        "Mean log-probability by recall of the target",
        [*buckets, result.all],
        text("recall", lambda bucket: bucket.range),
        number("tokens", lambda bucket: bucket.tokens, 0),
        number("base", lambda bucket: bucket.base),
        number(label, lambda bucket: bucket.of(best)),
        text("absolute, 95%", lambda bucket: bucket.absolute_words),
        percent("relative", lambda bucket: bucket.relative, 0),
    )
    paper = [[name, None, base, book, f"{book - base:+.2f}", (book - base) / -base] for name, base, book in PAPER]
    figure, (axes,) = axes_of(height=3.2)
    losses = {"base": [-bucket.base for bucket in buckets], best: [-bucket.of(best) for bucket in buckets]}
    bars_of(axes, [bucket.range for bucket in buckets], losses)
    axes.set(xlabel=f"retrieved tokens that are the target, of {result.k:,}", ylabel="nats a token (less is better)")
    return AnalysisSection(
        [
            f"Recall is the number of the {result.k:,} retrieved tokens that are the token to predict, as in the "
            f"paper. {100 * result.found:.0f}% of the test tokens have a recall above 0. Figures are mean "
            "log-probabilities in nats; relative improvement is against the base model's. Intervals are by paired "
            "bootstrap over documents.",
            finding,
            "The paper's figures are for WikiText-103 with k = 1,024 and 103 million tokens in the store; only the "
            "pattern can be compared.",
        ],
        [own, Table("recall_paper", "The paper's, WikiText-103", own.columns, paper)],
        [Figure("recall", "Mean loss by recall of the target", finding, figure)],
        [finding],
    )


PART = AnalysisPart(
    "recall",
    "Neighbour quality",
    RecallResult,
    lambda m: measure(m.subject),
    show,
    lambda subject: subject.report.test_tokens / 5e3,
    version=2,
)
