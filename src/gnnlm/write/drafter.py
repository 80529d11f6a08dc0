"""Drafts from the book: tokens that may come next, to be checked in one step.

A draft cannot change what is written: each of its tokens is kept only if the model chooses the same one. It only
changes how many tokens a step yields. Drafts come from two places:
- rows: of the neighbours that voted for the token just written, what follows them in the store, the heaviest chain;
- text: what follows the longest match of the text's end, in the store or in the text itself.

How many tokens are drafted follows from measured times and from how often such drafts were accepted in this text.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import numpy as np
import torch
from torch import Tensor

from gnnlm.datastore.store import Store
from gnnlm.write.suffix import Match, SuffixIndex, Tokens, own_match

LONGEST = 15  # tokens of a draft
LOOK_AHEAD = 3  # tokens of drafts that are compared: as many as a step checks for nothing
NO_TOKENS = np.empty(0, dtype=np.int64)
LARGEST_STORE = 50_000_000  # rows up to which the store's suffixes are sorted: the order takes 4 bytes per row
PRIOR = 3.0  # how many observations the first guess of a chance counts for
GUESSES = {  # chance that a drafted token is accepted, by where it comes from and how strong that is (docs/log.md)
    "rows": (0.08, 0.2, 0.28, 0.43),
    "store": (0.28, 0.3, 0.5, 0.6),
    "own": (0.68, 0.82, 0.95, 0.99),
    "both": (0.6, 0.75, 0.85, 0.97),
}
Kind = tuple[str, int]


@dataclass(frozen=True)
class TokenDraft:
    """Tokens that may follow, and the kind of each, by which its chance is estimated."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    def cut(self, length: int) -> TokenDraft:
        return TokenDraft(self.tokens[:length], self.kinds[:length])


class Chances:
    """How often drafted tokens of each kind were accepted in a text."""

    def __init__(self) -> None:
        self._counts: dict[Kind, tuple[float, float]] = {}

    def of(self, kind: Kind) -> float:
        accepted, tried = self._counts.get(kind, (0.0, 0.0))
        return (accepted + PRIOR * GUESSES[kind[0]][kind[1]]) / (tried + PRIOR)

    def saw(self, kind: Kind, accepted: bool) -> None:
        before, tried = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = before + accepted, tried + 1

    def expected(self, draft: TokenDraft) -> list[float]:
        """Return how many tokens a step yields if it checks the first n of a draft, for n from 0 on."""
        yields = [1.0]
        chance = 1.0
        for kind in draft.kinds:
            chance *= self.of(kind)
            yields.append(yields[-1] + chance)
        return yields


class Costs:
    """The time of a step by the number of tokens it reads, as measured so far."""

    SLOPE = 0.06  # growth per token, as a share, before anything is known
    KEPT = 9  # the last times of each size; their median counts, so that one slow moment does not

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}

    def saw(self, tokens: int, seconds: float) -> None:
        times = self._times.setdefault(tokens, deque(maxlen=self.KEPT))
        times.append(seconds)
        self._seconds[tokens] = median(times)

    def of(self, tokens: int, fewest: int) -> float:
        """Return the seconds of a step, by interpolation between known sizes; a guess before any is known."""
        if tokens in self._seconds:
            return self._seconds[tokens]
        known = sorted(self._seconds)
        lower = [n for n in known if n < tokens]
        upper = [n for n in known if n > tokens]
        if lower and upper:
            below = lower[-1]
            above = upper[0]
            share = (tokens - below) / (above - below)
            return (1 - share) * self._seconds[below] + share * self._seconds[above]
        if lower:
            return self._seconds[lower[-1]] * (1 + self.SLOPE * (tokens - lower[-1]) / max(1, fewest))
        return self._seconds[upper[0]] if upper else 1.0 + self.SLOPE * tokens


def best_length(expected: Sequence[Sequence[float]], costs: Costs) -> int:
    """Return how many tokens to draft for every text of a batch, for the most tokens per second.

    >>> best_length([[1.0, 1.9, 2.7]], Costs()), best_length([[1.0, 1.01]], Costs())
    (2, 0)
    """
    texts = len(expected)
    longest = max(map(len, expected)) - 1
    rates = [
        sum(e[min(n, len(e) - 1)] for e in expected) / costs.of(texts * (n + 1), texts) for n in range(longest + 1)
    ]
    return max(range(longest + 1), key=lambda n: rates[n])


