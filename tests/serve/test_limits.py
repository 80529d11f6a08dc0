"""Bad requests are refused in OpenAI's form, limits hold, and the server stays up."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gnnlm.book import Book
from gnnlm.errors import ConfigError
from gnnlm.serve.limits import ApiKeys, Limits, checked_keys
from gnnlm.serve.runs import ServedRun, ServedRuns
from tests.serve.conftest import SMALL, Serving, error_of, fresh

GOOD = {"model": "tiny", "prompt": "ban dor", "max_tokens": 3, "temperature": 0}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 3}, "prompt: expected a string"),
    ({"prompt": []}, "prompt: expected a string"),
    ({"prompt": None}, "prompt: expected a string"),
    ({"prompt": ["a", 3]}, "prompt: expected a string"),
    ({"prompt": [[1], "a"]}, "prompt: expected a string"),
    ({"prompt": [True]}, "prompt: expected a string"),
    ({"prompt": [1.5]}, "prompt: expected a string"),
    ({"prompt": [258]}, "prompt: expected token ids from 0 to 257, got 258"),
    ({"prompt": [[1], [-1]]}, "prompt: expected token ids from 0 to 257, got -1"),
    ({"prompt": [10**30]}, "prompt: expected token ids"),
    ({"prompt": "ab" * 400}, "prompt: this server reads at most 600 tokens, got 800"),
    ({"prompt": "\ud800"}, "surrogate"),
    ({"max_tokens": 401}, "max_tokens: this server writes at most 400 tokens"),
    ({"max_tokens": -1}, "max_tokens: "),
    ({"max_tokens": "3"}, "max_tokens: "),
    ({"max_tokens": 3.5}, "max_tokens: "),
    ({"max_tokens": True}, "max_tokens: "),
    ({"temperature": -1}, "temperature: "),
    ({"temperature": "hot"}, "temperature: "),
    ({"top_p": 0}, "top_p: "),
    ({"top_k": -1}, "top_k: "),
    ({"n": 0}, "n: "),
    ({"n": 13}, "at most 12 texts"),
    ({"prompt": ["a"] * 7, "n": 2}, "at most 12 texts"),
    ({"n": 3, "best_of": 2}, "best_of: expected at least n"),
    ({"best_of": 2, "stream": True}, "best_of: "),
    ({"suffix": "x"}, "suffix: not supported"),
    ({"logit_bias": {"3": 1}}, "logit_bias: not supported"),
    ({"frequency_penalty": 0.5}, "frequency_penalty: not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty: not supported"),
    ({"logprobs": 21}, "logprobs: "),
    ({"logprobs": True}, "logprobs: "),
    ({"stop": ""}, "stop.0: "),
    ({"stop": [3]}, "stop.0: "),
    ({"stop": ["x"] * 17}, "stop: "),
    ({"stream": "yes"}, "stream: "),
    ({"stream_options": {"include_usage": True}}, "stream_options: only with stream"),
    ({"seed": 2**64}, "seed: "),
    ({"only": "nope"}, "no document of the store is named 'nope'"),
    ({"only": []}, "only: "),
    ({"search": "fast"}, "search: "),
    ({"sources": -1}, "sources: "),
    ({"functions": []}, "functions: this field does not exist or is not supported"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_completions(client: httpx.Client, change: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/completions", content=json.dumps({**GOOD, **change}), headers=JSON)
    error = error_of(answer, 400)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"model":"tiny","prompt":"a","temperature":NaN}',
        b'{"model":"tiny","prompt":"a","temperature":1e999}', b"[" * 50_000, b'{"a":' * 20_000, b"1" * 50_000,
        b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5000 + b"}", b'{"prompt":"a"}', b'{"model":"tiny"}',
        b'{"model":3,"prompt":"a"}',
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_bad_bodies(client: httpx.Client, body: bytes) -> None:
    error_of(client.post("/v1/completions", content=body, headers=JSON), 400)
    assert client.get("/healthz").status_code == 200


def test_only_json_is_read(client: httpx.Client) -> None:
    """A form of another site's page can send text, but not this header."""
    answer = client.post("/v1/completions", content=json.dumps(GOOD), headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {**GOOD, "model": "gpt"}, 404, "no model named 'gpt'; there are tiny, tiny:base"),
        ("/v1/completions", {**GOOD, "model": "tiny:gpt"}, 404, "no model named"),
        ("/v1/score", {"model": "tiny", "input": ""}, 400, "nothing to score"),
        ("/v1/score", {"model": "tiny", "input": []}, 400, "input"),
        ("/v1/score", {"model": "tiny", "input": "a", "predictors": ["gpt"]}, 400, "no predictor named 'gpt'"),
        ("/v1/score", {"model": "tiny", "input": "ab" * 400}, 400, "input: this server reads at most 600 tokens"),
        ("/v1/neighbors", {"model": "tiny", "input": "a", "k": 0}, 400, "k: "),
        ("/v1/neighbors", {"model": "tiny", "input": "ab" * 100, "k": 1000}, 400, "k: at most"),
        ("/v1/next", {"model": "tiny", "prompt": [300]}, 400, "prompt: expected token ids"),
        ("/v1/attention", {"model": "tiny", "prompt": {"a": 1}}, 400, "prompt: expected a string"),
        ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, "messages: "),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "x", "content": "a"}]},
            400,
            "messages.0.role",
        ),
        ("/tokenize", {"prompt": 3}, 400, "prompt: "),
        ("/detokenize", {"tokens": [999]}, 400, "tokens: expected token ids"),
        ("/nowhere", {}, 404, "no such path: /nowhere"),
        ("/v1/models", {}, 405, "does not take that method"),
    ],
)
def test_other_bad_requests(client: httpx.Client, path: str, body: dict[str, Any], status: int, message: str) -> None:
    assert message in error_of(client.post(path, json=body), status)["message"]


