"""Endpoints that write: completions and chat completions, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from gnnlm.serve import openai
from gnnlm.serve.api_errors import ApiError
from gnnlm.serve.context import context_of, find_run, while_connected
from gnnlm.serve.requests import ChatBody, CompletionBody
from gnnlm.serve.responses import ERRORS, ChatCompletion, Completion
from gnnlm.serve.text_request import TextRequest
from gnnlm.serve.text_updates import QueuedRequest, TextUpdate
from gnnlm.serve.worker import Worker

router = APIRouter(responses=ERRORS)
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.post("/v1/completions", response_model=Completion, response_model_exclude_unset=True)
async def completions(request: Request, body: CompletionBody) -> Completion | ChatCompletion | StreamingResponse:
    """Continue prompts."""
    run, predictor = await find_run(request, body, body.attach)
    wanted = await run_in_threadpool(TextRequest.of_completion, context_of(request), body, run, predictor)
    return await _write(request, wanted)


@router.post("/v1/chat/completions", response_model=ChatCompletion, response_model_exclude_unset=True)
async def chat_completions(request: Request, body: ChatBody) -> Completion | ChatCompletion | StreamingResponse:
    """Answer a conversation, with a model whose tokenizer has a chat template."""
    run, predictor = await find_run(request, body, body.attach)
    wanted = await run_in_threadpool(TextRequest.of_chat, context_of(request), body, run, predictor)
    return await _write(request, wanted)


class UpdateQueue:
    """Updates of texts, from the worker's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[TextUpdate | ApiError]()

    def put(self, item: TextUpdate | ApiError) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> TextUpdate:
        item = await self._queue.get()
        if isinstance(item, ApiError):
            raise item
        return item


async def _write(request: Request, wanted: TextRequest) -> Completion | ChatCompletion | StreamingResponse:
    worker = context_of(request).worker
    updates = UpdateQueue()
    queued = QueuedRequest(
        run=wanted.run,
        prompts=[prompt.read for prompt in wanted.prompts],
        settings=wanted.settings,
        n=wanted.best_of,
        sources=wanted.body.sources,
        stream=wanted.body.stream,
        deliver=updates.put,
    )
    worker.submit(queued)
    if not wanted.body.stream:
        try:
            return await while_connected(request, _whole(wanted, updates))
        finally:
            worker.cancel(queued)
    try:  # an error before the first token is an answer with its own status
        first = await while_connected(request, updates.get())
    except BaseException:
        worker.cancel(queued)
        raise
    events = _events(wanted, worker, queued, updates, first)
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)


async def _whole(wanted: TextRequest, updates: UpdateQueue) -> Completion | ChatCompletion:
    """Return the answer when all texts are finished; each comes as one update."""
    texts: dict[int, TextUpdate] = {}
    while len(texts) < len(wanted.prompts) * wanted.best_of:
        update = await updates.get()
        texts[update.number] = update
    shown: list[TextUpdate] = []
    for first in range(0, len(texts), wanted.best_of):
        some = [texts[number] for number in range(first, first + wanted.best_of)]
        if wanted.best_of > wanted.body.n:
            some = sorted(some, key=openai.mean_log_prob, reverse=True)[: wanted.body.n]
        shown += some
    choices = [wanted.choice(number, update) for number, update in enumerate(shown)]
    usage = wanted.usage(sum(update.written for update in texts.values()))
    return wanted.answer(wanted.envelope(), choices, usage=usage)


async def _events(
    wanted: TextRequest, worker: Worker, queued: QueuedRequest, updates: UpdateQueue, update: TextUpdate
) -> AsyncIterator[bytes]:
    """Yield server-sent events: what is new of each text, its end, the usage if asked for, and [DONE]."""
    head = wanted.envelope()
    with_usage = wanted.body.stream_options is not None and wanted.body.stream_options.include_usage
    no_usage = {"usage": None} if with_usage else {}
    unfinished = len(wanted.prompts) * wanted.body.n
    written = 0
    begun: set[int] = set()
    try:
        while True:
            number = update.number
            if update.pieces or number not in begun:
                new = replace(update, finish_reason=None, spans=())
                choice = wanted.choice(number, new, first=number not in begun)
                yield _event(wanted.answer(head, [choice], **no_usage))
                begun.add(number)
            if update.finish_reason is not None:
                end = replace(update, pieces=(), tokens=(), scored=())
                yield _event(wanted.answer(head, [wanted.choice(number, end, first=False)], **no_usage))
                unfinished -= 1
                written += update.written
            if not unfinished:
                break
            update = await updates.get()
        if with_usage:
            yield _event(wanted.answer(head, [], usage=wanted.usage(written)))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield b"data: " + error.body + b"\n\n"
    finally:
        worker.cancel(queued)


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"
