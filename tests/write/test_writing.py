"""What is written does not depend on drafts, batches or steps, and is what scoring says it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnlm
from gnnlm.book import Book
from gnnlm.config import parse_config
from gnnlm.errors import ConfigError, GnnlmError
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.run import Run
from gnnlm.write import batch_loop
from gnnlm.write.drafter import Drafter
from gnnlm.write.generate_options import GenerateOptions
from gnnlm.write.text_state import TextSettings
from gnnlm.write.written_text import WrittenText
from tests.conftest import TINY, merge

FP32 = {"store": {"dtype": "fp32"}, "cache": {"dtype": "fp32"}, "tune": {"lambdas": [0.3]}}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
WRITING: list[dict[str, Any]] = [
    {},
    SAMPLED,
    {"repetition_penalty": 1.3},
    {"temperature": 1.2, "top_k": 5, "min_p": 0.02},
]
PROMPT = "ban dor kisha luto mev. "


def built(values: dict[str, Any], folder: Path) -> Book:
    Run(parse_config(merge(values, {"run": str(folder)}))).build_all()
    return gnnlm.open(folder)


@pytest.fixture(scope="module")
def book(tiny_lm_dir: Path, text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Book:
    values = merge(TINY, {"lm": {"model": str(tiny_lm_dir)}, "corpus": {"source": str(text_dir)}})
    return built(merge(values, FP32), tmp_path_factory.mktemp("write") / "run")


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as much as possible, whatever the times and chances are."""
    monkeypatch.setattr(batch_loop, "best_length", lambda expected, costs: max(map(len, expected)) - 1)


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("options", WRITING)
def test_drafts_change_nothing_but_the_number_of_steps(book: Book, predictor: str, options: dict[str, Any]) -> None:
    with_drafts = book.generate(PROMPT, predictor=predictor, max_tokens=70, **options)
    without = book.generate(PROMPT, predictor=predictor, max_tokens=70, draft=False, **options)
    assert with_drafts.ids == without.ids
    assert with_drafts.text == without.text
    np.testing.assert_allclose(log_probs(with_drafts), log_probs(without), atol=1e-3)
    assert without.drafted == 0
    assert without.steps == len(without.ids) - 1
    assert with_drafts.drafted > 0 or predictor in ("base", "gnn")  # an untrained model writes what nobody wrote before
    assert with_drafts.steps == len(without.ids) - 1 - with_drafts.accepted


@pytest.mark.usefixtures("drafts")
def test_drafts_are_accepted_where_the_text_repeats(book: Book) -> None:
    written = book.generate(PROMPT, max_tokens=60, predictor="knn")
    assert written.accepted > 5
    assert written.steps < 55


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_written_then_scored(book: Book, predictor: str) -> None:
    """Also past the window, where reading starts afresh."""
    written = book.generate([book.model.lm.tokenize(PROMPT)[0]], predictor=predictor, max_tokens=100, **SAMPLED)[0]
    ids = book.model.lm.tokenize(PROMPT)[0]
    prediction, _ = book.model.read([[*ids, *written.ids[:-1]]], None, ("base", predictor))
    places = prediction[0, len(ids) :]
    targets = torch.tensor(written.ids)
    scored = places.target_log_probs(targets, ("base", predictor))
    np.testing.assert_allclose(log_probs(written), scored[predictor], atol=1e-3)
    np.testing.assert_allclose([token.base_log_prob for token in written.tokens], scored["base"], atol=1e-3)


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize("options", WRITING[:2])
def test_batches_write_what_single_prompts_write(book: Book, options: dict[str, Any]) -> None:
    prompts = [PROMPT, "", "mev ", PROMPT * 5, "luto kisha ban."]
    together = book.generate(prompts, max_tokens=30, **options)
    assert [one.ids for one in together] == [book.generate(p, max_tokens=30, **options).ids for p in prompts]


def test_samples_differ_and_seeds_repeat(book: Book) -> None:
    first = book.generate([PROMPT], n=3, max_tokens=20, temperature=1.0, seed=1)
    assert len({tuple(one.ids) for one in first}) == 3
    again = book.generate([PROMPT], n=3, max_tokens=20, temperature=1.0, seed=1)
    other = book.generate([PROMPT], n=3, max_tokens=20, temperature=1.0, seed=2)
    assert [one.ids for one in first] == [one.ids for one in again] != [one.ids for one in other]
    assert book.generate(PROMPT, max_tokens=20, temperature=1.0, seed=1).ids == first[0].ids


