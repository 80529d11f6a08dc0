"""`gnnlm serve` as a process: the address it prints, what it refuses to start with, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from gnnlm.config import parse_config
from gnnlm.run import Run
from tests.cli import error_line, finished
from tests.conftest import merge
from tests.serve.conftest import Command, error_of

SECRET = "ban dor zzyzx"
BODY = {"model": "tiny", "prompt": SECRET, "temperature": 0, "draft": False}


def test_it_serves_drains_and_ends(tiny_run: Run, tmp_path: Path) -> None:
    """On SIGTERM, what is running is finished, what is new gets a 503, and nothing of the text was logged."""
    keys = tmp_path / "keys"
    keys.write_text("# for tests\nfirst-key-1\n\nsecond-key-2\n")
    with Command(tiny_run.root, "--api-keys", keys, "--max-tokens", "4000", GNNLM_API_KEYS="third-key-3") as server:
        assert server.address.startswith("http://127.0.0.1:")
        client = httpx.Client(base_url=server.address, headers={"Authorization": "Bearer third-key-3"}, timeout=120)
        assert httpx.get(f"{server.address}/v1/models").status_code == 401
        assert client.get("/readyz").status_code == 200
        answers: list[httpx.Response] = []
        running = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json={**BODY, "max_tokens": 250}))
        )
        running.start()
        while "gnnlm_active_texts 1.0" not in client.get("/metrics").text:
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 120
        while client.get("/readyz").status_code == 200:
            assert time.monotonic() < deadline
        refused = client.post("/v1/completions", json={**BODY, "max_tokens": 3})
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        running.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 250
        done = finished(server)
    assert done.stdout == f"ready: {server.address}\n"
    assert "zzyzx" not in done.stderr
    assert "key-" not in done.stderr


def test_grace_ends(tiny_run: Run) -> None:
    """What is not finished in the grace time is ended."""
    with Command(tiny_run.root, "--grace", "0.5", "--max-tokens", "1000000") as server:
        body = {**BODY, "max_tokens": 1_000_000, "stream": True}
        with httpx.stream("POST", f"{server.address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        finished(server)


def test_what_it_does_not_start_with(tiny_run: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} of 127.0.0.1 is in use" in error_line("serve", tiny_run.root, "--port", port)
    nowhere = tmp_path / "nokeys"
    assert "cannot be read" in error_line("serve", tiny_run.root, "--api-keys", nowhere)
    nowhere.write_text("\n# none\n")
    assert "no keys in it" in error_line("serve", tiny_run.root, "--api-keys", nowhere)
    assert "no such address" in error_line("serve", tiny_run.root, "--host", "no.such.host.invalid", "--port", "0")
    assert "nope" in error_line("serve", tmp_path / "nope", "--port", "0")


def test_a_run_that_is_not_finished_is_refused(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    run = Run(parse_config(merge(tiny_values, {"run": str(tmp_path / "half")})))
    run.build("corpus")
    assert "is missing; build it first" in error_line("serve", run.root, "--port", "0")


def test_a_run_without_a_network_is_served_as_far_as_it_goes(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    run = Run(parse_config(merge(tiny_values, {"run": str(tmp_path / "plain"), "gnn": {"layers": 0}})))
    run.build_all()
    with Command(run.root) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        models = [one["id"] for one in client.get("/v1/models").json()["data"]]
        assert models == ["plain", "plain:base", "plain:knn"]
        given = {"prompt": "ban", "max_tokens": 3, "temperature": 0}
        assert client.post("/v1/completions", json={"model": "plain", **given}).status_code == 200
        answer = client.post("/v1/completions", json={"model": "plain:gnn", **given})
        assert "needs a graph network" in error_of(answer, 404)["message"]
        answer = client.post("/v1/attention", json={"model": "plain", "prompt": "ban"})
        assert "needs a graph network" in error_of(answer, 400)["message"]
        Run(parse_config(merge(tiny_values, {"run": str(run.root), "gnn": {"layers": 0}}))).build("tune", rebuild=True)
        assert client.post("/v1/completions", json={"model": "plain", **given}).status_code == 200  # keeps what it has