class Drafter:
    """Drafts from a store and from the text itself."""

    def __init__(self, store: Store, before: Drafter | None = None) -> None:
        """`before` is the drafter of the same store's first segments: its suffixes and costs are used."""
        self.store = store
        self._before = before
        self.costs: defaultdict[str, Costs] = defaultdict(Costs) if before is None else before.costs  # by predictor

    @cached_property
    def suffixes(self) -> list[SuffixIndex]:
        """The store's positions by what precedes them; sorted at first use."""
        if len(self.store) > LARGEST_STORE:
            return []
        known = [] if self._before is None else self._before.suffixes
        return [*known, *(SuffixIndex(s.live_tokens_P.numpy()) for s in self.store.segments[len(known) :])]

    def draft(self, text: Sequence[int], positions_R: Tensor, weights_R: Tensor, chances: Chances) -> TokenDraft:
        """Return the most promising draft; two that begin alike support each other.

        `positions_R` are the rows that voted for the text's last token, `weights_R` their weights.
        """
        rows = self.rows(text, positions_R, weights_R)
        matches = [self.own(text), self.stored(text)]
        drafts = [rows, *matches, *(supported(match, rows) for match in matches)]
        return max(drafts, key=lambda draft: chances.expected(draft)[: LOOK_AHEAD + 1][-1])

    def rows(self, text: Sequence[int], positions_R: Tensor, weights_R: Tensor) -> TokenDraft:
        """Return the heaviest chain of tokens that follow the rows, up to their documents' ends.

        Positions behind the store's last are rows of the text itself.
        """
        draft = TokenDraft()
        if not len(positions_R):
            return draft
        size = len(self.store)
        ahead_RL = positions_R[:, None] + torch.arange(1, LONGEST + 1)
        tokens_RL = self.store.tokens(ahead_RL.clamp(max=size - 1)).numpy()
        if int(positions_R.max()) >= size:
            own_RL = (ahead_RL - size).clamp(0, len(text)).numpy()
            tokens_RL = np.where(positions_R.numpy()[:, None] < size, tokens_RL, np.array([*text, -1])[own_RL])
        weights = weights_R.double().numpy()
        total = max(float(weights.sum()), 1e-30)
        alive = np.arange(len(weights))
        for step in range(LONGEST):
            following = tokens_RL[alive, step]
            alive = alive[following >= 0]
            following = following[following >= 0]
            if not len(alive):
                break
            choices, number = np.unique(following, return_inverse=True)
            masses = np.bincount(number, weights[alive])
            best = int(masses.argmax())
            draft.tokens.append(int(choices[best]))
            draft.kinds.append(("rows", min(3, int(4 * masses[best] / total))))
            alive = alive[number == best]
        return draft

    def own(self, text: Sequence[int]) -> TokenDraft:
        """Return what followed the longest match of the text's end in the text itself."""
        tokens = np.asarray(text, dtype=np.int64)
        return _after(own_match(tokens), tokens, "own")

    def stored(self, text: Sequence[int]) -> TokenDraft:
        """Return what follows the longest match of the text's end in the store."""
        found = [(suffixes.longest(text), suffixes.tokens) for suffixes in self.suffixes]
        match, tokens = max(found, key=lambda one: 0 if one[0] is None else one[0].length, default=(None, NO_TOKENS))
        return _after(match, tokens, "store")


def supported(draft: TokenDraft, rows: TokenDraft) -> TokenDraft:
    """Mark the prefix that a draft shares with `rows` as of the kind `both`; without one, return an empty draft."""
    same = 0
    while same < min(len(draft.tokens), len(rows.tokens)) and draft.tokens[same] == rows.tokens[same]:
        same += 1
    if not same:
        return TokenDraft()
    both = [("both", max(a[1], b[1])) for a, b in zip(draft.kinds[:same], rows.kinds[:same], strict=True)]
    return TokenDraft(draft.tokens, [*both, *draft.kinds[same:]])


def _after(match: Match | None, tokens: Tokens, name: str) -> TokenDraft:
    """Return what follows most of the matched places; a longer match makes a stronger draft."""
    if match is None:
        return TokenDraft()
    found = _most_common(tokens, match.positions)
    strength = (match.length - 1) // 3
    return TokenDraft(found, [(name, min(3, strength + place // 4)) for place in range(len(found))])


def _most_common(tokens: Tokens, positions: list[int]) -> list[int]:
    """Return the chain of tokens that most of the positions agree on."""
    chain: list[int] = []
    alive = np.asarray(positions)
    for step in range(LONGEST):
        alive = alive[alive + step < len(tokens)]
        following = tokens[alive + step]
        alive = alive[following >= 0]
        following = following[following >= 0]
        if not len(alive):
            break
        choices, counts = np.unique(following, return_counts=True)
        best = choices[int(counts.argmax())]
        chain.append(int(best))
        alive = alive[following == best]
    return chain
