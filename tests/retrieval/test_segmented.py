"""A store searched segment by segment finds what one index over all rows finds: ties, filters and leakage ranges."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.config import IndexConfig
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Allowed, Rows
from gnnlm.retrieval.index_recall import recall_of
from gnnlm.retrieval.neighbours import Neighbours
from gnnlm.retrieval.segmented import SegmentedIndex
from tests.retrieval.test_search import faiss_over

DOCUMENTS = st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=4), min_size=1, max_size=5)


def starts_of(documents: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(documents)])


def allowed_of(data: st.DataObject, size: int, queries: int) -> Allowed:
    numbers = st.lists(st.integers(0, size - 1), min_size=queries, max_size=queries)
    barred = positions = None
    if data.draw(st.booleans()):
        low, length = torch.tensor(data.draw(numbers)), torch.tensor(data.draw(numbers))
        barred = (low, low + length)
    if data.draw(st.booleans()):
        positions = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return Allowed(barred, positions)


def segmented(keys: Any, segments: list[list[int]], metric: str) -> SegmentedIndex:
    bases = [0, *np.cumsum([sum(documents) for documents in segments]).tolist()]

    def opened(number: int) -> ExactIndex:
        part = keys[bases[number] : bases[number + 1]]
        return ExactIndex.over(part, Rows(starts_of(segments[number])).all(), metric)

    rows = [sum(documents) - len(documents) for documents in segments]
    return SegmentedIndex(bases, rows, metric, opened)


@given(segments=DOCUMENTS, k=st.integers(1, 30), metric=st.sampled_from(["cosine", "l2"]), data=st.data())
def test_exact_search_of_segments_is_exact_search(
    segments: list[list[int]], k: int, metric: str, data: st.DataObject
) -> None:
    """Keys are small whole numbers, so that many are equally near."""
    whole = starts_of(list(itertools.chain(*segments)))
    size, rng = int(whole[-1]), np.random.default_rng(data.draw(st.integers(0, 99)))
    keys = rng.integers(-1, 2, size=(size, 2)).astype(np.float16)
    queries = torch.from_numpy(rng.integers(-1, 2, size=(4, 2)).astype(np.float32))
    one = ExactIndex.over(keys, Rows(whole).all(), metric)
    several = segmented(keys, segments, metric)
    assert len(one) == len(several)
    allowed = allowed_of(data, size, 4)
    want, found = one.search(queries, k, allowed), several.search(queries, k, allowed)
    assert torch.equal(want.positions, found.positions)
    assert torch.equal(want.similarity, found.similarity)
    some = one.positions_R[torch.from_numpy(rng.integers(len(one), size=(4, 6)))]
    assert torch.equal(one.compare(queries, some, 3).positions, several.compare(queries, some, 3).positions)
    assert torch.equal(one.similarity(queries, some), several.similarity(queries, some))


@given(data=st.data())
def test_missing_neighbours_are_in_no_segment(data: st.DataObject) -> None:
    """Recall of what an index found, some of it missing, is that against one exact index."""
    segments, rng = [[3, 4], [5], [2, 6]], np.random.default_rng(data.draw(st.integers(0, 99)))
    whole = starts_of(list(itertools.chain(*segments)))
    keys = rng.normal(size=(int(whole[-1]), 3)).astype(np.float32)
    queries = torch.from_numpy(rng.normal(size=(4, 3)).astype(np.float32))
    one, several = ExactIndex.over(keys, Rows(whole).all(), "cosine"), segmented(keys, segments, "cosine")
    near = one.search(queries, 5)
    missing = torch.from_numpy(rng.random((4, 5)) < 0.4)
    found = Neighbours(near.positions.masked_fill(missing, -1), near.similarity)
    assert torch.equal(several.similarity(queries, found.positions).isneginf(), missing)
    assert recall_of(found, queries, several, [1, 5]) == recall_of(found, queries, one, [1, 5])


@given(documents=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
def test_rows_are_the_positions_with_a_token(documents: list[int], data: st.DataObject) -> None:
    starts = starts_of(documents)
    ends = set((starts[1:] - 1).tolist())
    want = [position for position in range(int(starts[-1])) if position not in ends]
    rows = Rows(starts)
    assert rows.all().tolist() == want
    assert len(rows) == len(want)
    size = int(starts[-1])
    open_P = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    assert rows.open(open_P).tolist() == [bool(open_P[position]) for position in want]


@pytest.mark.parametrize("kind", ["IVF8,Flat", "ivf"])
def test_parts_of_one_trained_index_find_what_the_whole_finds(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All lists are searched: results depend neither on the segments nor on where a list was cut."""
    segments, rng = [[70, 90], [50], [110, 30, 60]], np.random.default_rng(0)
    whole = starts_of(list(itertools.chain(*segments)))
    size = int(whole[-1])
    keys, queries = rng.normal(size=(size, 8)).astype(np.float32), torch.from_numpy(rng.normal(size=(6, 8)))
    config, bases = IndexConfig(kind=kind), [0, *np.cumsum([sum(d) for d in segments]).tolist()]
    one = faiss_over(tmp_path_factory.mktemp("one"), keys, Rows(whole), config)
    parts = [
        faiss_over(tmp_path_factory.mktemp("part"), keys[low:high], Rows(starts_of(documents)), config)
        for (low, high), documents in zip(itertools.pairwise(bases), segments, strict=True)
    ]
    rows = [len(part) for part in parts]
    several = SegmentedIndex(bases, rows, "cosine", lambda number: parts[number])
    low = torch.from_numpy(rng.integers(size, size=6))
    for allowed in (None, Allowed((low, low + 90)), Allowed(None, torch.from_numpy(rng.random(size) < 0.5))):
        want, found = one.search(queries.float(), 20, allowed), several.search(queries.float(), 20, allowed)
        assert torch.equal(want.positions, found.positions)
        torch.testing.assert_close(want.similarity, found.similarity)


def test_a_segment_is_opened_when_it_is_first_searched() -> None:
    opened: list[int] = []

    def refuse(number: int) -> ExactIndex:
        opened.append(number)
        return ExactIndex(torch.eye(2), torch.arange(2), "cosine")

    index = SegmentedIndex([0, 3, 6], [2, 2], "cosine", refuse)
    assert len(index) == 4
    assert not opened
    nobody = Allowed(None, torch.tensor([True] * 3 + [False] * 3))
    assert index.search(torch.eye(2), 3, nobody).positions.tolist() == [[0, 1, -1], [1, 0, -1]]
    assert opened == [0]  # nothing is open in the second
    assert index.search(torch.eye(2), 3).positions.tolist() == [[0, 3, 1], [1, 4, 0]]
    assert opened == [0, 1]
