"""Buckets of test tokens: by value, by rank of the right neighbour, by part of a word.

Shapes: N tokens, K neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.corpus.stream import Stream
from gnnlm.datastore.store import Store
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.mix_weight import neighbour_tokens
from gnnlm.evaluate.tune import bucket_edges
from gnnlm.predict.bootstrap import Ints
from gnnlm.predict.split_scoring import SearchedText

BEGINS, CONTINUES, DIGITS, OTHER = "begins a word", "continues a word", "digits", "punctuation or space"
KINDS = (BEGINS, CONTINUES, DIGITS, OTHER)
APOSTROPHES = "'’"
PLACES = (16, 64, 256, 1024)
COUNTS = (1, 10, 100, 1000, 10_000)
CONFIDENCES = (0.1, 0.25, 0.5, 0.75, 0.9)
RANKS = (2, 9, 129)
SIMILARITIES = 5  # buckets of the nearest neighbour's similarity
CHUNK = 2048
Buckets = list[tuple[str, Ints]]


@dataclass(frozen=True)
class Grouping:
    """A way to put test tokens into buckets; `ahead` if a token's bucket is known before the token is."""

    name: str
    title: str
    ahead: bool
    buckets: Callable[[Subject, CachedScores], Buckets]


# -- by value ------------------------------------------------------------------------------------------------------


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
        before, after = np.searchsorted(ordered, high, "left"), np.searchsorted(ordered, high, "right")
        closer_without = share - (before - first) <= after - first - share  # than with all of the equal values
        if before > first and closer_without:
            high, after = int(ordered[before - 1]), before
        ranges.append((int(ordered[first]), high))
        first = int(after)
    return ranges


def by_place(subject: Subject, scores: CachedScores) -> Buckets:
    return by_edges(subject.place_N, PLACES, range_names(PLACES))


def by_count(subject: Subject, scores: CachedScores) -> Buckets:
    counts = store_counts(subject.snapshot.store, int(subject.targets_N.max()) + 1)
    return by_edges(counts[subject.targets_N.numpy()], COUNTS, range_names(COUNTS))


