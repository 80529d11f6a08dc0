"""Everything that is not writing: the answers of a book, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gnnlm.book import Book
from tests.serve.conftest import error_of

TEXT = "ban dor kisha \u00e9."


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def get(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_models(client: httpx.Client) -> None:
    found = get(client, "/v1/models")["data"]
    assert [model["id"] for model in found] == ["tiny", "tiny:base", "tiny:knn", "tiny:gnn", "tiny:gnn_knn"]
    assert found[0]["predictor"] == "gnn_knn"
    assert get(client, "/v1/models/tiny:knn") == found[2]
    assert error_of(client.get("/v1/models/tiny:gpt"), 404)["code"] == "model_not_found"


def test_score(client: httpx.Client, book: Book) -> None:
    got = ask(client, "/v1/score", input=[TEXT, {"context": "ban", "continuation": " dor"}])
    assert [one["index"] for one in got["data"]] == [0, 1]
    for one, want in zip(got["data"], book.score([TEXT, ("ban", " dor")]), strict=True):
        assert [token["id"] for token in one["tokens"]] == want.ids
        assert [(token["start"], token["end"]) for token in one["tokens"]] == want.offsets
        for name, values in want.log_probs.items():
            np.testing.assert_allclose([t["log_probs"][name] for t in one["tokens"]], values, atol=1e-3)
            assert one["perplexity"][name] == pytest.approx(want.perplexity(name), rel=1e-3)
    named = ask(client, "/v1/score", model="tiny:knn", input="ban", exclude="doc0*")["data"][0]
    want = book.score("ban", predictors=["knn"], exclude="doc0*")
    assert [token["log_probs"]["knn"] for token in named["tokens"]] == pytest.approx(want.knn, abs=1e-3)
    assert set(named["perplexity"]) == {"knn"}
    assert set(ask(client, "/v1/score", input="b", predictors=["base", "gnn"])["data"][0]["perplexity"]) == {
        "base",
        "gnn",
    }


def test_neighbors(client: httpx.Client, book: Book) -> None:
    got = ask(client, "/v1/neighbors", input=TEXT, k=2, left=3, right=4, only=["doc0*"])["data"]
    want = book.neighbors(TEXT, 2, left=3, right=4, only=["doc0*"])
    assert [[n["position"] for n in token["neighbors"]] for token in got] == [[n.position for n in w] for w in want]
    assert got[0]["neighbors"][0].keys() == vars(want[0][0]).keys()


def test_next(client: httpx.Client, book: Book) -> None:
    got = ask(client, "/v1/next", prompt="ban dor", top=3)
    want = book.next("ban dor", top=3)
    by_id = {one["id"]: one for one in got["data"]}
    for name, pieces in want.pieces.items():
        ids = got["top"][name]
        assert [by_id[token]["text"] for token in ids] == [piece for piece, _ in pieces]
        assert [np.exp(by_id[token]["log_probs"][name]) for token in ids] == pytest.approx(
            [probability for _, probability in pieces], rel=1e-3
        )
    ids = book.model.lm.tokenize("ban dor")[0]
    assert ask(client, "/v1/next", prompt=ids, top=3)["top"] == got["top"]
    assert ask(client, "/v1/next", prompt="", top=3, model="tiny:base")["predictors"] == ["base"]


def test_attention(client: httpx.Client, book: Book) -> None:
    got = ask(client, "/v1/attention", prompt="ban dor kisha")
    want = book.attention("ban dor kisha")
    assert [one["position"] for one in got["neighbors"]] == [one.position for one in want.neighbours]
    np.testing.assert_allclose(got["by_neighbor"], want.by_neighbour(), atol=1e-4)
    np.testing.assert_allclose(np.sum(got["by_slot"], axis=-1), want.by_neighbour(), atol=1e-4)
    np.testing.assert_allclose(np.sum(got["by_neighbor"], axis=-1), 1.0, atol=1e-3)
    assert "".join(token["text"] for token in got["context"]) == "ban dor kisha"[-12:]


def test_documents(client: httpx.Client, book: Book, text_dir: Path) -> None:
    got = get(client, "/v1/documents", limit=3, offset=1)
    assert got["total"] == len(book.documents)
    assert [one["name"] for one in got["data"]] == [one.name for one in book.documents[1:4]]
    name = book.documents[2].name
    assert [one["name"] for one in get(client, "/v1/documents", search=name.upper())["data"]] == [name]
    whole = get(client, "/v1/documents/text", name=name)
    assert whole["text"] == (text_dir / name).read_text()
    assert whole["tokens"] == book.documents[2].tokens == len(whole["offsets"]) - 1
    assert whole["offsets"][-1] == len(whole["text"])
    source = ask(client, "/v1/neighbors", input="ban dor", k=1)["data"][3]["neighbors"][0]
    text = get(client, "/v1/documents/text", name=source["document"])["text"]
    assert text[source["start"] : source["end"]] == source["token"]
    assert error_of(client.get("/v1/documents/text", params={"name": "<script>"}), 404)["param"] == "name"


def test_report_is_the_runs_own(client: httpx.Client, tiny_run: Any) -> None:
    import json

    answer = get(client, "/v1/report")
    assert answer.pop("history") == json.loads((tiny_run.path("train") / "history.json").read_text())
    assert answer == json.loads((tiny_run.path("eval") / "report.json").read_text())


def test_tokens(client: httpx.Client, book: Book) -> None:
    lm = book.model.lm
    got = client.post("/tokenize", json={"prompt": TEXT}).json()
    assert got["tokens"] == lm.tokenize(TEXT)[0]
    assert got["count"] == len(got["tokens"])
    assert (
        client.post("/tokenize", json={"prompt": "a", "add_special_tokens": True}).json()["tokens"][0] == lm.start_token
    )
    assert client.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": TEXT}
    info = get(client, "/tokenizer_info")
    assert client.post("/tokenize", json={"prompt": info["bos_token"]}).json()["tokens"] == [lm.start_token]
    assert info["eos_token"] == "</s>"


def test_health_and_metrics(client: httpx.Client) -> None:
    assert get(client, "/healthz") == {"status": "ok"}
    assert get(client, "/readyz") == {"status": "ready"}
    client.post("/v1/completions", json={"model": "tiny:knn", "prompt": "ban", "max_tokens": 4})
    text = client.get("/metrics").text
    assert 'gnnlm_requests_total{method="POST",path="/v1/completions",status="200"}' in text
    assert 'gnnlm_written_tokens_total{model="tiny:knn"}' in text
    client.get("/made/up/path")
    assert "/made/up/path" not in client.get("/metrics").text


def test_the_schema_describes_what_is_added(client: httpx.Client) -> None:
    schema = get(client, "/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/v1/score", "/tokenize", "/metrics"} <= set(schema["paths"])
    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert all(fields[name]["description"] for name in ("only", "exclude", "sources", "own_past", "draft"))
    assert "share" in schema["components"]["schemas"]["Source"]["properties"]
    assert all("422" not in one["responses"] for path in schema["paths"].values() for one in path.values())
