"""The longest match of a text's end, against looking at every place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.write.suffix import DEPTH, LEAST, OWN_LEAST, SuffixIndex, own_match

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6)
TEXT = st.lists(st.integers(0, 3), max_size=30)


def stream(documents: list[list[int]]) -> np.ndarray:
    return np.array([token for document in documents for token in [*document, -1]], dtype=np.int32)


def matched(tokens: list[int], position: int, text: list[int]) -> int:
    """How many tokens before a position are the last of a text."""
    length = 0
    while length < min(DEPTH, len(text), position) and tokens[position - length - 1] == text[-length - 1]:
        length += 1
    return length


@given(documents=DOCUMENTS, text=TEXT)
def test_the_longest_match_in_a_store(documents: list[list[int]], text: list[int]) -> None:
    tokens = stream(documents)
    lengths = {p: matched(tokens.tolist(), p, text) for p, token in enumerate(tokens) if token >= 0}
    longest = max(lengths.values(), default=0)
    found = SuffixIndex(tokens).longest(text)
    if longest < LEAST:
        assert found is None
    else:
        assert found is not None
        assert found.length == longest
        assert sorted(found.positions) == sorted(p for p, length in lengths.items() if length == longest)


@given(text=TEXT)
def test_the_longest_match_in_the_text_itself(text: list[int]) -> None:
    lengths = {p: matched(text, p, text) for p in range(1, len(text))}
    longest = max(lengths.values(), default=0)
    found = own_match(np.array(text, dtype=np.int64))
    if longest < OWN_LEAST:
        assert found is None
    else:
        assert found is not None
        assert found.length == longest
        assert found.positions == [max(p for p, length in lengths.items() if length == longest)]