def store_counts(store: Store, vocabulary: int) -> Ints:
    """How often each token occurs in the store, ends of documents left out, [vocabulary]; later ids are dropped."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for segment in store.segments:
        tokens = segment.tokens_P.numpy()
        here = tokens[(tokens >= 0) & (tokens < vocabulary)]
        counts += np.bincount(here, minlength=vocabulary)
    return counts


def by_confidence(subject: Subject, scores: CachedScores) -> Buckets:
    confidence = np.exp(scores.confidence("base").log_prob.double().numpy())
    names = [f"{low:g} to {high:g}" for low, high in itertools.pairwise((0, *CONFIDENCES, 1))]
    return by_edges(confidence, CONFIDENCES, names)


def by_similarity(subject: Subject, scores: CachedScores) -> Buckets:
    """First tokens are apart: texts share the state that predicts them, so its similarity means nothing."""
    nearest = subject.test.table.at(subject.positions_N, 1).similarity[:, 0].double().numpy()
    first = subject.test.read(subject.positions_N).numpy() == 0
    none = np.isneginf(nearest)
    rest = np.flatnonzero(~first & ~none)
    edges = bucket_edges(torch.from_numpy(nearest[rest]), SIMILARITIES)
    ends = [f"{edge:.3g}" for edge in edges]
    between = [f"{low} to {high}" for low, high in itertools.pairwise(ends)]
    names = [f"below {ends[0]}", *between, f"{ends[-1]} or more"] if ends else ["any"]
    buckets = [(name, rest[here]) for name, here in by_edges(nearest[rest], edges, names)]
    return [*buckets, ("no neighbour", np.flatnonzero(none & ~first)), ("first token", np.flatnonzero(first))]


# -- by retrieved rows ---------------------------------------------------------------------------------------------


def hits_of(
    text: SearchedText, store: Store, positions_N: Tensor, targets_N: Tensor
) -> Iterator[npt.NDArray[np.bool_]]:
    """Which retrieved rows, nearest first, have the target as their next token: [n, K], some positions at a time."""
    for start in range(0, len(positions_N), CHUNK):
        part = slice(start, start + CHUNK)
        found = text.table.at(positions_N[part])
        tokens_nK = neighbour_tokens(store, found)
        yield (tokens_nK == targets_N[part, None]).numpy()


def recall_counts(text: SearchedText, store: Store, positions_N: Tensor, targets_N: Tensor) -> Ints:
    """How many retrieved rows of each position have the target as their next token, [N]."""
    counts: Ints = np.concatenate([hit_nK.sum(1) for hit_nK in hits_of(text, store, positions_N, targets_N)])
    return counts


def first_ranks(subject: Subject) -> Ints:
    """The rank, from 1, of the nearest row whose token is the target, [N]; 0 where there is none."""
    hits = hits_of(subject.test, subject.snapshot.store, subject.positions_N, subject.targets_N)
    ranks: Ints = np.concatenate([np.where(hit_nK.any(1), hit_nK.argmax(1) + 1, 0) for hit_nK in hits])
    return ranks


def by_rank(subject: Subject, scores: CachedScores) -> Buckets:
    ranks = first_ranks(subject)
    found = np.flatnonzero(ranks > 0)
    k = subject.test.table.k
    edges = [edge for edge in RANKS if edge <= k]
    names = ["nearest", *(_span(low, high - 1) for low, high in itertools.pairwise([*edges, k + 1]))]
    buckets = [(name, found[here]) for name, here in by_edges(ranks[found], edges, names)]
    return [*buckets, ("not among them", np.flatnonzero(ranks == 0))]


# -- by part of a word ---------------------------------------------------------------------------------------------


def kind_of(text: str, start: int, end: int) -> str:
    """The kind of the token text[start:end].

    A token with a letter begins a word unless a letter or a digit stands right before its first letter; an apostrophe
    within a word belongs to the word. A token without text is a byte of a character and counts as that character.

    >>> text = "isn't x2, 42"
    >>> [kind_of(text, *where) for where in ((0, 3), (3, 5), (5, 7), (7, 8), (8, 9), (9, 12))]
    ['begins a word', 'continues a word', 'begins a word', 'digits', 'punctuation or space', 'digits']
    """
    piece = text[start : max(end, start + 1)]
    letter = next((place for place, c in enumerate(piece) if c.isalpha()), None)
    if letter is None:
        return DIGITS if any(c.isdigit() for c in piece) else OTHER
    at = start + letter
    if at and text[at - 1] in APOSTROPHES:
        at -= 1
    return CONTINUES if at and text[at - 1].isalnum() else BEGINS


def kinds_of(stream: Stream) -> list[str]:
    """The kind of every token of a split, ends of documents left out."""
    kinds = []
    for number, document in enumerate(stream.documents):
        first, last = stream.starts[number : number + 2].tolist()
        kinds += [kind_of(document.text, *stream.characters(position)) for position in range(first, last - 1)]
    return kinds


def by_kind(subject: Subject, scores: CachedScores) -> Buckets:
    kinds = np.array(kinds_of(subject.snapshot.streams["test"]))
    return [(kind, np.flatnonzero(kinds == kind)) for kind in KINDS]


GROUPINGS = (
    Grouping("place", "tokens before it in its document", True, by_place),
    Grouping("sureness", "the base model's probability of its best token", True, by_confidence),
    Grouping("similarity", "similarity of the nearest neighbour", True, by_similarity),
    Grouping("count", "occurrences of the token in the store", False, by_count),
    Grouping("kind", "part of a word", False, by_kind),
    Grouping("rank", "rank of the nearest neighbour with the right token", False, by_rank),
)
