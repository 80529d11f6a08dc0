"""Where it helps: the gain of each predictor over base, by what is known of a token.

Test tokens are put into buckets; each bucket has its change of perplexity with the paired interval, its gain in nats a
token, and its share of the whole gain.
"""

from __future__ import annotations

import numpy as np
from pydantic import ConfigDict

from gnnlm.evaluate.analysis.figure import axes_of, changes_of
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.analysis.token_buckets import GROUPINGS
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.table import Column, Table, number, percent, perplexity, text
from gnnlm.predict.bootstrap import Ints
from gnnlm.predict.predictor import LABELS
from gnnlm.progress import Track

FEW = 50  # a bucket with fewer tokens is shown, but no sentence speaks of it


class BucketGain(PerplexityChange):
    """A predictor's change in a bucket: `nats` a token, and the share of its gain over all tokens, if it has one."""

    nats: float
    share_of_gain: float | None


class GainBucket(PartResult):
    """Some test tokens, and the gain of every predictor in them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, BucketGain]

    name: str
    tokens: int
    share: float

    @property
    def predictors(self) -> dict[str, BucketGain]:
        return self.__pydantic_extra__

    @property
    def base(self) -> BucketGain:
        return self.predictors["base"]

    @property
    def others(self) -> dict[str, BucketGain]:
        """The predictors without base, in the usual order."""
        return {name: self.predictors[name] for name in LABELS if name in self.predictors and name != "base"}


class GainGroup(PartResult):
    """All test tokens in buckets of one kind; `ahead` if a token's bucket is known before the token is."""

    name: str
    title: str
    ahead: bool
    buckets: list[GainBucket]

    @property
    def large(self) -> list[GainBucket]:
        """The buckets that sentences speak of."""
        return [bucket for bucket in self.buckets if bucket.tokens >= FEW]

    def spread(self, best: str) -> float:
        """How far the changes of the large buckets are apart."""
        changes = [bucket.predictors[best].change for bucket in self.large]
        return max(changes) - min(changes)


class GainResult(PartResult):
    predictor: str
    tokens: int
    groups: list[GainGroup]


def measure(subject: Subject, scores: CachedScores) -> GainResult:
    """Put the same tokens into the buckets of every grouping; empty buckets are left out."""
    groups = []
    with Track("where it helps", len(GROUPINGS), "groupings") as track:
        for grouping in GROUPINGS:
            buckets = [bucket_of(subject, name, here) for name, here in grouping.buckets(subject, scores) if len(here)]
            assert sum(bucket.tokens for bucket in buckets) == len(subject.positions_N), grouping.name
            groups.append(GainGroup(name=grouping.name, title=grouping.title, ahead=grouping.ahead, buckets=buckets))
            track.advance(1)
    return GainResult(predictor=subject.best, tokens=len(subject.positions_N), groups=groups)


def bucket_of(subject: Subject, name: str, here: Ints) -> GainBucket:
    """The figures of some test tokens, by predictor."""
    base = subject.scores["base"]
    gains = {}
    for predictor, scores in subject.scores.items():
        gain = scores - base
        total = float(gain.sum())
        gains[predictor] = BucketGain(
            **subject.changed(scores[here], base[here], here).model_dump(),
            nats=float(np.mean(gain[here])),
            share_of_gain=float(gain[here].sum()) / total if total > 0 else None,
        )
    return GainBucket(name=name, tokens=len(here), share=len(here) / len(base), **gains)


def show(result: GainResult) -> AnalysisSection:
    best = result.predictor
    findings = {group.name: _finding(group, best) for group in result.groups}
    ahead = [group for group in result.groups if group.ahead and len(group.large) > 1]
    ahead.sort(key=lambda group: -group.spread(best))
    worse = _worse(result)
    return AnalysisSection(
        [
            f"All {result.tokens:,} test tokens, put into buckets in {len(result.groups)} ways. Gains are in nats "
            f"a token, against base. The share of the gain is that of {LABELS[best]}; it is negative where that loses. "
            "The first three ways go by what is known before the token is; the others depend on the token itself, so "
            "no model could choose by them.",
            *(sentence for sentence in findings.values() if sentence),
            worse,
        ],
        [_table(group, best) for group in result.groups],
        [_figure(group) for group in result.groups],
        [*(findings[group.name] for group in ahead), worse],
    )


def _finding(group: GainGroup, best: str) -> str:
    """The buckets with the largest and the smallest change for the better."""
    if len(group.large) < 2:
        return ""
    most = min(group.large, key=lambda bucket: bucket.predictors[best].change)
    least = max(group.large, key=lambda bucket: bucket.predictors[best].change)
    gain = most.predictors[best]
    weight = ""
    if gain.share_of_gain is not None:
        weight = f", {100 * most.share:.0f}% of the tokens and {100 * gain.share_of_gain:.0f}% of the gain"
    return (
        f'By {group.title}: {LABELS[best]} helps most in "{most.name}" ({gain.words}{weight}) and least in '
        f'"{least.name}" ({least.predictors[best].words}).'
    )


def _worse(result: GainResult) -> str:
    """The buckets in which a predictor is significantly worse than base."""
    intervals = [
        (gain, f'{LABELS[name]} in "{bucket.name}" ({group.title}): {gain.words}')
        for group in result.groups
        for bucket in group.large
        for name, gain in bucket.others.items()
        if gain.change_low is not None
    ]
    worse = [words for gain, words in intervals if gain.is_worse]
    if not worse:
        return f"In no bucket of at least {FEW} tokens is a predictor significantly worse than base."
    return (
        f"Significantly worse than base, {len(worse)} of {len(intervals)} intervals that were looked at (about one in "
        f"40 would be by chance): {'; '.join(worse)}."
    )


def _table(group: GainGroup, best: str) -> Table:
    return Table.of(
        f"where_{group.name}",
        f"By {group.title}",
        group.buckets,
        text(group.title, lambda bucket: bucket.name),
        percent("tokens", lambda bucket: bucket.share),
        perplexity("base ppl", lambda bucket: bucket.base.ppl),
        *(column for name in group.buckets[0].others for column in _columns(name)),
        percent("share of the gain", lambda bucket: bucket.predictors[best].share_of_gain, 0),
    )


def _columns(name: str) -> list[Column]:
    return [
        number(f"{LABELS[name]}: nats", lambda bucket: bucket.predictors[name].nats, 3),
        text(f"{LABELS[name]}: change, 95%", lambda bucket: bucket.predictors[name].words),
    ]


def _figure(group: GainGroup) -> Figure:
    buckets = group.buckets
    names = list(buckets[0].others)
    figure, (axes,) = axes_of(height=1.3 + 0.42 * len(buckets), width=7.2, titles=(f"by {group.title}",))
    changes_of(
        axes,
        [f"{bucket.name}\n{100 * bucket.share:.1f}% of tokens" for bucket in buckets],
        {name: [bucket.predictors[name] for bucket in buckets] for name in names},
    )
    changes = "; ".join(f"{bucket.name}: {bucket.predictors[names[-1]].words}" for bucket in buckets)
    return Figure(f"where_{group.name}", f"Change by {group.title}", f"{LABELS[names[-1]]}: {changes}.", figure)


PART = AnalysisPart(
    "where",
    "Where it helps",
    GainResult,
    lambda m: measure(m.subject, m.scores("test")),
    show,
    lambda subject: 5 + subject.report.test_tokens / 5e3,
    after=("scored-test",),
)
