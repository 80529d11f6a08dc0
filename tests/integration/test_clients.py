"""curl, lm-eval's local-completions, and schemathesis against the server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gnnlm.book import Book

pytestmark = pytest.mark.integration


def curl(*arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(["curl", "-sS", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_curl(open_address: str, served_book: Book, tmp_path: Path) -> None:
    body = json.dumps({"model": "tiny", "prompt": "ban dor", "max_tokens": 8, "temperature": 0})
    header = ("-H", "Content-Type: application/json")
    got = json.loads(curl(f"{open_address}/v1/completions", *header, "-d", body))
    want = served_book.generate("ban dor", max_tokens=8).text
    assert got["choices"][0]["text"] == want
    streamed = curl("-N", f"{open_address}/v1/completions", *header, "-d", body[:-1] + ', "stream": true}')
    lines = [line for line in streamed.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == want
    large = tmp_path / "large"
    large.write_bytes(b"x" * 100_000_000)
    for options in ((), ("-H", "Transfer-Encoding: chunked")):
        got = curl(f"{open_address}/v1/completions", *header, *options, "--data-binary", f"@{large}")
        assert json.loads(got)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("predictor", ["base", "gnn_knn"])
def test_stock_lm_eval_gives_the_books_numbers(
    open_address: str, served_book: Book, tmp_path: Path, predictor: str
) -> None:
    """The same tasks and numbers as for the adapter and the model class."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip(
        "tenacity", reason="lm-eval's API clients need it: pip install -c constraints.txt 'lm-eval[api]'"
    )
    tasks: Any = pytest.importorskip("tests.integration.tasks")
    from lm_eval.tasks import TaskManager

    folder = tasks.write_tasks(tmp_path / "tasks", served_book, predictor)
    given = f"model=tiny:{predictor},base_url={open_address}/v1/completions,num_concurrent=1,max_length=1000"
    found = tasks.numbers(
        lm_eval.simple_evaluate(
            model="local-completions",
            model_args=given,
            tasks=list(tasks.TASKS),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            batch_size=4,
            bootstrap_iters=0,
        )
    )
    assert found == pytest.approx(tasks.expected_numbers(served_book, predictor, folder), rel=1e-3, abs=1e-3)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_no_server_error(open_address: str, mode: str) -> None:
    """Generated requests, by the schema or against it, to every path: no 5xx, and errors have the documented form."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{open_address}/openapi.json")
    seen: dict[str, set[int]] = {}

    def check(case: Any) -> None:
        if mode == "positive" and isinstance(case.body, dict):
            if "model" in case.body:
                case.body["model"] = "tiny:knn"  # made-up names would get no further than that
            case.body = {name: value for name, value in case.body.items() if name not in ("only", "exclude")}
        answer = case.call(timeout=60)
        seen.setdefault(case.path, set()).add(answer.status_code)
        assert answer.status_code < 500, (case.path, case.body, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    for operation in (one.ok() for one in schema.get_all_operations()):
        if mode == "negative" and not (operation.body or operation.query):
            continue
        cases = operation.as_strategy(schemathesis.GenerationMode(mode))
        bounds: dict[str, Any] = {"max_examples": 15, "phases": [Phase.generate], "derandomize": True}
        settings(**bounds, deadline=None, suppress_health_check=list(HealthCheck))(given(cases)(check))()
    assert len(seen) >= (16 if mode == "positive" else 10)
    if mode == "positive":
        good = {path for path, codes in seen.items() if 200 in codes}
        assert {"/v1/completions", "/v1/score", "/v1/next", "/tokenize", "/v1/documents"} <= good
