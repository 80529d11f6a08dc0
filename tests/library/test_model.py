"""Any sequence of changes leaves what a dictionary says, and searches it as a store made from scratch."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnlm.book import book_of
from gnnlm.config import load_config
from gnnlm.datastore.encode import encode_tokens, round_states
from gnnlm.library.library import Library
from gnnlm.retrieval.index import as_keys
from gnnlm.run import Run
from tests.library.conftest import make_text

NAMES = ("a", "b", "c", "d")
K = 6
changes = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES), st.just(0)),
    st.tuples(st.just("compact"), st.just(""), st.integers(0, 1)),
)


def nearest_by_hand(run: Run, texts: dict[str, str], query: torch.Tensor) -> list[float]:
    """The similarities of the nearest rows, by comparing the query with every row of every text."""
    found = []
    for text in texts.values():
        keys = encoded(run, text)
        found += (as_keys(keys[:-1], "cosine") @ query).tolist()
    return sorted(found, reverse=True)[:K]


_runs: dict[int, Run] = {}


def encoded(run: Run, text: str) -> torch.Tensor:
    _runs[id(run)] = run
    return _encoded(id(run), text)


@cache
def _encoded(run: int, text: str) -> torch.Tensor:
    config = _runs[run].config
    lm = _runs[run].snapshot.lm
    made = encode_tokens(lm, np.array(lm.tokenize(text)[0]), config.lm)
    return torch.from_numpy(round_states(made.states, config.store.dtype)).float()


@settings(max_examples=12)
@given(st.lists(changes, min_size=1, max_size=7))
def test_changes_against_a_dictionary(
    tiny_run: Run, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]
) -> None:
    root = Path(shutil.copytree(tiny_run.root, tmp_path_factory.mktemp("model") / "run"))
    run = Run(load_config(root), reading=True)
    run.snapshot._components[("source",)] = tiny_run.snapshot.source_lm  # loaded once for all examples
    library = Library(run)
    built = {entry.name: book_of(run).document(entry.name).text for entry in library.documents()}
    oracle = dict(built)
    generation = 0
    for what, name, number in steps:
        before = dict(oracle)
        if what == "put":
            text = make_text(number)
            change = library.replace_texts({name: text}) if name in oracle else library.add_texts({name: text})
            oracle[name] = text
        elif what == "remove" and name in oracle:
            change = library.remove(name)
            del oracle[name]
        elif what == "compact":
            change = library.compact(erase=bool(number))
        else:
            continue
        if what != "compact":
            generation += oracle != before
            assert change.generation == generation
        generation = change.generation
    book = book_of(run)
    assert {document.name: book.document(document.name).text for document in book.documents} == oracle
    assert len(book.documents) == len(oracle)
    assert len(book.model.index) == sum(len(run.snapshot.lm.tokenize(text)[0]) for text in oracle.values())
    for text in (make_text(0), built["doc04.txt"]):
        query = encoded(run, text)[20]
        found = book.model.index.search(query[None], K)
        by_hand = nearest_by_hand(run, oracle, as_keys(query[None], "cosine")[0])
        np.testing.assert_allclose(found.similarity[0].tolist(), by_hand, atol=2e-3)
        names = {book.model.store.names[int(n)] for n in book.model.store.document_of(found.positions[0])}
        assert names <= set(oracle)
    library.compact()
    book.refresh()  # or it would keep the erasing waiting
    library.compact(erase=True)
    assert not book.refresh()
    assert {document.name: book.document(document.name).text for document in book.documents} == oracle
