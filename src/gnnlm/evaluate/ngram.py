"""An interpolated n-gram model with Kneser-Ney smoothing: the baseline that any base model has to beat.

    p_n(w | h) = max(c(h w) - D, 0) / c(h)  +  D N(h) / c(h)  p_{n-1}(w | h')

c counts occurrences at the highest order and distinct left neighbours below it, N(h) is how many words follow h, h'
is h without its first word, and p_0 is uniform. One discount D per order, from the counts of counts. All counts are
sorted arrays of hashes, looked up by bisection.

Shapes: N tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.corpus.stream import Stream

Hashes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]
PRIME, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class GramCounts:
    """Counts of one order: of every n-gram, and of every history."""

    grams: Hashes
    counts: Floats
    histories: Hashes
    totals: Floats
    followers: Floats
    discount: float


def hash_grams(tokens: Tokens, n: int) -> Hashes:
    """One hash for the n tokens that end at each token; the text is read as if tokens -1 preceded it."""
    padded = np.concatenate([np.full(n - 1, -1, dtype=np.int64), tokens]) if n > 1 else tokens
    hashes = np.zeros(len(tokens), dtype=np.uint64)
    for offset in range(n):
        part = (padded[offset : offset + len(tokens)] + 2).astype(np.uint64)
        hashes = (hashes ^ (part * PRIME)) * MIX
        hashes ^= hashes >> np.uint64(31)
    return hashes


def texts_hashes(texts: list[Tokens], n: int) -> Hashes:
    return np.concatenate([hash_grams(text, n) for text in texts])


class KneserNey:
    """The counts of one text, or of several independent texts."""

    def __init__(self, texts: list[Tokens], vocab_size: int, order: int = 5) -> None:
        self.vocab_size = vocab_size
        self.order = order
        self._orders = [self._count(texts, n) for n in range(1, order + 1)]

    def _count(self, texts: list[Tokens], n: int) -> GramCounts:
        hashes = texts_hashes(texts, n)
        grams, first, counts = np.unique(hashes, return_index=True, return_counts=True)
        if n < self.order:  # how many different words precede it, instead of how often it occurs
            _, where = np.unique(texts_hashes(texts, n + 1), return_index=True)
            counts = np.bincount(np.searchsorted(grams, hashes[where]), minlength=len(grams))
        history_of = self._history(texts, n)[first]
        histories, line = np.unique(history_of, return_inverse=True)
        totals = np.bincount(line, weights=counts).astype(np.float64)
        followers = np.bincount(line).astype(np.float64)
        once = int((counts == 1).sum())
        twice = int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else 0.5
        return GramCounts(grams, counts.astype(np.float64), histories, totals, followers, discount)

    @staticmethod
    def _history(texts: list[Tokens], n: int) -> Hashes:
        """The hash of the n - 1 tokens before each token."""
        if n == 1:
            return np.zeros(sum(len(text) for text in texts), dtype=np.uint64)
        before = [np.concatenate([[-1], text[:-1]]) if len(text) else text for text in texts]
        return texts_hashes(before, n - 1)

    def log_probs(self, texts: list[Tokens]) -> Floats:
        """log p of every token of the texts, [N]."""
        probs = np.full(sum(len(text) for text in texts), 1 / self.vocab_size)
        for n, counted in enumerate(self._orders, start=1):
            counts = _look_up(counted.grams, counted.counts, texts_hashes(texts, n))
            history = self._history(texts, n)
            totals = _look_up(counted.histories, counted.totals, history)
            followers = _look_up(counted.histories, counted.followers, history)
            known = totals > 0
            spared = counted.discount * followers[known]
            higher = np.maximum(counts[known] - counted.discount, 0)
            probs[known] = (higher + spared * probs[known]) / totals[known]
        logs: Floats = np.log(probs)
        return logs


def _look_up(keys: Hashes, values: Floats, wanted: Hashes) -> Floats:
    """The value of each wanted key; 0 for a missing key."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


@dataclass(frozen=True)
class NgramScore:
    """What an n-gram model of some order makes of the test split."""

    order: int
    ppl: float
    bits_per_byte: float
    test_tokens: int


def score_ngram(
    streams: Mapping[str, Stream], continuous: bool, facts: Mapping[str, Any], order: int = 5
) -> NgramScore:
    """Score the test split with an n-gram model of the train split; both are read as the base model reads them.

    `facts` are those of the corpus.
    """

    def texts(split: str) -> list[Tokens]:
        stream = streams[split]
        if continuous:
            return [stream.text()]
        tokens = np.asarray(stream.tokens, dtype=np.int64)
        return [tokens[start : end - 1] for start, end in itertools.pairwise(stream.starts.tolist())]

    train = texts("train")
    size = int(facts["vocabulary"]["size"]) if "vocabulary" in facts else 1 + int(max(t.max() for t in train))
    scores = KneserNey(train, size, order).log_probs(texts("test"))
    return NgramScore(
        order=order,
        ppl=float(np.exp(-scores.mean())),
        bits_per_byte=float(-scores.sum() / np.log(2) / facts["test"]["bytes"]),
        test_tokens=len(scores),
    )
