"""Documents that a request brings along: looked up for it, seen by nobody else, and gone with it."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from gnnlm.book import Book
from gnnlm.run import Run
from gnnlm.serve.limits import Limits
from gnnlm.serve.runs import ServedRuns
from tests.serve.conftest import Serving, error_of, serving
from tests.serve.test_lookup import ask


@pytest.fixture(scope="module")
def text(tiny_run: Run) -> str:
    return str(tiny_run.snapshot.streams["test"].documents[1].text)


def notes(text: str, name: str = "notes.txt") -> list[dict[str, str]]:
    return [{"name": name, "text": text}]


def completion(client: httpx.Client, prompt: str, **body: Any) -> dict[str, Any]:
    given = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "sources": 4, **body}
    choice: dict[str, Any] = ask(client, "/v1/completions", **given)["choices"][0]
    return choice


def test_every_answer_looks_it_up(client: httpx.Client, book: Book, text: str) -> None:
    session = book.attached([("notes.txt", text)])
    scores = ask(client, "/v1/score", input=text[:60], attach=notes(text))["data"][0]
    for name, values in session.score(text[:60]).log_probs.items():
        np.testing.assert_allclose([token["log_probs"][name] for token in scores["tokens"]], values, atol=1e-3)
    near = ask(client, "/v1/neighbors", input=text[:20], k=1, attach=notes(text), only="attached:*")["data"]
    assert {one["document"] for token in near for one in token["neighbors"]} == {"attached:notes.txt"}
    following = ask(client, "/v1/next", prompt=text[:40], attach=notes(text))
    best = following["top"]["gnn_knn"][0]
    assert best == int(np.argmax(session.next(text[:40]).log_probs["gnn_knn"]))
    seen = ask(client, "/v1/attention", prompt=text[:40], attach=notes(text))
    assert "attached:notes.txt" in {one["document"] for one in seen["neighbors"]}
    written, want = completion(client, text[:60], attach=notes(text)), session.generate(text[:60], max_tokens=12)
    assert written["text"] == want.text
    sources = [source for token in written["gnnlm"]["tokens"] for source in token["sources"]]
    cited = [source for source in sources if source["document"] == "attached:notes.txt"]
    assert cited
    assert all(text[source["start"] : source["end"]] == source["token"] for source in cited)


def test_requests_do_not_see_each_others(client: httpx.Client, book: Book, text: str) -> None:
    """Written at the same time: with one document, with another of the same name, and with none."""
    other = text[::-1]
    bodies: list[dict[str, Any]] = [{"attach": notes(text)}, {"attach": notes(other)}, {}] * 3
    prompts = [text[:50], other[:50], text[:50]] * 3
    sessions = [book.attached([("notes.txt", text)]), book.attached([("notes.txt", other)]), book] * 3
    with ThreadPoolExecutor(9) as pool:
        got = list(pool.map(lambda one: completion(client, one[0], **one[1]), zip(prompts, bodies, strict=True)))
    for prompt, session, choice in zip(prompts, sessions, got, strict=True):
        want = session.generate(prompt, max_tokens=12)
        assert choice["text"] == want.text
        assert [s["document"] for t in choice["gnnlm"]["tokens"] for s in t["sources"]] == [
            s.document for t in want.tokens for s in t.sources
        ]
    sources = [{s["document"] for t in choice["gnnlm"]["tokens"] for s in t["sources"]} for choice in got[:3]]
    assert "attached:notes.txt" in sources[0] & sources[1]
    assert not any(name.startswith("attached:") for name in sources[2])


def test_it_is_gone_with_the_request(runs: ServedRuns, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Book]] = []
    begin = Book.with_documents

    def noted(self: Book, *given: Any) -> Book:
        session = begin(self, *given)
        made.append(weakref.ref(session))
        return session

    monkeypatch.setattr(Book, "with_documents", noted)
    with serving(runs) as (address, context), httpx.Client(base_url=address, timeout=60) as client:
        for _ in range(3):
            completion(client, text[:30], attach=notes(text[:200]))
        ask(client, "/v1/score", input=text[:30], attach=notes(text[:200]))
        completion(client, text[:30])  # the last request's frame may hold the last session
        gc.collect()
        assert len(made) == 4
        assert sum(one() is not None for one in made) <= 1
        assert not any(run.outdated for run, _ in context.worker._writers)


def test_limits(serve: Serving, text: str) -> None:
    with serve(limits=Limits(max_attached=50)) as (address, _), httpx.Client(base_url=address, timeout=60) as client:

        def refused(attach: Any) -> dict[str, Any]:
            body = {"model": "tiny", "input": "a", "attach": attach}
            return error_of(client.post("/v1/score", json=body), 400)

        assert ask(client, "/v1/score", input="a", attach=notes(text[:50]))
        beyond = refused(notes(text[:51]))
        assert beyond["message"] == "attach: this server reads at most 50 tokens of attached documents, got 51"
        assert (beyond["param"], beyond["code"]) == ("attach", "context_length_exceeded")
        assert "51" in refused([*notes(text[:50]), *notes("a", "more")])["message"]
        assert "two documents" in refused([*notes("a"), *notes("b")])["message"]
        assert "no tokens" in refused(notes(""))["message"]
        for wrong in ([], [{"name": "", "text": "a"}], [{"name": "a"}], ["notes.txt"], "notes.txt", [{}] * 65):
            assert refused(wrong)["param"].startswith("attach")


def test_own_past(client: httpx.Client, book: Book, text: str) -> None:
    """Texts with and without it are written in one batch."""
    long = text[:60] * 3
    scores = ask(client, "/v1/score", input=long, own_past=True)["data"][0]
    for name, values in book.score(long, own_past=True).log_probs.items():
        np.testing.assert_allclose([token["log_probs"][name] for token in scores["tokens"]], values, atol=2e-3)
    with ThreadPoolExecutor(4) as pool:
        asked = [{"own_past": True, "max_tokens": 40}, {"max_tokens": 40}] * 2
        got = list(pool.map(lambda body: completion(client, long, **body), asked))
    for own, choice in zip((True, False) * 2, got, strict=True):
        want = book.generate(long, max_tokens=40, own_past=own)
        assert choice["text"] == want.text
        assert len(choice["gnnlm"]["spans"]) == len(want.spans)
    cited = {source["document"] for token in got[0]["gnnlm"]["tokens"] for source in token["sources"]}
    assert "own:text" in cited
