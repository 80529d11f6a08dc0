"""Documents that change under a server: by its own requests with a key, or by another process."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gnnlm
from gnnlm.generation import leases_of
from gnnlm.library.library import Library
from gnnlm.run import Run
from gnnlm.run.lock import locked
from gnnlm.serve.runs import open_runs
from tests.library.conftest import make_text
from tests.serve.conftest import SMALL, error_of, serving

KEY = "a-good-long-key"


@pytest.fixture
def root(tiny_run: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run.root, tmp_path / "mine"))


@pytest.fixture
def client(root: Path) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        serving(open_runs([root]), keys=(KEY,)) as (address, _),
        httpx.Client(base_url=address, timeout=60, headers=headers) as client,
    ):
        yield client


def post(client: httpx.Client, path: str, method: str = "POST", **body: Any) -> dict[str, Any]:
    answer = client.request(method, path, json={"model": "mine", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def found_by(client: httpx.Client, text: str, **fields: Any) -> set[str]:
    data = post(client, "/v1/neighbors", input=text, k=4, **fields)["data"]
    return {near["document"] for token in data for near in token["neighbors"]}


def test_documents_are_added_replaced_and_removed(client: httpx.Client, root: Path) -> None:
    text = make_text(1)
    before = client.get("/v1/documents").json()
    assert (before["generation"], before["changeable"]) == (0, True)
    assert "note" not in found_by(client, text[:40])
    made = post(client, "/v1/documents", documents=[{"name": "note", "text": text}], tags=["manual"])
    assert (made["generation"], made["added"], made["removed"], made["overlapping"]) == (1, 1, 0, [])
    assert "note" in found_by(client, text[:40])
    assert found_by(client, text[:40], only=["tag:manual"]) == {"note"}
    listed = client.get("/v1/documents", params={"search": "note"}).json()
    assert listed["data"] == [{"name": "note", "tokens": listed["data"][0]["tokens"], "tags": ["manual"]}]
    again = post(client, "/v1/documents", documents=[{"name": "note", "text": text}])
    assert (again["generation"], again["added"]) == (1, 0)
    other = [{"name": "note", "text": make_text(2)}]
    refused = error_of(client.post("/v1/documents", json={"model": "mine", "documents": other}), 400)
    assert "use replace" in refused["message"]
    assert post(client, "/v1/documents", "PUT", documents=other)["generation"] == 2
    assert client.get("/v1/documents/text", params={"name": "note"}).json()["text"] == make_text(2)
    gone = post(client, "/v1/documents/remove", names="tag:manual")
    assert (gone["generation"], gone["removed"]) == (3, 1)
    assert "note" not in found_by(client, make_text(2)[:40])
    assert error_of(client.get("/v1/documents/text", params={"name": "note"}), 404)
    history = client.get("/v1/history").json()["data"]
    assert [each["by"] for each in history] == ["run", "add", "replace", "remove"]
    assert client.get("/v1/models").json()["data"][0]["generation"] == 3
    assert gnnlm.open(root).generation == 3


def test_a_server_moves_on_between_requests(client: httpx.Client, root: Path) -> None:
    """Another process changes the run: the next request sees it, and an idle server lets go of the old generation."""
    text = make_text(1)
    written = {"prompt": text[:60], "max_tokens": 8, "seed": 1}
    post(client, "/v1/completions", **written)
    library = Library(root)
    library.add_texts({"note": text})
    assert "note" in found_by(client, text[:40])
    sources = post(client, "/v1/completions", sources=4, model="mine:knn", **written)["choices"][0]["gnnlm"]["tokens"]
    assert "note" in {source["document"] for token in sources for source in token["sources"]}
    library.remove("note")
    end = time.monotonic() + 120
    while {lease.generation for lease in leases_of(root)} != {2}:  # without any request
        assert time.monotonic() < end
        time.sleep(0.05)
    assert library.compact(erase=True, wait=120).as_json()["found"] == []
    assert "note" not in found_by(client, text[:40])


def test_a_text_is_written_from_the_generation_it_began_with(client: httpx.Client, root: Path) -> None:
    text, written = make_text(1), ""
    body = {"model": "mine:knn", "prompt": text[:60], "max_tokens": 200, "temperature": 0, "draft": False}
    alone = post(client, "/v1/completions", **{key: value for key, value in body.items() if key != "model"},
                 model="mine:knn")["choices"][0]["text"]  # fmt: skip
    library = Library(root)
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 2:
                library.add_texts({"note": text})
                assert "note" in found_by(client, text[:40])  # a request that began later
            if line.startswith("data: {"):
                written += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert written == alone


def test_without_keys_nothing_can_be_changed(root: Path) -> None:
    with serving(open_runs([root])) as (address, _), httpx.Client(base_url=address, timeout=60) as client:
        body = {"model": "mine", "documents": [{"name": "note", "text": "ban dor"}]}
        for method in ("POST", "PUT"):
            assert error_of(client.request(method, "/v1/documents", json=body), 403)["code"] == "no_keys"
        assert error_of(client.post("/v1/documents/remove", json={"model": "mine", "names": ["*"]}), 403)
        assert client.get("/v1/documents").json()["changeable"] is False
        assert client.get("/v1/history").status_code == 200
    with serving(open_runs([root]), keys=(KEY,)) as (address, _), httpx.Client(base_url=address) as client:
        assert error_of(client.post("/v1/documents", json=body), 401)
    assert gnnlm.open(root).generation == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"documents": []}, "at least 1 item"),
        ({"documents": [{"name": "", "text": "x"}]}, "at least 1 character"),
        ({"documents": [{"name": "a", "text": " \n"}]}, "is empty"),
        ({"documents": [{"name": "a", "text": "b \ud800"}]}, ""),
        ({"documents": [{"name": "a", "text": "x"}] * 2}, "one document of each name"),
        ({"documents": [{"name": "a", "text": "x"}], "tags": ["*"]}, "expected a tag"),
        ({"documents": [{"name": "a", "text": "x", "path": "/etc/passwd"}]}, "does not exist"),
        ({"documents": [{"name": "a", "text": 3}]}, "string"),
    ],
)
def test_bad_documents_are_refused(client: httpx.Client, root: Path, body: dict[str, Any], message: str) -> None:
    sent = json.dumps({"model": "mine", **body}).encode()
    answer = client.post("/v1/documents", content=sent, headers={"Content-Type": "application/json"})
    assert message in error_of(answer, 400)["message"]
    assert not (root / "CURRENT").exists()


def test_other_refusals(client: httpx.Client, root: Path) -> None:
    remove = {"model": "mine", "names": ["nothing"]}
    assert "no document of the store" in error_of(client.post("/v1/documents/remove", json=remove), 400)["message"]
    everything = {"model": "mine", "names": ["*"]}
    assert "no document" in error_of(client.post("/v1/documents/remove", json=everything), 400)["message"]
    large = {"model": "mine", "documents": [{"name": "a", "text": "x" * SMALL.max_body}]}
    assert error_of(client.post("/v1/documents", json=large), 413)
    with locked(root):
        some = {"model": "mine", "documents": [{"name": "a", "text": "ban dor"}]}
        assert error_of(client.post("/v1/documents", json=some), 409)["code"] == "conflict"
    assert post(client, "/v1/documents", documents=some["documents"])["generation"] == 1
