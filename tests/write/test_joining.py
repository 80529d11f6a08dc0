"""Texts that join and leave a batch at any step are what they are alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnlm.book import Book
from gnnlm.predict.open_book import BLOCK
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.write import batch_loop
from gnnlm.write.attribution import written_text
from gnnlm.write.generate_options import GenerateOptions
from gnnlm.write.text_state import TextSettings
from gnnlm.write.written_text import WrittenText
from tests.conftest import TINY, merge
from tests.write.test_writing import FP32, PROMPT, built

PROMPTS = (PROMPT, "", "mev ", PROMPT * 4, "luto kisha ban.", "do")
ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    {"temperature": 1.2, "top_k": 5, "seed": 6, "draft": False},
    {"repetition_penalty": 1.3, "stop": ["an", "to"]},
    {"only": ["doc0*"]},
    {"exclude": ["doc0[1-5].txt"], "temperature": 1.0},
)


@pytest.fixture(scope="module")
def book(tiny_lm_dir: Path, text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Book:
    values = merge(TINY, {"lm": {"model": str(tiny_lm_dir)}, "corpus": {"source": str(text_dir)}})
    return built(merge(values, FP32), tmp_path_factory.mktemp("join") / "run")


def alone(book: Book, prompt: str, predictor: str, options: dict[str, Any], length: int) -> WrittenText:
    return book.generate(prompt, predictor=predictor, max_tokens=length, **options)


def test_joining_is_the_inverse_of_selecting(book: Book) -> None:
    """Rows taken out of one batch and put together again predict what the batch predicts."""
    texts = [book.model.lm.tokenize(prompt)[0] for prompt in PROMPTS]
    for wanted in (("base",), ("gnn_knn",)):
        _, past = book.model.read(texts, None, wanted)
        order = [4, 0, 5, 2, 1, 3]
        first, *others = [past.select([row]) for row in order]
        joined = first.join(others)
        assert joined.lengths == past.select(order).lengths
        together, _ = book.model.read([[7, 8]] * len(texts), past.select(order), wanted)
        apart, after = book.model.read([[7, 8]] * len(texts), joined, wanted)
        for name, states in together.states.items():
            torch.testing.assert_close(apart.states[name], states, atol=1e-4, rtol=1e-4)
        assert after.crop([1, 0, 2, 0, 0, 1]).lengths == tuple(
            len(texts[row]) + 2 - drop for row, drop in zip(order, [1, 0, 2, 0, 0, 1], strict=True)
        )


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_texts_that_join_at_different_steps(
    book: Book, predictor: str, drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Different prompts, samplings, stop strings, filters and lengths in one batch."""
    if drafting:
        monkeypatch.setattr(batch_loop, "best_length", lambda expected, costs: max(map(len, expected)) - 1)
    writer = book.writer(predictor)
    texts = [(PROMPTS[n % len(PROMPTS)], {"draft": drafting, **ORDERS[n]}, 5 + 9 * n) for n in range(len(ORDERS))]
    written = []
    for prompt, options, length in texts:
        written += start(book, writer, prompt, options, length)
        writer.step()
        writer.step()
    while writer.busy:
        writer.step()
    for (prompt, options, length), writing in zip(texts, written, strict=True):
        want = alone(book, prompt, predictor, options, length)
        got = written_text(book.model, writing, 4)
        assert (got.ids, got.text, got.finish_reason) == (want.ids, want.text, want.finish_reason)
        np.testing.assert_allclose(
            [token.log_prob for token in got.tokens], [token.log_prob for token in want.tokens], atol=1e-3
        )
        if "search" not in options:
            assert [[s.position for s in t.sources] for t in got.tokens] == [
                [s.position for s in t.sources] for t in want.tokens
            ]


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(PROMPTS), st.sampled_from(ORDERS[:6]), st.integers(1, 25), st.integers(0, 4), st.booleans()
        ),
        min_size=2,
        max_size=5,
    ),
    st.sampled_from(("knn", "gnn_knn")),
)
def test_any_company(book: Book, texts: list[tuple[str, dict[str, Any], int, int, bool]], predictor: str) -> None:
    """Texts join after any number of steps, and some are ended early; the others do not notice."""
    writer, written = book.writer(predictor), []
    for prompt, options, length, steps, _ in texts:
        written += start(book, writer, prompt, options, length)
        for _ in range(steps):
            writer.step()
    for (*_, ended), writing in zip(texts, written, strict=True):
        if ended and writing.finish_reason is None:
            writer.stop(writing, "interrupted")
    while writer.busy:
        writer.step()
    for (prompt, options, length, _, _), writing in zip(texts, written, strict=True):
        want = alone(book, prompt, predictor, options, length)
        assert writing.ids == want.ids[: len(writing.ids)] or options.get("stop")
        assert writing.finish_reason == "interrupted" or written_text(book.model, writing, 0).ids == want.ids


