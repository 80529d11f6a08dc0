"""Reading on: whatever the pieces, batches, crops and reorders, predictions are those of the whole text."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import gnnlm
from gnnlm.book import Book
from gnnlm.config import parse_config
from gnnlm.errors import GnnlmError
from gnnlm.predict import open_book as module
from gnnlm.predict.open_book import OpenBook, Past
from gnnlm.predict.predictor import PREDICTORS, Prediction
from gnnlm.predict.split_scoring import score_text
from gnnlm.retrieval.neighbours import Neighbours
from gnnlm.run import Run
from tests.conftest import TINY, merge
from tests.train.test_lm import CASES as SCRATCH_CASES
from tests.train.test_lm import SCRATCH

CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}  # similarities
LENGTH = 110  # past two windows of 48 tokens
KINDS = ["llama, fp32", "llama, paper, fp16", "adaptive", "transformer-xl"]


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, tiny_lm_dir: Path, text_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OpenBook, float]:
    """An open book on each kind of base model, and how closely pieces must agree with the whole."""
    steps = {"curriculum": [{"k": 4, "steps": 2}]}
    values = merge(TINY, {"lm": {"model": str(tiny_lm_dir)}, "train": steps, "corpus": {"source": str(text_dir)}})
    fp32 = {"store": {"dtype": "fp32"}, "cache": {"dtype": "fp32"}}
    short = {"lm": {"train": {"steps": 5}, "whole_lines": False}, "train": steps}
    changes: dict[str, dict[str, Any]] = {
        "llama, fp32": fp32,
        "llama, paper, fp16": {"gnn": {"preset": "paper"}},
        "adaptive": merge(merge(SCRATCH, short), {**fp32, "lm": {"continuous": False}}),
        "transformer-xl": merge(
            merge(merge(SCRATCH, SCRATCH_CASES["transformer-xl"]), short), {**fp32, "lm": {"train": {"steps": 60}}}
        ),
    }
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    run = Run(parse_config(merge(merge(values, changes[request.param]), {"run": str(run_dir)})))
    run.build_all()
    return gnnlm.open(run_dir).model, 1e-3 if request.param.endswith("fp16") else 5e-4


@dataclass(frozen=True)
class Whole:
    """A text by itself, in one piece: what is found and predicted at every offset."""

    neighbours: Neighbours
    log_probs: dict[str, Tensor]

    def agrees(
        self, got: Prediction, wanted: tuple[str, ...], offsets: slice, within: float, upset: bool = False
    ) -> bool:
        """The same neighbours, up to those that are equally near, and the same log-probabilities.

        Where rounding has swapped two equally near rows at the k-th place, p_kNN there may differ, and what the network
        predicts from there on. Whether that happened, here or before (`upset`).
        """
        found = self.neighbours[offsets]
        torch.testing.assert_close(got.neighbours.similarity, found.similarity[:, : got.neighbours.k], **CLOSE)
        moved, in_graph = (
            torch.ne(*(n.positions[:, :k].sort(dim=1).values for n in (got.neighbours, found))).any(1)
            for k in (got.neighbours.k, got.predictor.graph_k)
        )
        assert int(moved.sum()) <= 2 + 0.1 * len(moved)
        seen = ((moved | in_graph).cumsum(0) > 0) | upset
        for name, log_probs in got.log_probs(wanted).items():
            same = {"base": moved | True, "knn": ~moved, "gnn": ~seen, "gnn_knn": ~seen}[name]
            expected = self.log_probs[name][offsets]
            torch.testing.assert_close(
                log_probs[same], expected[same], rtol=within, atol=within, msg=lambda m, n=name: f"{n}: {m}"
            )
        return bool(seen.any())


def whole(book: OpenBook, texts: list[list[int]], wanted: tuple[str, ...] = PREDICTORS) -> list[Whole]:
    read = [book.read([text], None, wanted)[0][0] for text in texts]
    return [Whole(prediction.neighbours, prediction.log_probs(wanted)) for prediction in read]


def tokens_of(book: OpenBook, count: int, seed: int) -> list[int]:
    """Tokens that resemble the store: a stretch of it with a few others mixed in."""
    rng = np.random.default_rng(seed)
    tokens = book.store.tokens(torch.arange(len(book.store)))
    tokens = tokens[tokens >= 0]
    start = int(rng.integers(max(1, len(tokens) - count)))
    text = np.resize(tokens[start : start + count].numpy(), count).copy()
    text[rng.random(count) < 0.2] = rng.integers(book.lm.vocab_size)
    return [int(token) for token in text]


@settings(max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking takes minutes
@given(data=st.data())
def test_any_pieces_give_what_the_whole_gives(opened: tuple[OpenBook, float], data: st.DataObject) -> None:
    """Batches of texts of different length, cut anywhere, cropped, reordered and repeated on the way."""
    book, within = opened
    batch = data.draw(st.integers(1, 3))
    texts = [tokens_of(book, data.draw(st.integers(0, LENGTH)), data.draw(st.integers(0, 99))) for _ in range(batch)]
    want = whole(book, texts)
    at, past, upset = [0] * batch, None, [False] * batch
    for _ in range(data.draw(st.integers(1, 5))):
        if past is not None and data.draw(st.booleans()):
            drops = [data.draw(st.integers(0, min(n, 12))) for n in at]
            past, at = past.crop(drops), [n - drop for n, drop in zip(at, drops, strict=True)]
        if past is not None and data.draw(st.booleans()):
            rows = data.draw(st.lists(st.integers(0, len(at) - 1), min_size=1, max_size=3))
            past = past.select(rows)
            texts, want, at = [texts[row] for row in rows], [want[row] for row in rows], [at[row] for row in rows]
            upset = [upset[row] for row in rows]
        new = [data.draw(st.integers(0, 60)) for _ in at]
        parts = [text[n : n + count] for text, n, count in zip(texts, at, new, strict=True)]
        first = [0 if past is None else n + 1 for n in at]
        prediction, past = book.read(parts, past, PREDICTORS)
        at = [n + len(part) for n, part in zip(at, parts, strict=True)]
        assert past.lengths == tuple(at)
        for line, (begin, end) in enumerate(zip(first, at, strict=True)):
            assert int(prediction.real[line].sum()) == end + 1 - begin
            real = prediction[line, prediction.real[line]]
            if end + 1 > begin:
                upset[line] = want[line].agrees(real, PREDICTORS, slice(begin, end + 1), within, upset[line])


def test_a_past_is_a_value(opened: tuple[OpenBook, float]) -> None:
    """Two continuations of one past, and one of a cropped past, do not disturb each other."""
    book, within = opened
    text, other = tokens_of(book, 60, 1), tokens_of(book, 60, 2)
    _, past = book.read([text[:40]], None, PREDICTORS)
    for ending in (text[40:], other[40:], text[40:]):
        got, _ = book.read([ending], past, PREDICTORS)
        whole(book, [text[:40] + ending])[0].agrees(got[0], PREDICTORS, slice(41, None), within)
    got, _ = book.read([other[:9]], past.crop(7), PREDICTORS)
    whole(book, [text[:33] + other[:9]])[0].agrees(got[0], PREDICTORS, slice(34, None), within)


def test_cropping_far_reads_again(opened: tuple[OpenBook, float], monkeypatch: pytest.MonkeyPatch) -> None:
    book, within = opened
    text = tokens_of(book, 90, 3)
    want = whole(book, [text])[0]
    monkeypatch.setattr(module, "BLOCK", 16)
    _, past = book.read([text], None, PREDICTORS)
    got, past = book.read([text[10:30]], past.crop(80), PREDICTORS)
    want.agrees(got[0], PREDICTORS, slice(11, 31), within)
    _, past = book.read([text], None, ("base",))  # the network has read nothing of it
    got, past = book.read([text[:1]], past, ("gnn",))
    whole(book, [text + text[:1]], ("gnn",))[0].agrees(got[0], ("gnn",), slice(-1, None), within)


def test_memory_is_bounded(opened: tuple[OpenBook, float]) -> None:
    book, _ = opened
    gnn = book.predictor.gnn
    assert gnn is not None
    past: Past | None = None
    for seed in range(6):
        _, past = book.read([tokens_of(book, 40, seed)], past, ("gnn_knn",))
    assert past is not None
    assert past.carry is not None
    assert past.carry.layers[0][0].shape[1] <= gnn.options.context - 1 + module.ROLLBACK


def test_causality(opened: tuple[OpenBook, float]) -> None:
    """A changed token moves nothing before it."""
    book, _ = opened
    text = tokens_of(book, 80, 4)
    changed = [*text[:50], (text[50] + 1) % book.lm.vocab_size, *text[51:]]
    before, after = (each.log_probs for each in whole(book, [text, changed]))
    for name in PREDICTORS:
        torch.testing.assert_close(after[name][:51], before[name][:51], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(after[name][51], before[name][51], atol=1e-6)


def test_own_past_in_pieces(opened: tuple[OpenBook, float]) -> None:
    """Every kind of base model: what a text finds in itself does not depend on how it is cut."""
    book, _ = opened
    text = [*tokens_of(book, 60, 6)] * 2
    want, _ = book.read([text], None, PREDICTORS, own_past=True)
    past: Past | None = None
    for start, end in ((0, 50), (50, 51), (51, 100), (100, 120)):
        got, past = book.read([text[start:end]], past, PREDICTORS, own_past=True)
        offsets = slice(start + (start > 0), end + 1)
        near, found = want.neighbours[0, offsets].similarity, got.neighbours[0].similarity
        torch.testing.assert_close(found, near[:, : got.neighbours.k], **CLOSE)
    assert bool((want.neighbours.positions >= len(book.store)).any())


def test_predictions_sum_to_one(opened: tuple[OpenBook, float]) -> None:
    book, _ = opened
    for log_probs in whole(book, [tokens_of(book, 70, 5)])[0].log_probs.values():
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(71), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def book(tiny_run: Run) -> Book:
    return gnnlm.open(tiny_run.root)


@pytest.fixture(scope="module")
def document(tiny_run: Run) -> str:
    return str(tiny_run.snapshot.streams["test"].documents[0].text)


def test_only_the_predictors_asked_for(book: Book, document: str) -> None:
    every = book.score(document[:80])
    assert set(every.log_probs) == set(PREDICTORS)
    some = book.score(document[:80], predictors=["knn"])
    assert set(some.log_probs) == {"knn"}
    np.testing.assert_allclose(some.knn, every.knn, atol=1e-5)
    with pytest.raises(AttributeError, match="these scores have no gnn"):
        some.gnn  # noqa: B018
    assert copy.copy(some).ids == some.ids
    for wrong, told in (("best", "no predictor named 'best'"), ([], "at least one predictor")):
        with pytest.raises(GnnlmError, match=told):
            book.score(document[:80], predictors=wrong)


def test_many_texts_and_pairs(book: Book, document: str) -> None:
    texts: list[Any] = [document[:7], document[:300], (document[:90], document[90:140]), document[100:130], ("", "a")]
    several = book.score(texts)
    assert [len(scores) for scores in several] == [7, 300, 50, 30, 1]
    for text, scores in zip(texts, several, strict=True):
        alone = book.score(text)
        for name in PREDICTORS:
            np.testing.assert_allclose(scores.log_probs[name], alone.log_probs[name], atol=1e-3)
            assert (scores.top1[name] == alone.top1[name]).mean() > 0.95
    pair, full = several[2], several[1]
    assert "".join(pair.tokens) == document[90:140]
    assert pair.offsets[0] == (0, 1)
    for name in PREDICTORS:
        np.testing.assert_allclose(pair.log_probs[name], full.log_probs[name][90:140], atol=1e-3)


def test_top1_is_the_likeliest_token(book: Book, document: str) -> None:
    scores = book.score(document[:60])
    for name in PREDICTORS:
        for at in (0, 20, 59):
            best = int(np.argmax(book.next(document[:at]).log_probs[name]))
            assert bool(scores.top1[name][at]) == (best == scores.ids[at])


def test_next(book: Book, document: str) -> None:
    scores = book.score(document[:50])
    following = book.next(document[:49], top=4)
    for name in PREDICTORS:
        log_probs = following.log_probs[name]
        assert float(np.exp(log_probs).sum()) == pytest.approx(1, abs=1e-4)
        assert float(log_probs[scores.ids[49]]) == pytest.approx(float(scores.log_probs[name][49]), abs=1e-3)
        pieces = following.pieces[name]
        assert len(pieces) == 4
        assert [p for _, p in pieces] == sorted((p for _, p in pieces), reverse=True)
    assert set(book.next("", predictors="base").log_probs) == {"base"}


def test_filters(book: Book, tiny_run: Run, document: str) -> None:
    names = [stored.name for stored in book.documents]
    assert sum(stored.tokens for stored in book.documents) == tiny_run.snapshot.streams["train"].token_count
    text = document[:40]
    for line in book.neighbors(text, 5, only=names[0]):
        assert [n.document for n in line] == [names[0]] * 5
    for line in book.neighbors(text, 5, exclude=[names[0], "doc0[1-5]*"]):
        assert len(line) == 5
        assert not {n.document for n in line} & {names[0], *(f"doc0{i}.txt" for i in range(1, 6))}
    without = book.score(text, exclude="*")
    base = book.score(text, predictors=["base"])
    np.testing.assert_allclose(without.base, base.base, atol=1e-6)
    np.testing.assert_allclose(without.knn, base.base, atol=1e-6)  # nothing to look up: the base model
    stored = tiny_run.snapshot.streams["train"].documents[0].text[:60]
    own = book.score(stored)
    assert own.perplexity("knn") < book.score(stored, exclude=names[0]).perplexity("knn")


def test_words_about_a_book(book: Book, tiny_run: Run) -> None:
    shown = repr(book)
    assert str(tiny_run.root) in shown
    assert "8 documents" in shown
    assert "gnn_knn" in shown


def test_characters_of_several_tokens(book: Book) -> None:
    """The tiny model's tokens are bytes: each of a euro sign's three shows what it is."""
    scores = book.score("a€b")
    assert len(scores) == 5
    assert all(scores.tokens)
    assert scores.tokens[0] == "a"
    assert scores.tokens[1:4] == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert scores.offsets[1:4] == [(1, 2)] * 3


def test_a_book_without_a_network(tiny_values: dict[str, Any], tiny_run: Run, tmp_path: Path) -> None:
    """gnn.layers: 0 gives base and +kNN, equal to those of a run with a network, and nothing is trained."""
    run = Run(parse_config(merge({**tiny_values, "run": str(tmp_path / "run")}, {"gnn": {"layers": 0}})))
    run.build_all()
    assert not {"train", "cache"} & set(run.stages)
    assert not (run.root / "gnn").exists()
    plain = gnnlm.open(run.root)
    assert plain.predictors == ("base", "knn")
    text, wanted = tiny_run.snapshot.searched("test"), ("base", "knn")
    saved = {name: np.load(run.root / "report" / f"{name}.log_probs.npy") for name in wanted}
    want, _ = score_text(tiny_run.snapshot.predictor, text, 64, "score", wanted)
    for name in wanted:
        np.testing.assert_allclose(saved[name], want[name], atol=1e-4)
    document = tiny_run.snapshot.streams["test"].documents[0].text[:50]
    assert set(plain.score(document).log_probs) == set(wanted)
    assert set(plain.next(document).log_probs) == set(wanted)
    with pytest.raises(GnnlmError, match="needs a graph network"):
        plain.score(document, predictors=["gnn"])
    assert os.listdir(run.root / "report")


def test_an_open_book_needs_no_run(tiny_run: Run, document: str) -> None:
    parts, config = tiny_run.snapshot, tiny_run.config
    reading = module.ReadingRule(config.lm.window, config.lm.context)
    made = Book(OpenBook(parts.lm, parts.store, parts.index, replace(parts.predictor, graph_k=2), reading))
    assert made.score(document[:30]).gnn_knn.shape == (30,)
    for tokens, told in (([[-1]], "expected token ids from 0"), ([[10**6]], "got 1000000"), ([], "at least one text")):
        with pytest.raises(GnnlmError, match=told):
            made.model.read(tokens)