def test_bad_queries(client: httpx.Client) -> None:
    for query in ({"limit": "x"}, {"limit": 0}, {"offset": -1}):
        error_of(client.get("/v1/documents", params=query), 400)
    error_of(client.get("/v1/documents/text"), 400)
    error_of(client.get("/v1/report", params={"model": "x"}), 404)


def test_large_bodies_are_refused_unread(client: httpx.Client) -> None:
    """With a length, and in chunks without one."""
    assert (
        error_of(client.post("/v1/completions", content=b"x" * 100_001, headers=JSON), 413)["code"] == "body_too_large"
    )
    parts = (b"x" * 10_000 for _ in range(30))
    assert error_of(client.post("/v1/completions", content=parts, headers=JSON), 413)["code"] == "body_too_large"
    assert client.get("/healthz").status_code == 200


def test_prompts_past_the_window_work_up_to_the_limit(client: httpx.Client) -> None:
    assert client.post("/v1/completions", json={**GOOD, "prompt": "ab" * 300}).status_code == 200


def test_an_empty_prompt_starts_a_text(client: httpx.Client, book: Book) -> None:
    got = client.post("/v1/completions", json={**GOOD, "prompt": ""}).json()
    assert got["choices"][0]["text"] == book.generate("", max_tokens=3).text


# -- keys and hosts --------------------------------------------------------------------------------------------


def test_keys(serve: Serving) -> None:
    with serve(keys=("first-key-1", "second-key-2")) as (address, _), httpx.Client(base_url=address) as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first-key-1"},
            {"Authorization": "\u00e9"},
        ):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            assert error_of(client.get("/v1/models", headers=raw), 401)["code"] == "invalid_api_key"
        for key in ("first-key-1", "second-key-2"):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/openapi.json").status_code == 401


def test_keys_are_checked_and_never_shown() -> None:
    assert "first-key-1" not in repr(checked_keys(["first-key-1"]))
    for bad in ("short", "with space in it", "\u00fcml\u00e4uts-here"):
        with pytest.raises(ConfigError, match="API key 1: expected at least 8 ASCII"):
            checked_keys([bad])
    assert not ApiKeys().accept("Bearer ")