def test_long_prompts_let_short_ones_pass(book: Book) -> None:
    """A prompt is read in blocks; a short one that comes later begins first, and the text in progress goes on."""
    writer = book.writer("knn")
    settings = TextSettings.of(GenerateOptions(max_tokens=40, predictor="knn"), book.model, None)
    (going,) = writer.add([1, 2], settings)
    writer.step()
    (long,) = writer.add([3] * (3 * BLOCK), settings)
    (short,) = writer.add([4], settings)
    seen = len(going.tokens)
    written = writer.step()
    assert sorted(map(id, written)) == sorted(map(id, (going, short)))  # each once
    assert short.tokens
    assert not long.tokens
    assert len(going.tokens) > seen
    for _ in range(2):
        writer.step()
    assert long.tokens


def test_one_prompt_for_several_texts_is_read_once(book: Book) -> None:
    writer = book.writer("knn")
    settings = TextSettings.of(
        GenerateOptions(max_tokens=12, predictor="knn", temperature=1.0, seed=3), book.model, None
    )
    ids = book.model.lm.tokenize(PROMPT)[0]
    writings = writer.add(ids, settings, 3)
    while writer.busy:
        writer.step()
    want = book.generate([PROMPT], n=3, max_tokens=12, predictor="knn", temperature=1.0, seed=3)
    assert [writing.ids for writing in writings] == [one.ids for one in want]


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_the_tokens_of_a_prompt_are_scored_as_scoring_does(book: Book, predictor: str) -> None:
    """Also past a block and past the window; with the likeliest tokens, and then nothing or something is written."""
    from dataclasses import replace

    ids = book.model.lm.tokenize(PROMPT * 12)[0]
    assert len(ids) > BLOCK
    writer = book.writer(predictor)
    settings = replace(
        TextSettings.of(GenerateOptions(predictor=predictor), book.model, None), scored=True, top=3, max_tokens=0
    )
    (nothing,), (one,) = writer.add(ids, settings), writer.add(ids, replace(settings, max_tokens=1))
    while writer.busy:
        writer.step()
    assert nothing.tokens == []
    assert nothing.finish_reason == one.finish_reason == "length"
    assert len(one.tokens) == 1
    scores = book.score(PROMPT * 12, predictors=[predictor])
    for writing in (nothing, one):
        assert [record.id for record in writing.scored] == ids
        np.testing.assert_allclose(
            [record.log_prob for record in writing.scored], scores.log_probs[predictor], atol=1e-3
        )
        best = [record.top[0][1] == record.log_prob for record in writing.scored]
        assert best == scores.top1[predictor].tolist()
        assert all(len(record.top) == 3 for record in writing.scored)


def test_tokens_are_settled_when_their_text_is(book: Book) -> None:
    """The pieces of settled tokens never change, and all together they are the text."""
    writer = book.writer("base")
    settings = TextSettings.of(
        GenerateOptions(max_tokens=60, predictor="base", temperature=1.5, seed=4, stop=["zz"]), book.model, None
    )
    (writing,) = writer.add(book.model.lm.tokenize("\u20ac\u00e9")[0], settings)
    given: list[str] = []
    while writer.busy:
        writer.step()
        given += [writing.detokenizer.piece(place) for place in range(len(given), writing.detokenizer.settled)]
        assert writing.detokenizer.text.startswith("".join(given))
    whole = written_text(book.model, writing, 0)
    assert given == [token.text for token in whole.tokens[: len(given)]]
    assert len(given) >= len(whole.tokens) - 4


def start(book: Book, writer: batch_loop.Writer, prompt: str, options: dict[str, Any], length: int) -> list[Any]:
    filters = {name: options.get(name) for name in ("only", "exclude")}
    others = {name: value for name, value in options.items() if name not in filters}
    options = GenerateOptions(predictor=writer.predictor, max_tokens=length, **others)
    allowed = book.allowed(**filters)
    return writer.add(book.model.lm.tokenize(prompt)[0], TextSettings.of(options, book.model, allowed))
