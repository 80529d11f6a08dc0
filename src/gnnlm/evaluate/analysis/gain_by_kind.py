"""Where it helps: the gain of each predictor over base, by what is known of a token.

Test tokens are put into buckets, and each bucket has the change of perplexity with its paired interval, and the gain in
nats a token. A bucket's share of the gain says what it weighs in the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.datastore.store import Store
from gnnlm.evaluate.analysis.figure import axes_of, changes_of
from gnnlm.evaluate.analysis.score_cache import ScoredSplit
from gnnlm.evaluate.analysis.section import Cell, Column, Figure, Section, Table, change, number, percent, perplexity
from gnnlm.evaluate.analysis.section import text as words
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.analysis.target_recall import hits_of
from gnnlm.evaluate.analysis.token_kinds import KINDS, kinds_of
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS
from gnnlm.progress import Track

PLACES = (16, 64, 256, 1024)
COUNTS = (1, 10, 100, 1000, 10_000)
SURE = (0.1, 0.25, 0.5, 0.75, 0.9)
RANKS = (2, 9, 129)
BUCKETS = 5  # of the nearest neighbour's similarity
FEW = 50  # a bucket with fewer tokens is shown, and not spoken of
Buckets = list[tuple[str, Ints]]


@dataclass(frozen=True)
class Grouping:
    """A way to put test tokens into buckets; `ahead` if a token's bucket is known before the token is."""

    name: str
    title: str
    ahead: bool
    buckets: Callable[[Subject, ScoredSplit], Buckets]


def by_edges(values: npt.NDArray[Any], edges: Sequence[float], names: Sequence[str]) -> Buckets:
    """Buckets of values: below the first edge, from one edge up to the next, and from the last edge on.

    >>> [(name, here.tolist()) for name, here in by_edges(np.array([5, 0, 1]), (1, 5), ("0", "1-4", "5 or more"))]
    [('0', [1]), ('1-4', [2]), ('5 or more', [0])]
    """
    bucket = np.searchsorted(np.asarray(edges), values, side="right")
    return [(name, np.flatnonzero(bucket == place)) for place, name in enumerate(names)]


def range_names(edges: Sequence[int], first: int = 0) -> list[str]:
    """The names of whole-number ranges that start at `first` and are cut at the edges.

    >>> range_names((1, 10, 1000)), range_names((2, 9), first=1)
    (['0', '1-9', '10-999', '1,000 or more'], ['1', '2-8', '9 or more'])
    """
    names = [_span(low, high - 1) for low, high in itertools.pairwise([first, *edges])]
    return [*names, f"{edges[-1]:,} or more"]


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def equal_edges(values: Floats, buckets: int) -> list[float]:
    """Values that cut others into buckets of about the same size.

    >>> equal_edges(np.array([0.1, 0.2, 0.3, 0.4]), 2)
    [0.25]
    """
    if not len(values):
        return []
    return sorted({float(edge) for edge in np.quantile(values, np.arange(1, buckets) / buckets)})


def by_place(subject: Subject, scored: ScoredSplit) -> Buckets:
    return by_edges(subject.place_N, PLACES, range_names(PLACES))


def by_count(subject: Subject, scored: ScoredSplit) -> Buckets:
    counts = store_counts(subject.parts.store, int(subject.targets_N.max()) + 1)
    return by_edges(counts[subject.targets_N.numpy()], COUNTS, range_names(COUNTS))


