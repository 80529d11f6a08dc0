"""What the endpoints of a server share: its runs, its worker and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from gnnlm.serve.api_errors import ApiError
from gnnlm.serve.limits import ApiKeys, Limits
from gnnlm.serve.metrics import Metrics
from gnnlm.serve.requests import AttachedDocument, ModelBody
from gnnlm.serve.runs import ServedRun, ServedRuns
from gnnlm.serve.worker import Worker

T = TypeVar("T")
CLIENT_GONE = 499  # a status that only the metrics show


@dataclass(frozen=True)
class ServerContext:
    runs: ServedRuns
    worker: Worker
    limits: Limits
    keys: ApiKeys
    metrics: Metrics

    @classmethod
    def of(cls, runs: ServedRuns, limits: Limits, keys: ApiKeys) -> ServerContext:
        metrics = Metrics()
        return cls(runs, Worker(limits, metrics, runs.refresh), limits, keys, metrics)

    def check_length(self, ids: Sequence[int], param: str) -> None:
        most = self.limits.max_prompt
        if len(ids) > most:
            message = f"{param}: this server reads at most {most:,} tokens, got {len(ids):,}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")


def context_of(request: Request) -> ServerContext:
    return cast(ServerContext, request.app.state.context)


async def find_run(
    request: Request, body: ModelBody, attach: Sequence[AttachedDocument] | None
) -> tuple[ServedRun, str | None]:
    """Return the run and the predictor that a request names, with the documents that the request attaches."""
    context = context_of(request)
    run, predictor = context.runs.find(body.model)
    if attach is None:
        return run, predictor
    documents = await run_in_threadpool(run.tokenized_documents, [(one.name, one.text) for one in attach])
    count = sum(len(document.tokens) for document in documents)
    most = context.limits.max_attached
    if count > most:
        message = f"attach: this server reads at most {most:,} tokens of attached documents, got {count:,}"
        raise ApiError(400, message, param="attach", code="context_length_exceeded")
    return await in_worker(request, lambda: run.attached(documents)), predictor


async def in_worker(request: Request, work: Callable[[], T]) -> T:
    """Run a call in the worker's second thread; cancel it if the client disconnects."""
    future = asyncio.wrap_future(context_of(request).worker.call(work))

    async def result() -> T:
        return await future

    try:
        return await while_connected(request, result())
    finally:
        future.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "the client has disconnected")
        return await task
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects; the request's body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