def test_shares_are_exact_and_sum_to_one(book: Book) -> None:
    """Against p(y) = sum of lambda w_r [token_r = y] + (1 - lambda) p_model(y), row by row."""
    written = book.generate(PROMPT, predictor="gnn_knn", max_tokens=25, sources=10**6, **SAMPLED)
    ids = book.model.lm.tokenize(PROMPT)[0]
    mix = book.model.predictor.mixes["gnn"]
    for place, token in enumerate(written.tokens):
        prediction, _ = book.model.read([[*ids, *written.ids[:place]]], None, ("gnn", "gnn_knn"))
        at = prediction[0, -1:]
        own = at.log_probs(("gnn",))["gnn"][0, token.id].exp().item()
        similarity = at.neighbours.similarity[0, : mix.k].double()
        weights = (similarity / mix.temperature).exp()
        weights = (weights / weights.sum()).tolist()
        lam = float(at.distribution("gnn_knn").knn_weight_N)
        rows = zip(at.neighbours.positions[0].tolist(), at.tokens[0].tolist(), weights, strict=False)
        want = {row: lam * weight for row, voted, weight in rows if voted == token.id}
        total = sum(want.values()) + (1 - lam) * own
        assert math.isclose(math.exp(token.log_prob), total, rel_tol=2e-3)
        got = {source.position: source.share for source in token.sources}
        assert sorted(got.values(), reverse=True) == [*got.values()]
        for row, share in want.items():
            assert math.isclose(got.get(row, 0.0), share / total, rel_tol=5e-3, abs_tol=1e-6)
        assert math.isclose(token.book + (1 - lam) * own / total, 1.0, abs_tol=2e-3)
        assert all(source.token == token.text for source in token.sources)


def test_sources_and_spans_quote_their_documents(book: Book, text_dir: Path) -> None:
    written = book.generate(PROMPT, predictor="knn", max_tokens=40)
    cited = [source for token in written.tokens for source in token.sources]
    assert cited
    texts = {path.name: path.read_text() for path in text_dir.iterdir()}
    for source in cited:
        text = texts[source.document]
        assert text[source.start : source.end] == source.token
        assert text[: source.start].endswith(source.before)
        assert text[source.end :].startswith(source.after)
    for span in written.spans:
        assert texts[span.document][span.start : span.end] == span.text
        assert span.text == "".join(token.text for token in written.tokens[span.first : span.last + 1])
        assert span.tokens >= 2
    assert "".join(token.text for token in written.tokens) == written.text


def test_the_base_model_cites_nothing(book: Book) -> None:
    written = book.generate(PROMPT, predictor="base", max_tokens=10)
    assert all(token.book == 0 and token.sources == [] for token in written.tokens)
    assert written.spans == []
    assert written.searches == 0


def test_greedy_writing_of_the_base_is_transformers_own(book: Book) -> None:
    lm: Any = book.model.lm
    ids = [lm.start_token, *lm.tokenize(PROMPT)[0]]
    theirs = lm.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, use_cache=False)[0, len(ids) :]
    ours = book.generate(PROMPT, predictor="base", max_tokens=20)
    assert ours.ids == theirs.tolist()


def test_a_stop_string_at_the_beginning_leaves_nothing(book: Book) -> None:
    first = book.generate(PROMPT, max_tokens=4).text[0]
    cut = book.generate(PROMPT, max_tokens=40, stop=first)
    assert (cut.text, cut.tokens, cut.finish_reason) == ("", [], "stop")


def test_stop_strings_end_the_text_before_them(book: Book) -> None:
    whole = book.generate(PROMPT, max_tokens=40)
    stop = whole.text[7:10]
    end = whole.text.index(stop)
    cut = book.generate(PROMPT, max_tokens=40, stop=[stop, "never written"])
    assert cut.text == whole.text[:end]
    assert cut.finish_reason == "stop"
    assert "".join(token.text for token in cut.tokens) == cut.text
    pieces = list(book.stream(PROMPT, max_tokens=40, stop=stop))
    assert "".join(pieces) == whole.text[:end]


