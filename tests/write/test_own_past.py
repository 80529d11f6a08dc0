"""Writing with the text itself as a book: the same text with and without drafts, with sources in the text."""

from __future__ import annotations

import numpy as np
import pytest

import gnnlm
from gnnlm.book import Book
from gnnlm.errors import GnnlmError
from gnnlm.predict.own_past import NAME
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.run import Run
from tests.predict.test_own_past import repeating

TOKENS = 70  # past the window of 48 tokens once more


@pytest.fixture(scope="module")
def book(tiny_run: Run) -> Book:
    return gnnlm.open(tiny_run.root)


@pytest.fixture(scope="module")
def prompts(book: Book) -> list[list[int]]:
    return [repeating(book.model, 130, 1), repeating(book.model, 100, 2), repeating(book.model, 7, 3)]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"predictor": "knn"}])
def test_drafts_batches_and_pauses_change_nothing(
    book: Book, prompts: list[list[int]], options: dict[str, str]
) -> None:
    together = book.generate(prompts, own_past=True, max_tokens=TOKENS, **options)
    assert sum(one.accepted for one in together) > 0
    for prompt, written in zip(prompts, together, strict=True):
        (alone,) = book.generate([prompt], own_past=True, max_tokens=TOKENS, draft=False, **options)
        assert alone.ids == written.ids
        np.testing.assert_allclose(
            [token.log_prob for token in alone.tokens], [token.log_prob for token in written.tokens], atol=2e-3
        )
    plain = book.generate(prompts, max_tokens=TOKENS, **options)
    assert [one.ids for one in plain] != [one.ids for one in together]


def test_what_is_written_scores_the_same(book: Book, prompts: list[list[int]]) -> None:
    for name in PREDICTORS:
        (written,) = book.generate(prompts[:1], own_past=True, max_tokens=TOKENS, predictor=name)
        scores = book.score((prompts[0], written.ids), own_past=True, predictors=[name])
        got = [token.log_prob for token in written.tokens]
        np.testing.assert_allclose(got, scores.log_probs[name], atol=5e-3)


def test_sources_in_the_text_itself(book: Book, prompts: list[list[int]]) -> None:
    (written,) = book.generate(prompts[:1], own_past=True, max_tokens=TOKENS, predictor="knn")
    text = book.model.lm.detokenize([*prompts[0], *written.ids])
    own = [source for token in written.tokens for source in token.sources if source.document == NAME]
    assert own
    for source in own:
        assert text[source.start : source.end] == source.token
        assert text[: source.start].endswith(source.before)
    for span in (span for span in written.spans if span.document == NAME):
        assert text[span.start : span.end] == span.text
    for token in written.tokens:
        assert sum(source.share for source in token.sources) <= token.book + 1e-4
    given = book.model.lm.detokenize(prompts[0])
    found = book.neighbors(given, 2, own_past=True)
    cited = [near for line in found for near in line if near.document == NAME]
    assert cited
    assert all(given[near.start : near.end] == near.token for near in cited if near.token)
    following = book.next(prompts[0], own_past=True)
    assert float(np.exp(following.log_probs["knn"]).sum()) == pytest.approx(1, abs=1e-4)
    assert np.abs(following.log_probs["knn"] - book.next(prompts[0]).log_probs["knn"]).max() > 1e-3


def test_with_attached_text(book: Book, prompts: list[list[int]]) -> None:
    """Own rows are numbered behind the attached document's."""
    lm = book.model.lm
    notes = lm.detokenize(repeating(book.model, 90, 9))
    (written,) = book.generate(prompts[:1], own_past=True, max_tokens=30, attach=[("notes", notes)])
    documents = {source.document for token in written.tokens for source in token.sources}
    assert documents <= {"attached:notes", NAME, *(one.name for one in book.documents)}
    assert NAME in documents
    scores = book.score((prompts[0], written.ids), own_past=True, attach=[("notes", notes)])
    np.testing.assert_allclose([token.log_prob for token in written.tokens], scores.gnn_knn, atol=5e-3)


def test_bad_options(book: Book) -> None:
    with pytest.raises(GnnlmError, match="own_past: expected true or false"):
        book.generate("a", own_past="yes")
