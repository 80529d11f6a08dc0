"""Attached text: what a run with the document in its store predicts, and nothing left behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnlm
from gnnlm.book import Book
from gnnlm.config import parse_config
from gnnlm.datastore.store import Store
from gnnlm.datastore.tables import JoinedTable, joined_table
from gnnlm.errors import GnnlmError
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.predict.window_cache import WindowCache
from gnnlm.retrieval.segmented import SegmentedIndex
from gnnlm.run import Run
from tests.conftest import merge

TWO, FOUR = {"store": {"segment_tokens": 3500}}, {"store": {"segment_tokens": 1200}}  # segments of the tiny corpus
CASES: dict[str, dict[str, Any]] = {
    "fp16, projected, one segment": TWO,
    "fp32, states, several segments": merge(
        FOUR, {"store": {"dtype": "fp32"}, "cache": {"form": "states", "dtype": "fp32"}}
    ),
    "pq codec, states in fp16": merge(
        TWO, {"codec": {"kind": "pq", "bytes": 8, "train_rows": 1000}, "cache": {"form": "states"}}
    ),
    "pq codec, no cache, FAISS, several segments": merge(
        FOUR,
        {
            "codec": {"kind": "pq", "bytes": 8, "train_rows": 1000},
            "cache": {"form": "none"},
            "index": {"kind": "IVF4,Flat", "probes": 4},
        },
    ),
    "paper, coded cache, ffn_input": merge(
        FOUR,
        {
            "gnn": {"preset": "paper"},
            "cache": {"form": "states", "dtype": "pq", "bytes": 8},
            "store": {"key": "ffn_input"},
        },
    ),
}


def without_the_last_segment(model: OpenBook) -> OpenBook:
    """The same trained parts over all segments but the last."""
    last = len(model.store.segments) - 1
    store, predictor, cache = Store(model.store.segments[:last]), model.predictor, model.predictor.cache
    if cache is not None:
        assert isinstance(cache, WindowCache)
        joined = [table for table in cache.tables if isinstance(table, JoinedTable)]
        cache = replace(cache, store=store, tables=[joined_table(table.tables[:last]) for table in joined])
    assert isinstance(model.index, SegmentedIndex)
    predictor = replace(predictor, graphs=replace(predictor.graphs, store=store), cache=cache)
    return replace(model, store=store, index=model.index.between(0, last), predictor=predictor)


@pytest.fixture(scope="module", params=CASES)
def whole(
    request: pytest.FixtureRequest,
    tiny_values: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    quick_codes: None,
) -> Book:
    changes = merge({"train": {"curriculum": [{"k": 4, "steps": 4}]}}, CASES[request.param])
    run = Run(parse_config(merge(tiny_values, {"run": str(tmp_path_factory.mktemp("runs") / "run"), **changes})))
    run.build_all()
    return gnnlm.open(run.root)


def test_predictions_are_those_of_a_run_with_the_documents_in_its_store(whole: Book) -> None:
    few = Book(without_the_last_segment(whole.model))
    later = [one.name for one in whole.documents[len(few.documents) :]]
    session = few.attached([(name, whole.document(name).text) for name in later])
    assert len(session.model.store) == len(whole.model.store)
    text = whole.document(later[-1]).text[60:400]
    want, got, before = whole.score(text), session.score(text), few.score(text)
    for name in PREDICTORS:
        np.testing.assert_allclose(got.log_probs[name], want.log_probs[name], atol=1e-4, rtol=1e-4, err_msg=name)
        assert name == "base" or np.abs(before.log_probs[name] - want.log_probs[name]).max() > 0.1
    written = session.generate(text[:200], max_tokens=30)
    assert written.ids == whole.generate(text[:200], max_tokens=30).ids
    cited = {source.document for token in written.tokens for source in token.sources}
    assert cited & {f"attached:{name}" for name in later}


@pytest.fixture(scope="module")
def book(tiny_run: Run) -> Book:
    return gnnlm.open(tiny_run.root)


@pytest.fixture(scope="module")
def text(tiny_run: Run) -> str:
    return str(tiny_run.snapshot.streams["test"].documents[0].text)


def test_files_are_cited_by_name_and_place(book: Book, text: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(text, encoding="utf-8")
    before = sorted(Path(book.origin).rglob("*"))
    found = book.neighbors(text[:40], 1, attach=[tmp_path / "notes.txt"])[-1][0]
    assert found.document == "attached:notes.txt"
    assert text[found.start : found.end] == found.token
    assert found.position >= len(book.model.store)
    for prompt in (text[:50], text[100:180]):
        written = book.generate(prompt, max_tokens=12, attach=str(tmp_path / "notes.txt"))
        for source in (source for token in written.tokens for source in token.sources):
            document = text if source.document == "attached:notes.txt" else book.document(source.document).text
            assert document[source.start : source.end] == source.token
        for span in written.spans:
            document = text if span.document == "attached:notes.txt" else book.document(span.document).text
            assert document[span.start : span.end] == span.text
    streamed = book.stream(text[:50], max_tokens=12, attach=[tmp_path / "notes.txt"])
    assert "".join(streamed) == str(book.generate(text[:50], max_tokens=12, attach=[tmp_path / "notes.txt"]))
    assert sorted(Path(book.origin).rglob("*")) == before  # nothing on disk


def test_a_session_is_used_again_and_ends(book: Book, text: str) -> None:
    names = [one.name for one in book.documents]
    with book.attached([("one", text[:300]), ("two", text[300:600])]) as session:
        assert [one.name for one in session.documents] == [*names, "attached:one", "attached:two"]
        assert session.document("attached:two").text == text[300:600]
        once = book.score(text[:80], attach=[("one", text[:300]), ("two", text[300:600])])
        for name in PREDICTORS:
            np.testing.assert_allclose(session.score(text[:80]).log_probs[name], once.log_probs[name], atol=1e-5)
            following = session.next(text[:60]).log_probs[name]
            assert float(np.exp(following).sum()) == pytest.approx(1, abs=1e-4)
        only = session.neighbors(text[:30], 4, only="attached:*")
        assert {near.document for line in only for near in line} == {"attached:one", "attached:two"}
        left = session.neighbors(text[:30], 4, exclude=["attached:one"])
        assert "attached:one" not in {near.document for line in left for near in line}
        deeper = session.attached([("three", text[50:250])])
        assert deeper.documents[-1].name == "attached:three"
        assert len(deeper.score(text[50:100])) == 50
        assert "attached:one, attached:two" in repr(session)
        assert session.drafter.suffixes[:1] == book.drafter.suffixes
    with pytest.raises(GnnlmError, match="is closed; open the run again"):
        session.score("a")
    with pytest.raises(AttributeError):
        session.nothing  # noqa: B018
    assert [one.name for one in book.documents] == names


def test_what_is_not_near_changes_nothing(book: Book, text: str) -> None:
    """The store's part of a search is what it is without attached text; a filter shows it."""
    ids = book.model.lm.tokenize(text[:120])[0]
    states = book.model.rounded(book.model.reader.read([ids])[0].states_BTD)[0]
    session = book.attached([("far", text[:200])])
    alone, both = book.model.index.search(states, 20), session.model.index.search(states, 40)
    for query in range(len(states)):
        stored = both.positions[query] < len(book.model.store)
        count = int(stored.sum())
        assert torch.equal(both.positions[query][stored][:20], alone.positions[query][:count])
        assert torch.equal(both.similarity[query][stored][:20], alone.similarity[query][:count])
    plain, filtered = book.score(text[:120]), session.score(text[:120], exclude="attached:*")
    for name in PREDICTORS:
        np.testing.assert_allclose(filtered.log_probs[name], plain.log_probs[name], atol=1e-5)