def test_an_end_token_ends_the_text(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = book.generate(PROMPT, max_tokens=30)
    monkeypatch.setitem(vars(book.model.lm), "end_tokens", frozenset({whole.ids[5]}))
    first = whole.ids.index(whole.ids[5])
    cut = book.generate(PROMPT, max_tokens=30)
    assert cut.ids == whole.ids[: first + 1]
    assert cut.finish_reason == "stop"
    assert cut.tokens[-1].text == ""
    assert cut.text == "".join(token.text for token in cut.tokens)


def test_a_stream_gives_whole_characters_and_then_everything(book: Book) -> None:
    """The tiny model writes bytes at random: many are parts of characters."""
    stream = book.stream("\u20ac\u00e9", max_tokens=60, temperature=1.5, seed=4)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.generation.text
    assert stream.generation.finish_reason == "length"
    assert stream.generation.ids == book.generate("\u20ac\u00e9", max_tokens=60, temperature=1.5, seed=4).ids


def test_a_stream_can_be_left(book: Book) -> None:
    stream = book.stream(PROMPT, max_tokens=50)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    assert stream.generation.finish_reason == "interrupted"
    assert stream.generation.text


def test_prompts_longer_than_the_window(book: Book) -> None:
    written = book.generate(PROMPT * 20, max_tokens=20)
    assert len(written.ids) == 20


def test_an_empty_prompt_starts_a_text(book: Book) -> None:
    assert len(book.generate("", max_tokens=5).ids) == 5


def test_a_filter_with_few_rows_and_one_with_none(book: Book, logged: Callable[[], str]) -> None:
    name = book.documents[0].name
    few = book.generate(PROMPT, predictor="knn", max_tokens=20, only=name)
    assert {source.document for token in few.tokens for source in token.sources} == {name}
    nothing = book.generate(PROMPT, predictor="knn", max_tokens=20, only=name, exclude=name)
    assert "no document to look up" in logged()
    assert nothing.ids == book.generate(PROMPT, predictor="base", max_tokens=20).ids
    assert all(token.book == 0 for token in nothing.tokens)


def test_a_run_without_a_network_writes(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    book = built(merge(tiny_values, {"gnn": {"layers": 0}, "search": {"k": 65_536}}), tmp_path / "run")
    written = book.generate(PROMPT, max_tokens=10)
    assert len(written.ids) == 10
    with pytest.raises(ConfigError, match="needs a graph network"):
        book.generate(PROMPT, predictor="gnn")


def test_every_position_is_searched_once(book: Book) -> None:
    written = book.generate(PROMPT, predictor="knn", max_tokens=40, draft=False)
    assert written.searches == len(book.model.lm.tokenize(PROMPT)[0]) + 40


def test_json_is_plain(book: Book) -> None:
    value = json.loads(json.dumps(book.generate(PROMPT, max_tokens=5, predictor="knn").as_json()))
    assert set(value) == {
        "text", "finish_reason", "tokens", "spans", "steps", "drafted", "accepted", "searches", "seconds",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: expected a whole number from 1"),
        ({"n": 0}, "n: expected"),
        ({"stop": [""]}, "stop: expected"),
        ({"top_p": 2.0}, "top_p: expected"),
        ({"n": 2.0}, "n: expected"),
        ({"tempreature": 1.0}, "no option named 'tempreature'"),
        ({"predictor": "gpt"}, "no predictor named 'gpt'"),
        ({"chat": True}, "no chat template"),
    ],
)
def test_bad_requests_are_one_line(book: Book, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GnnlmError, match=message) as caught:
        book.generate(PROMPT, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [[[0, 10**6]], [[-1]], [["a"]], [3], [], [[True]]])
def test_bad_prompts_are_one_line(book: Book, prompt: Any) -> None:
    with pytest.raises(GnnlmError) as caught:
        book.generate(prompt)
    assert "\n" not in str(caught.value)


def test_finished_texts_leave_the_batch(book: Book) -> None:
    settings = TextSettings.of(GenerateOptions(max_tokens=6), book.model, None)
    writer = batch_loop.Writer(book.model, settings.predictor, Drafter(book.model.store))
    (first,), (second,) = writer.add([1], settings), writer.add([2, 3], settings)
    writer.step()
    writer.stop(first, "interrupted")
    while writer.busy:
        writer.step()
    assert len(first.tokens) == 1
    assert len(second.tokens) == 6


def log_probs(written: WrittenText) -> list[float]:
    return [token.log_prob for token in written.tokens]
