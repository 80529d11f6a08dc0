"""Where the end of a text occurs in the store, or in the text itself.

The positions of a store are sorted once by the tokens before them, read backwards, so the longest match of a text's end
is found by bisection. That takes four bytes per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]
DEPTH = 16  # tokens before a position that the order depends on
DOUBLINGS = 4  # 2 ** DOUBLINGS == DEPTH
OCCURRENCES = 32  # places that are looked at, of those with the longest match
LEAST, OWN_LEAST = 2, 2  # tokens that must match, in the store and in the text itself


@dataclass(frozen=True)
class Match:
    """Positions that follow the longest match, and its length in tokens (at most `DEPTH`)."""

    positions: list[int]
    length: int


class SuffixIndex:
    """Positions of tokens (-1 past a document's end), sorted by the tokens before them."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.order = _ordered(np.asarray(tokens))

    def ending(self, text: Sequence[int], most: int = 256) -> int:
        """Return how many of a text's last tokens occur in the store in one run, at most `most`."""
        match = self.longest(text)
        if match is None:
            return 0
        best = match.length
        if best == DEPTH:  # the order looks no further back
            for position in match.positions:
                before = self._before(position, most)
                ends = zip(before, reversed(text), strict=False)
                best = max(best, next((i for i, (a, b) in enumerate(ends) if a != b), min(len(before), len(text))))
        return best

    def longest(self, text: Sequence[int]) -> Match | None:
        """Return the positions after the longest occurrence of the text's end; None below `LEAST` tokens."""
        ending = list(reversed(text[-DEPTH:]))
        if len(ending) < LEAST:
            return None
        low = 0
        high = len(self.order)
        while low < high:
            middle = (low + high) // 2
            if self._before(int(self.order[middle]), len(ending)) < ending:
                low = middle + 1
            else:
                high = middle
        lengths = {place: self._length(place, ending) for place in (low - 1, low) if 0 <= place < len(self.order)}
        longest = max(lengths.values(), default=0)
        if longest < LEAST:
            return None
        first = last = next(place for place, length in lengths.items() if length == longest)
        while first > 0 and last - first < OCCURRENCES and self._length(first - 1, ending) == longest:
            first -= 1
        while last + 1 < len(self.order) and last - first < OCCURRENCES and self._length(last + 1, ending) == longest:
            last += 1
        return Match([int(place) for place in self.order[first : last + 1]], longest)

    def _before(self, position: int, count: int) -> list[int]:
        """Return the tokens of the document before a position, the nearest first."""
        before: list[int] = []
        for token in self.tokens[max(0, position - count) : position][::-1].tolist():
            if token < 0:
                break
            before.append(token)
        return before

    def _length(self, place: int, ending: list[int]) -> int:
        before = self._before(int(self.order[place]), len(ending))
        return next((i for i, (a, b) in enumerate(zip(before, ending, strict=False)) if a != b), len(before))


def _ordered(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Return positions with a token, sorted by up to `DEPTH` tokens before each, the nearest first."""
    count = len(tokens)
    rank = np.zeros(count, dtype=np.int64)  # of what comes before a position; 0: a document begins
    rank[1:] = np.where(tokens[:-1] >= 0, tokens[:-1].astype(np.int64) + 1, 0)
    step = 1
    for _ in range(DOUBLINGS):
        further = np.zeros(count, dtype=np.int64)
        further[step:] = rank[:-step] if step < count else 0
        start = rank == 0
        both = np.where(start, 0, rank * (int(further.max(initial=0)) + 1) + further)
        rank = np.unique(both, return_inverse=True)[1].reshape(-1)
        step *= 2
    order = np.argsort(rank, kind="stable").astype(np.int32)
    return order[tokens[order] >= 0]


def own_match(text: Tokens, longest: int = DEPTH) -> Match | None:
    """Return the last earlier occurrence of the longest possible end of the text."""
    last = len(text) - 1
    if last < 1:
        return None
    places = np.flatnonzero(text[:last] == text[last])
    length = 1
    while length < longest and len(places):
        further = places[places >= length]
        further = further[text[further - length] == text[last - length]]
        if not len(further):
            break
        places = further
        length += 1
    if length < OWN_LEAST or not len(places):
        return None
    return Match([int(places[-1]) + 1], length)
