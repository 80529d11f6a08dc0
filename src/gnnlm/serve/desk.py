"""What all endpoints of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fastapi import Request

from gnnlm.serve.limits import Keys, Limits
from gnnlm.serve.metrics import Metrics
from gnnlm.serve.problems import Problem
from gnnlm.serve.runs import Runs, Served
from gnnlm.serve.worker import Worker

Answer = TypeVar("Answer")
CLIENT_GONE = 499  # nobody sees it but the metrics


@dataclass(frozen=True)
class Desk:
    """The runs, the worker, and the rules."""

    runs: Runs
    worker: Worker
    limits: Limits
    keys: Keys
    metrics: Metrics

    def check_length(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > self.limits.max_prompt:
            message = f"{param}: this server reads at most {self.limits.max_prompt:,} tokens, got {len(ids):,}"
            raise Problem(400, message, param=param, code="context_length_exceeded")

    def chat(self, run: Served, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation in the model's template."""
        return run.book.model.lm.chat(messages)


def desk_of(request: Request) -> Desk:
    return cast(Desk, request.app.state.desk)


async def in_worker(request: Request, work: Callable[[], Answer]) -> Answer:
    """What the worker answers, unless the client goes away first."""
    future = asyncio.wrap_future(desk_of(request).worker.call(work))
    try:
        return await while_connected(request, _awaited(future))
    finally:
        future.cancel()


async def _awaited(future: asyncio.Future[Answer]) -> Answer:
    return await future


async def while_connected(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of some work, which is cancelled if the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Problem(CLIENT_GONE, "the client went away")
        return await task
    finally:
        for each in (task, gone):
            each.cancel()


async def _gone(request: Request) -> None:
    """Ends when the client has gone away; the body has been read by now."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
