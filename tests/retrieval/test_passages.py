"""BM25 over passages against a plain loop; how documents are cut."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.errors import ConfigError
from gnnlm.retrieval.bm25 import PassageIndex, plan_passages
from tests.reference.bm25 import bm25_score

TOKEN = st.integers(0, 12)


@given(
    passages=st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=12),
    query=st.lists(st.integers(0, 20), max_size=8),
    count=st.integers(1, 4),
)
def test_ranking_is_that_of_the_loop(passages: list[list[int]], query: list[int], count: int) -> None:
    index = PassageIndex([np.array(passage) for passage in passages])
    expected = [bm25_score(passages, number, query) for number in range(len(passages))]
    np.testing.assert_allclose(index.scores(query), expected, rtol=1e-9, atol=1e-12)
    found = index.find(query, count)
    assert len(found) == min(count, sum(score > 0 for score in expected))
    ranked = sorted((-round(score, 9), number) for number, score in enumerate(expected) if score > 0)
    np.testing.assert_allclose([expected[n] for n in found], [-score for score, _ in ranked[:count]], rtol=1e-6)


def test_ties_go_to_the_first() -> None:
    passages = [np.array([3, 4]), np.array([1, 2]), np.array([1, 2]), np.array([2, 1])]
    assert PassageIndex(passages).find([1, 2], 3) == (1, 2, 3)


def test_nothing_to_find() -> None:
    assert PassageIndex([]).find([1, 2], 3) == ()
    assert PassageIndex([np.array([1, 2])]).find([], 3) == ()
    assert PassageIndex([np.array([1, 2])]).find([7, 8], 3) == ()


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5), length=st.integers(1, 7))
def test_passages_cover_each_document_and_stay_inside(lengths: list[int], length: int) -> None:
    starts = np.cumsum([0, *(size + 1 for size in lengths)])  # a position without token after each document
    covered: set[int] = set()
    found = plan_passages(starts, length).tolist()
    assert len({tuple(passage) for passage in found}) == len(found)
    for first, last in found:
        number = int(np.searchsorted(starts, first, side="right")) - 1
        assert starts[number] <= first < last <= starts[number + 1] - 1
        assert last - first == min(length, lengths[number])
        covered |= set(range(first, last))
    ends = {int(start) - 1 for start in starts[1:]}
    assert covered == set(range(int(starts[-1]))) - ends


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"needs bm25s, which is not installed; .* pip install 'gnnlm\[passages\]'"):
        PassageIndex([np.array([1])])
