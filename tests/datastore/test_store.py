"""A store read by position, whatever segments it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.corpus.document import Document
from gnnlm.datastore.filter import open_documents
from gnnlm.datastore.store import Segment, Store
from gnnlm.errors import CorpusError
from gnnlm.retrieval.neighbours import Neighbours, NeighbourTable
from gnnlm.run import Run


def segments(lengths: list[list[int]], seed: int = 0) -> list[Segment]:
    """Segments of documents of these lengths."""
    rng = np.random.default_rng(seed)
    made = []
    for documents in lengths:
        total = sum(documents)
        states = torch.from_numpy(rng.normal(size=(total, 3)).astype(np.float16))
        tokens = torch.from_numpy(rng.integers(-1, 9, size=total).astype(np.int16))
        made.append(Segment(states, tokens, torch.tensor([0, *np.cumsum(documents)])))
    return made


@given(lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4), data=st.data())
def test_several_segments_read_as_one(lengths: list[list[int]], data: st.DataObject) -> None:
    parts = segments(lengths)
    joined = Segment(
        torch.cat([part.states_PD for part in parts]),  # type: ignore[arg-type]
        torch.cat([part.tokens_P for part in parts]),
        torch.tensor([0, *np.cumsum([n for documents in lengths for n in documents])]),
    )
    one, several = Store([joined]), Store(parts)
    assert len(one) == len(several)
    positions = torch.tensor(data.draw(st.lists(st.integers(0, len(one) - 1), max_size=12)), dtype=torch.long)
    positions = positions.view(2, -1) if len(positions) % 2 == 0 and len(positions) else positions
    for read in ("states", "tokens", "document_of"):
        assert torch.equal(getattr(several, read)(positions), getattr(one, read)(positions))
    assert several.tokens(positions).dtype == torch.long
    assert several.states(positions).dtype == torch.float32
    for a, b in zip(several.bounds(positions), one.bounds(positions), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(several.document_starts, one.document_starts)


def test_a_citation_reads_one_document(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tiny_run.snapshot.store
    stream, read = tiny_run.snapshot.streams["train"], list[int]()

    def counted(number: int) -> Document:
        read.append(number)
        return stream.documents._read_document(number)

    monkeypatch.setattr(stream.documents, "_read", counted)
    position = int(stream.starts[2]) + 5
    passage = store.passage(position, 4, 3)
    assert set(read) == {2}
    text = stream.documents[2].text
    assert passage.before + passage.token + passage.after == text[1:9]
    assert passage.document == store.names[2]
    assert store.characters(position) == (5, 6)
    assert store.names == [document.name for document in stream.documents]


def test_few_bytes_a_position(tiny_run: Run) -> None:
    """Nothing is held per position but the files' own maps."""
    (segment,) = tiny_run.snapshot.store.segments
    assert segment.tokens_P.element_size() == 2
    assert len(segment.starts) < 20


def test_a_table_is_read_by_position() -> None:
    ids = np.array([[1, 2], [3, 4], [5, -1]])
    similarity = np.array([[0.9, 0.8], [0.7, 0.6], [0.5, -np.inf]], dtype=np.float32)
    whole = NeighbourTable(ids, similarity)
    assert whole.at(torch.tensor([2, 0])).positions.tolist() == [[5, -1], [1, 2]]
    some = NeighbourTable(ids, similarity, torch.tensor([4, 7, 9]))
    found = some.at(torch.tensor([[7, 8], [9, 3]]), 1)
    assert found.positions.tolist() == [[[3], [-1]], [[5], [-1]]]
    assert torch.isneginf(found.similarity[0, 1]).all()
    assert some.positions(torch.tensor([1])).tolist() == [7]


def test_neighbours_are_cut_and_filled_up() -> None:
    two = Neighbours(torch.tensor([[4, 2]]), torch.tensor([[0.5, 0.25]]))
    assert two.nearest(1).positions.tolist() == [[4]]
    assert two.padded(1).positions.tolist() == [[4]]
    assert two.padded(3).positions.tolist() == [[4, 2, -1]]
    assert two.padded(3).similarity.tolist()[0][2] == -np.inf
    assert two[0].k == 2


@pytest.mark.parametrize(
    ("only", "exclude", "left"),
    [
        (None, None, [0, 1, 2, 3]),
        ("a/*", None, [0, 1]),
        (["a/x", "b[1]"], None, [0, 3]),
        (None, "a/x", [1, 2, 3]),
        ("*", "*", []),
        ([], None, []),
    ],
)
def test_filters_by_name_and_glob(only: Any, exclude: Any, left: list[int]) -> None:
    """A name that is also a glob means the document of that name."""
    assert open_documents(["a/x", "a/y", "b1", "b[1]"], only, exclude) == left


def test_filters_that_match_nothing_are_refused() -> None:
    with pytest.raises(CorpusError, match="no document of the store is named 'z'"):
        open_documents(["a"], only=["a", "z"])
    with pytest.raises(CorpusError, match="got int"):
        open_documents(["a"], exclude=[3])  # type: ignore[list-item]
