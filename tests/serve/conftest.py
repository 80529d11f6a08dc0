"""A server over the tiny run: in this process for most tests, or as a command for those that need a process."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gnnlm.book import Book
from gnnlm.run import Run
from gnnlm.serve.context import ServerContext
from gnnlm.serve.limits import Limits, checked_keys
from gnnlm.serve.runs import ServedRun, ServedRuns, open_runs
from gnnlm.serve.server import make_server
from gnnlm.serve.socket import address_of, bind
from tests.cli import Process

SMALL = Limits(max_tokens=400, max_prompt=600, max_texts=12, max_body=100_000, batch=6)


@contextlib.contextmanager
def serving(
    runs: ServedRuns, limits: Limits = SMALL, keys: tuple[str, ...] = ()
) -> Iterator[tuple[str, ServerContext]]:
    """A server on a free port of loopback, in a thread; its address and its context."""
    context = ServerContext.of(runs, limits, checked_keys(keys))
    listening, ready = bind("127.0.0.1", 0), threading.Event()
    server = make_server(context, True, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield address_of(listening), context
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def runs(tiny_run: Run) -> ServedRuns:
    return open_runs([tiny_run.root])


@pytest.fixture(scope="session")
def book(runs: ServedRuns) -> Book:
    return runs.find("tiny")[0].book


@pytest.fixture(scope="session")
def address(runs: ServedRuns) -> Iterator[str]:
    with serving(runs) as (address, _):
        yield address


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


Serving = Callable[..., AbstractContextManager[tuple[str, ServerContext]]]


@pytest.fixture
def serve(runs: ServedRuns) -> Serving:
    """Start another server over the same run, with other limits or keys."""
    return lambda **options: serving(ServedRuns([fresh(run) for run in runs]), **options)


def fresh(run: ServedRun) -> ServedRun:
    return ServedRun(run.name, run.book, run.report)


class Command(Process):
    """`gnnlm serve` as a process."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        super().__init__("gnnlm", "serve", *arguments, "--port", "0", **environment)
        self.wait_until(lambda: self.output.endswith("\n"))
        found = re.fullmatch(r"ready: (http://[\d.]+:\d+)\n", self.output)
        assert found, (self.output, self.errors)
        self.address = found[1]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error
