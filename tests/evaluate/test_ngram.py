"""The n-gram against a dictionary-written one."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.evaluate.ngram import KneserNey


def slow(train: list[list[int]], order: int, vocab: int, history: tuple[int, ...], word: int) -> float:
    """p(word | history) by the definition, with dictionaries."""
    grams = {
        n: Counter(
            tuple([-1] * (order - 1) + text)[at - n : at] for text in train for at in range(order, order + len(text))
        )
        for n in range(1, order + 1)
    }

    def prob(n: int) -> float:
        if n == 0:
            return 1 / vocab
        counts: Counter[tuple[int, ...]] = grams[n]
        if n < order:
            before = defaultdict(set)
            for gram in grams[n + 1]:
                before[gram[1:]].add(gram[0])
            counts = Counter({gram: len(words) for gram, words in before.items()})
        once, twice = (sum(c == times for c in counts.values()) for times in (1, 2))
        discount = once / (once + 2 * twice) if once and twice else 0.5
        own = history[len(history) - (n - 1) :]
        following = {gram[-1]: c for gram, c in counts.items() if gram[:-1] == own}
        if not following:
            return prob(n - 1)
        total = sum(following.values())
        return (max(following.get(word, 0) - discount, 0) + discount * len(following) * prob(n - 1)) / total

    return prob(order)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
def test_is_the_definition(train: list[list[int]], test: list[int]) -> None:
    model = KneserNey([np.array(text) for text in train], vocab_size=5, order=3)
    got = np.exp(model.log_probs([np.array(test)]))
    for at, word in enumerate(test):
        history = tuple([-1, -1, *test[:at]])
        assert got[at] == pytest.approx(slow(train, 3, 5, history, word))


def test_sums_to_one() -> None:
    rng = np.random.default_rng(0)
    model = KneserNey([rng.integers(0, 6, 500)], vocab_size=7)
    for history in ([1, 2, 3, 4], [6, 6, 6, 6], []):
        probs = [np.exp(model.log_probs([np.array([*history, word])])[-1]) for word in range(7)]
        assert sum(probs) == pytest.approx(1)