def store_counts(store: Store, vocabulary: int) -> Ints:
    """How often each token occurs in the store, ends of documents left out, [vocabulary]; later ids are dropped."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for segment in store.segments:
        tokens = segment.tokens_P.numpy()
        here = tokens[(tokens >= 0) & (tokens < vocabulary)]
        counts += np.bincount(here, minlength=vocabulary)
    return counts


def by_kind(subject: Subject, scored: ScoredSplit) -> Buckets:
    kinds = np.array(kinds_of(subject.parts.streams["test"]))
    return [(kind, np.flatnonzero(kinds == kind)) for kind in KINDS]


def by_sureness(subject: Subject, scored: ScoredSplit) -> Buckets:
    sure = np.exp(scored.sure("base").log_prob.double().numpy())
    names = [f"{low:g} to {high:g}" for low, high in itertools.pairwise((0, *SURE, 1))]
    return by_edges(sure, SURE, names)


def by_similarity(subject: Subject, scored: ScoredSplit) -> Buckets:
    """First tokens are apart: texts share the state that predicts them, so its similarity means nothing."""
    nearest = subject.test.table.at(subject.positions_N, 1).similarity[:, 0].double().numpy()
    first, none = subject.test.read(subject.positions_N).numpy() == 0, np.isneginf(nearest)
    rest = np.flatnonzero(~first & ~none)
    edges = equal_edges(nearest[rest], BUCKETS)
    ends = [f"{edge:.3g}" for edge in edges]
    names = [f"{a} to {b}" for a, b in itertools.pairwise(ends)]
    names = [f"below {ends[0]}", *names, f"{ends[-1]} or more"] if ends else ["any"]
    found = [(name, rest[here]) for name, here in by_edges(nearest[rest], edges, names)]
    return [*found, ("no neighbour", np.flatnonzero(none & ~first)), ("first token", np.flatnonzero(first))]


def by_rank(subject: Subject, scored: ScoredSplit) -> Buckets:
    ranks = first_ranks(subject)
    found = np.flatnonzero(ranks > 0)
    k = subject.test.table.k
    edges = [edge for edge in RANKS if edge <= k]
    names = ["nearest", *(_span(low, high - 1) for low, high in itertools.pairwise([*edges, k + 1]))]
    buckets = [(name, found[here]) for name, here in by_edges(ranks[found], edges, names)]
    return [*buckets, ("not among them", np.flatnonzero(ranks == 0))]


def first_ranks(subject: Subject) -> Ints:
    """The rank, from 1, of the nearest row whose token is the target, [N]; 0 where there is none."""
    parts = [
        np.where(hit_nK.any(1), hit_nK.argmax(1) + 1, 0)
        for hit_nK in hits_of(subject.test, subject.parts.store, subject.positions_N, subject.targets_N)
    ]
    ranks: Ints = np.concatenate(parts)
    return ranks


GROUPINGS = (
    Grouping("place", "tokens before it in its document", True, by_place),
    Grouping("sureness", "the base model's probability of its best token", True, by_sureness),
    Grouping("similarity", "similarity of the nearest neighbour", True, by_similarity),
    Grouping("count", "occurrences of the token in the store", False, by_count),
    Grouping("kind", "part of a word", False, by_kind),
    Grouping("rank", "rank of the nearest neighbour with the right token", False, by_rank),
)


def measure(subject: Subject, scored: ScoredSplit) -> dict[str, Any]:
    """Every grouping has the same tokens; empty buckets are left out."""
    groups = []
    with Track("where it helps", len(GROUPINGS), "groupings") as track:
        for grouping in GROUPINGS:
            buckets = [(name, here) for name, here in grouping.buckets(subject, scored) if len(here)]
            assert sum(len(here) for _, here in buckets) == len(subject.positions_N), grouping.name
            rows = [{"name": name, **bucket_row(subject, here)} for name, here in buckets]
            groups.append({"name": grouping.name, "title": grouping.title, "ahead": grouping.ahead, "buckets": rows})
            track.advance(1)
    return {"predictor": subject.best, "tokens": len(subject.positions_N), "groups": groups}


def bucket_row(subject: Subject, here: Ints) -> dict[str, Any]:
    """The figures of some test tokens, by predictor."""
    base = subject.scores["base"]
    row: dict[str, Any] = {"tokens": len(here), "share": len(here) / len(base)}
    for name, scores in subject.scores.items():
        gain = scores - base
        row[name] = subject.changed(scores[here], base[here], here)
        if name != "base":
            total = float(gain.sum())
            row[name] |= {
                "nats": float(gain[here].mean()),
                "share_of_gain": float(gain[here].sum()) / total if total > 0 else None,
            }
    return row


def show(found: dict[str, Any]) -> Section:
    best = found["predictor"]
    said = {group["name"]: _said(group, best) for group in found["groups"]}
    ahead = [group for group in found["groups"] if group["ahead"] and len(_spoken(group)) > 1]
    ahead.sort(key=lambda group: -_spread(group, best))
    worse = _worse(found)
    return Section(
        "where",
        "Where it helps",
        [
            f"All {found['tokens']:,} test tokens, put into buckets in {len(found['groups'])} ways. Gains are in nats "
            f"a token, against base. The share of the gain is that of {LABELS[best]}; it is negative where that loses. "
            "The first three ways go by what is known before the token is; the others depend on the token itself, so "
            "no model could choose by them.",
            *(sentence for sentence in said.values() if sentence),
            worse,
        ],
        [_table(group, best) for group in found["groups"]],
        [_figure(group) for group in found["groups"]],
        [*(said[group["name"]] for group in ahead), worse],
    )


def _spoken(group: dict[str, Any]) -> list[dict[str, Any]]:
    return [bucket for bucket in group["buckets"] if bucket["tokens"] >= FEW]


def _spread(group: dict[str, Any], best: str) -> float:
    changes: list[float] = [bucket[best]["change"] for bucket in _spoken(group)]
    return max(changes) - min(changes)


def _said(group: dict[str, Any], best: str) -> str:
    """The buckets with the largest and the smallest change for the better."""
    buckets = _spoken(group)
    if len(buckets) < 2:
        return ""
    most, least = (pick(buckets, key=lambda b: b[best]["change"]) for pick in (min, max))
    share = most[best]["share_of_gain"]
    weight = "" if share is None else f", {100 * most['share']:.0f}% of the tokens and {100 * share:.0f}% of the gain"
    return (
        f'By {group["title"]}: {LABELS[best]} helps most in "{most["name"]}" ({_words(most[best])}{weight}) and least '
        f'in "{least["name"]}" ({_words(least[best])}).'
    )


def _worse(found: dict[str, Any]) -> str:
    """The buckets in which a predictor is worse than base beyond doubt."""
    looked = [
        (group, bucket, name)
        for group in found["groups"]
        for bucket in _spoken(group)
        for name in _predictors(bucket)
        if bucket[name]["change_low"] is not None
    ]
    places = [
        f'{LABELS[name]} in "{bucket["name"]}" ({group["title"]}): {_words(bucket[name])}'
        for group, bucket, name in looked
        if bucket[name]["change_low"] > 0
    ]
    if not places:
        return f"In no bucket of at least {FEW} tokens is a predictor significantly worse than base."
    return (
        f"Significantly worse than base, {len(places)} of {len(looked)} intervals that were looked at (about one in 40 "
        f"would be by chance): {'; '.join(places)}."
    )


def _predictors(bucket: dict[str, Any]) -> list[str]:
    return [name for name in LABELS if name in bucket and name != "base"]


def _words(row: dict[str, Any]) -> str:
    return change(row["change"], row["change_low"], row["change_high"])


def _table(group: dict[str, Any], best: str) -> Table:
    names = _predictors(group["buckets"][0])
    columns: list[Column] = [words(group["title"]), percent("tokens", 1), perplexity("base ppl")]
    for name in names:
        columns += [number(f"{LABELS[name]}: nats", 3), words(f"{LABELS[name]}: change, 95%")]
    columns.append(percent("share of the gain", 0))
    rows: list[list[Cell]] = []
    for bucket in group["buckets"]:
        rows.append([bucket["name"], bucket["share"], bucket["base"]["ppl"]])
        for name in names:
            rows[-1] += [bucket[name]["nats"], _words(bucket[name])]
        rows[-1].append(bucket[best]["share_of_gain"])
    return Table(f"where_{group['name']}", f"By {group['title']}", columns, rows)


def _figure(group: dict[str, Any]) -> Figure:
    buckets = group["buckets"]
    figure, (axes,) = axes_of(1, height=1.3 + 0.42 * len(buckets), width=7.2)
    changes_of(
        axes,
        [f"{bucket['name']}\n{100 * bucket['share']:.1f}% of tokens" for bucket in buckets],
        {name: [bucket[name] for bucket in buckets] for name in _predictors(buckets[0])},
    )
    axes.set_title(f"by {group['title']}", fontsize=10)
    last = _predictors(buckets[0])[-1]
    said = "; ".join(f"{bucket['name']}: {_words(bucket[last])}" for bucket in buckets)
    return Figure(f"where_{group['name']}", f"Change by {group['title']}", f"{LABELS[last]}: {said}.", figure)