def test_other_names_of_this_machine_are_refused(client: httpx.Client, serve: Serving) -> None:
    """Without keys, a web page must not get here by pointing its own name at loopback."""
    assert error_of(client.get("/v1/models", headers={"Host": "evil.example"}), 403)["code"] == "host_not_allowed"
    assert client.get("/v1/models", headers={"Host": "localhost:1234"}).status_code == 200
    with serve(keys=("first-key-1",)) as (address, _):
        headers = {"Host": "models.example", "Authorization": "Bearer first-key-1"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200


def test_no_other_origin_is_allowed(client: httpx.Client) -> None:
    answer = client.options("/v1/models", headers={"Origin": "http://a.b", "Access-Control-Request-Method": "GET"})
    error_of(answer, 405)
    answer = client.get("/v1/models", headers={"Origin": "http://a.b"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert answer.headers["x-content-type-options"] == "nosniff"


# -- queue, time, clients that go away -------------------------------------------------------------------------

LONG = {**GOOD, "max_tokens": 400, "draft": False}


def test_a_full_queue_is_a_429(serve: Serving) -> None:
    with serve(limits=Limits(batch=1, queue=2, max_tokens=400)) as (address, _):

        def one(_: int) -> httpx.Response:
            return httpx.post(f"{address}/v1/completions", json=LONG, timeout=60)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, range(8)))
        codes = sorted(answer.status_code for answer in answers)
        assert codes[0] == 200
        assert codes[-1] == 429
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert error_of(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.post(f"{address}/v1/completions", json=GOOD, timeout=60).status_code == 200


def test_requests_take_turns(serve: Serving) -> None:
    """One with many prompts does not keep one with few waiting until all are written."""
    with serve(limits=Limits(batch=2, max_tokens=400)) as (address, _):
        ended: list[str] = []

        def one(name: str, body: dict[str, Any]) -> None:
            assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200
            ended.append(name)

        many = threading.Thread(target=one, args=("many", {**LONG, "prompt": ["ban"] * 12, "max_tokens": 60}))
        many.start()
        time.sleep(0.2)
        one("few", {**LONG, "max_tokens": 60})
        many.join()
    assert ended == ["few", "many"]


def test_time_is_limited(serve: Serving) -> None:
    """What was written in time is the answer; a request that did not begin is an error."""
    with serve(limits=Limits(batch=1, max_seconds=2, max_tokens=100_000)) as (address, _):
        body = {**LONG, "max_tokens": 100_000}
        got = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
        assert got["choices"][0]["finish_reason"] == "length"
        assert 0 < got["usage"]["completion_tokens"] < 100_000
        two = httpx.post(f"{address}/v1/completions", json={**body, "prompt": ["a", "b"]}, timeout=60)
        assert error_of(two, 503)["code"] == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away_are_forgotten(serve: Serving, stream: bool) -> None:
    with serve(limits=Limits(max_tokens=1_000_000)) as (address, context):
        body = {**LONG, "max_tokens": 1_000_000, "stream": stream}
        if stream:
            with httpx.stream("POST", f"{address}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # held: an iterator that is collected closes the connection
                next(lines)
                assert not context.worker.idle
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
        until(lambda: context.worker.idle)
        assert "gnnlm_cancelled_requests_total 1.0" in httpx.get(f"{address}/metrics").text


def test_slow_requests_are_cut_off(serve: Serving) -> None:
    """Headers that trickle, a body that does not come, and a second request that is only begun."""
    with serve(limits=Limits(read_seconds=0.6)) as (address, _):
        port = int(address.rpartition(":")[2])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port)) as slow:
            for byte in head[:20]:
                slow.send(bytes([byte]))
            assert all_of(slow) == b""
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.send(head + b"Content-Length: 100\r\n\r\n{")
            assert b"408" in all_of(slow)
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b'"ok"}'):
                answer += slow.recv(1000)
            slow.send(b"GET /heal")
            assert all_of(slow) == b""
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_what_is_not_http_is_refused_in_form(address: str) -> None:
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as other:
        other.send(b"\x16\x03\x01 nonsense\r\n\r\n")
        answer = all_of(other)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"type":"invalid_request_error"' in answer


def test_a_client_that_does_not_read_is_given_up(serve: Serving) -> None:
    with serve(limits=Limits(send_seconds=0.5, max_tokens=1_000_000)) as (address, context):
        body = json.dumps({**GOOD, "max_tokens": 1_000_000, "stream": True, "sources": 64, "n": 8, "temperature": 1})
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", int(address.rpartition(":")[2])))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            lazy.send(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            until(lambda: not context.worker.idle)
            until(lambda: context.worker.idle, seconds=60)


def test_a_failing_step_fails_its_requests_only(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnnlm.write.batch_loop import Writer

    with serve() as (address, _):
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "_write", lambda self: 1 / 0)
            answer = httpx.post(f"{address}/v1/completions", json=GOOD, timeout=60)
            assert "ZeroDivision" not in error_of(answer, 500)["message"]
        assert httpx.post(f"{address}/v1/completions", json=GOOD, timeout=60).status_code == 200


def test_two_runs_of_one_name_are_refused(runs: ServedRuns) -> None:
    (run,) = runs
    with pytest.raises(ConfigError, match="two runs are named tiny"):
        ServedRuns([run, fresh(run)])


def test_several_runs_and_odd_names(runs: ServedRuns, serve: Serving) -> None:
    from tests.serve.conftest import serving

    (run,) = runs
    both = ServedRuns([ServedRun("a:knn", run.book, run.report), ServedRun("b", run.book, run.report)])
    with serving(both) as (address, _):
        models = [one["id"] for one in httpx.get(f"{address}/v1/models").json()["data"]]
        assert models[:2] == ["a:knn", "a:knn:base"]
        for model in models:
            assert httpx.post(f"{address}/v1/completions", json={**GOOD, "model": model}).status_code == 200


def test_bad_limits() -> None:
    with pytest.raises(ConfigError, match="queue: expected a number above 0"):
        Limits(queue=0)
    assert SMALL.batch == 6


def until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def all_of(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    connection.settimeout(10)
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found