def test_a_book_is_not_disturbed(book: Book, text: str) -> None:
    """Attaching in one thread while others score: everybody gets what is theirs."""
    want = book.score(text[:90]).gnn_knn
    mine = book.score(text[:90], attach=[("mine", text[:400])]).gnn_knn
    assert np.abs(want - mine).max() > 0.1
    wrong: list[float] = []

    def check(number: int) -> None:
        got = book.score(text[:90], attach=[("mine", text[:400])] if number % 2 else None).gnn_knn
        wrong.append(float(np.abs(got - (mine if number % 2 else want)).max()))

    threads = [threading.Thread(target=check, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 6
    assert max(wrong) < 1e-4


def test_causality(book: Book, text: str) -> None:
    changed = text[:50] + ("x" if text[50] != "x" else "y") + text[51:90]
    with book.attached([("notes", text)]) as session:
        one, other = session.score(text[:90]), session.score(changed)
    for name in PREDICTORS:
        np.testing.assert_allclose(one.log_probs[name][:50], other.log_probs[name][:50], atol=1e-4)
        assert abs(one.log_probs[name][51] - other.log_probs[name][51]) > 1e-6


def test_bad_attachments_are_refused(book: Book, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    for given, told in (
        (["missing.txt"], "no such file"),
        ([tmp_path], "no such file"),
        (["x" * 5000], "no such file"),
        ([tmp_path / "latin"], "not utf-8"),
        ([], "nothing to attach"),
        ([("empty", "")], "attached:empty has no tokens"),
        ([("half", "\ud800")], "surrogate"),
        ([("same", "a"), ("same", "b")], "two documents would be named attached:same"),
        ([("a", "b", "c")], "expected a file or a pair"),
        ([3], "expected a file or a pair"),
        (3, "expected files or pairs"),
    ):
        with pytest.raises(GnnlmError, match=told) as caught:
            book.score("a", attach=given)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
