"""What all endpoints of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from gnnlm.serve.api_errors import Problem
from gnnlm.serve.limits import Keys, Limits
from gnnlm.serve.metrics import Metrics
from gnnlm.serve.requests import AttachedDocument, ModelBody
from gnnlm.serve.runs import Runs, Served
from gnnlm.serve.worker import Worker

Answer = TypeVar("Answer")
CLIENT_GONE = 499  # nobody sees it but the metrics


class Found(NamedTuple):
    """What a request names as its model."""

    run: Served
    predictor: str | None


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


async def found_run(request: Request, body: ModelBody, attach: Sequence[AttachedDocument] | None) -> Found:
    """The run and the predictor that a request names, with the documents that it attaches."""
    desk = desk_of(request)
    run, predictor = desk.runs.find(body.model)
    if attach is None:
        return Found(run, predictor)
    documents = await run_in_threadpool(run.taken, [(one.name, one.text) for one in attach])
    count, most = sum(len(document.tokens) for document in documents), desk.limits.max_attached
    if count > most:
        message = f"attach: this server reads at most {most:,} tokens of attached documents, got {count:,}"
        raise Problem(400, message, param="attach", code="context_length_exceeded")
    return Found(await in_worker(request, lambda: run.attached(documents)), predictor)


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
