"""Writing over HTTP: completions and chat completions, whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from gnnlm.serve import openai
from gnnlm.serve.api_errors import Problem, encoded, json_response
from gnnlm.serve.context import Desk, desk_of, found_run, while_connected
from gnnlm.serve.openai import Given, Text
from gnnlm.serve.requests import ChatBody, CompletionBody, Writing
from gnnlm.serve.responses import ERRORS, Chat, Completion
from gnnlm.serve.runs import Served
from gnnlm.serve.worker import Asked, News
from gnnlm.write.request import request
from gnnlm.write.text_state import Order

router = APIRouter(responses=ERRORS)
CHAT_TOKENS = 512  # written if a chat does not say how many


class Letters:
    """News for the event loop, from the worker's thread."""

    def __init__(self) -> None:
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[News | Problem]()

    def put(self, item: News | Problem) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> News:
        item = await self._queue.get()
        if isinstance(item, Problem):
            raise item
        return item


@dataclass(frozen=True)
class Job:
    """A request that has been checked: what is written, and how it is shown."""

    run: Served
    model: str
    body: Writing
    prompts: Sequence[Given]
    order: Order
    n: int
    best_of: int
    logprobs: int | None
    echo: bool = False
    chat: bool = False

    @property
    def texts(self) -> int:
        return len(self.prompts) * self.n

    def asked(self, letters: Letters) -> Asked:
        stream = bool(self.body.stream)
        prompts = [prompt.read for prompt in self.prompts]
        return Asked(self.run, prompts, self.order, self.best_of, self.body.sources, stream, letters)

    def tokens_of_prompts(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def envelope(self, chunk: bool) -> dict[str, Any]:
        if self.chat:
            return openai.envelope("chat.completion.chunk" if chunk else "chat.completion", "chatcmpl", self.model)
        return openai.envelope("text_completion", "cmpl", self.model)

    def choice(self, number: int, text: Text) -> dict[str, Any]:
        """A finished text."""
        assert text.ending is not None
        assert text.counts is not None
        choice: dict[str, Any] = {"index": number, "finish_reason": text.ending.reason}
        choice["logprobs"] = self._logprobs(number, text, first=True)
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text.text, "refusal": None}
        else:
            choice["text"] = (self.prompts[number // self.n].text if self.echo else "") + text.text
        if self.body.sources is not None:
            choice["gnnlm"] = openai.details(text.tokens, text.counts, text.ending)
        return choice

    def part(self, news: News, first: bool) -> dict[str, Any]:
        """What is new of a text."""
        text = Text()
        text.add(news)
        words = (self.prompts[news.number // self.n].text if self.echo and first else "") + text.text
        choice: dict[str, Any] = {"index": news.number, "finish_reason": None}
        choice["logprobs"] = self._logprobs(news.number, text, first)
        if self.chat:
            choice["delta"] = {**({"role": "assistant"} if first else {}), "content": words}
        else:
            choice["text"] = words
        if self.body.sources is not None:
            choice["gnnlm"] = openai.details(text.tokens, news.counts, None)
        return choice

    def end(self, news: News) -> dict[str, Any]:
        """The last part of a text: nothing new but how it ended."""
        assert news.ending is not None
        choice: dict[str, Any] = {"index": news.number, "finish_reason": news.ending.reason}
        choice["logprobs"] = self._logprobs(news.number, Text(), first=False)
        choice["delta" if self.chat else "text"] = {} if self.chat else ""
        if self.body.sources is not None:
            choice["gnnlm"] = openai.details([], news.counts, news.ending)
        return choice

    def _logprobs(self, number: int, text: Text, first: bool) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        lm = self.run.book.model.lm
        if self.chat:
            return openai.chat_logprobs(lm, text.records, self.logprobs)
        given = self.prompts[number // self.n] if self.echo and first else None
        return openai.legacy_logprobs(lm, text.records, self.logprobs, given, text.scored)


@router.post("/v1/completions", responses={200: {"model": Completion}})
async def completions(request: Request, body: CompletionBody) -> Response:
    """Write on from prompts."""
    found = await found_run(request, body, body.attach)
    return await _answer(request, await run_in_threadpool(_completion_job, desk_of(request), body, *found))


@router.post("/v1/chat/completions", responses={200: {"model": Chat}})
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a conversation, with a model whose tokenizer has a chat template."""
    found = await found_run(request, body, body.attach)
    return await _answer(request, await run_in_threadpool(_chat_job, desk_of(request), body, *found))


async def _answer(request: Request, job: Job) -> Response:
    desk, letters = desk_of(request), Letters()
    asked = job.asked(letters)
    desk.worker.submit(asked)
    if not job.body.stream:
        try:
            return json_response(await while_connected(request, _whole(job, letters)))
        finally:
            desk.worker.cancel(asked)
    try:
        first = await while_connected(
            request, letters.get()
        )  # an error before the first token is an answer with its own status
    except BaseException:
        desk.worker.cancel(asked)
        raise
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(desk, job, asked, letters, first), media_type="text/event-stream", headers=headers)


async def _whole(job: Job, letters: Letters) -> dict[str, Any]:
    """The answer, when all texts are finished."""
    texts = [Text() for _ in range(len(job.prompts) * job.best_of)]
    left = len(texts)
    while left:
        news = await letters.get()
        texts[news.number].add(news)
        left -= news.ending is not None
    written = sum(text.ending.tokens for text in texts if text.ending)
    chosen: list[Text] = []
    for first in range(0, len(texts), job.best_of):
        some = texts[first : first + job.best_of]
        chosen += some if job.best_of == job.n else sorted(some, key=lambda text: -text.mean)[: job.n]
    return {
        **job.envelope(chunk=False),
        "choices": [job.choice(number, text) for number, text in enumerate(chosen)],
        "usage": openai.usage(job.tokens_of_prompts(), written),
    }


async def _stream(desk: Desk, job: Job, asked: Asked, letters: Letters, first: News) -> AsyncIterator[bytes]:
    """Server-sent events: parts of texts as they come, the end of each, the usage if asked for, and [DONE]."""
    head = job.envelope(chunk=True)
    counted = job.body.stream_options is not None and job.body.stream_options.include_usage
    extra = {"usage": None} if counted else {}
    left, written, begun, news = job.texts, 0, set[int](), first
    try:
        while True:
            if news.records or news.number not in begun:
                part = job.part(news, news.number not in begun)
                yield _event({**head, "choices": [part], **extra})
                begun.add(news.number)
            if news.ending is not None:
                left, written = left - 1, written + news.ending.tokens
                yield _event({**head, "choices": [job.end(news)], **extra})
            if not left:
                break
            news = await letters.get()
        if counted:
            yield _event({**head, "choices": [], "usage": openai.usage(job.tokens_of_prompts(), written)})
        yield b"data: [DONE]\n\n"
    except Problem as problem:
        yield _event(problem.body)
    finally:
        desk.worker.cancel(asked)


def _event(value: Any) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


# -- checking --------------------------------------------------------------------------------------------------


def _completion_job(desk: Desk, body: CompletionBody, run: Served, predictor: str | None) -> Job:
    if body.suffix is not None:
        raise Problem(400, "suffix is not supported: these models write from left to right", param="suffix")
    n = body.n or 1
    best_of = body.best_of or n
    if best_of < n:
        raise Problem(400, f"best_of: expected at least n ({n}), got {best_of}", param="best_of")
    if best_of > n and body.stream:
        raise Problem(400, "best_of: the best text is known only at the end; do not stream it", param="best_of")
    prompts = _prompts(desk, run, body.prompt)
    _check_texts(desk, len(prompts) * best_of)
    tokens = 16 if body.max_tokens is None else body.max_tokens
    order = _order(desk, run, predictor, body, tokens)
    echo = bool(body.echo)
    order = replace(order, top=body.logprobs or 0, scored=echo and body.logprobs is not None)
    return Job(run, body.model, body, prompts, order, n, best_of, body.logprobs, echo)


def _chat_job(desk: Desk, body: ChatBody, run: Served, predictor: str | None) -> Job:
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs: set logprobs to true as well", param="top_logprobs")
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in body.messages
    ]
    ids = desk.chat(run, messages)
    desk.check_length(ids, "messages")
    n = body.n or 1
    _check_texts(desk, n)
    tokens = body.max_completion_tokens or body.max_tokens or min(CHAT_TOKENS, desk.limits.max_tokens)
    top = body.top_logprobs or 0
    order = replace(_order(desk, run, predictor, body, tokens), top=top)
    prompts = [Given("", ids, [0] * len(ids), ids)]
    return Job(run, body.model, body, prompts, order, n, n, top if body.logprobs else None, chat=True)


def _order(desk: Desk, run: Served, predictor: str | None, body: Writing, tokens: int) -> Order:
    """What the loop is asked for."""
    if tokens > desk.limits.max_tokens:
        message = f"max_tokens: this server writes at most {desk.limits.max_tokens:,} tokens, got {tokens:,}"
        raise Problem(400, message, param="max_tokens")
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(body, name):
            raise Problem(400, f"{name} is not supported; leave it at 0, or use repetition_penalty", param=name)
    if body.logit_bias:
        raise Problem(400, "logit_bias is not supported; leave it empty", param="logit_bias")
    if body.stream_options is not None and not body.stream:
        raise Problem(400, "stream_options: only with stream set to true", param="stream_options")
    seed = secrets.randbits(62) if body.seed is None else body.seed % 2**63
    options = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p or 1.0,
        "top_k": body.top_k or 0,
        "min_p": body.min_p or 0.0,
        "repetition_penalty": body.repetition_penalty or 1.0,
        "stop": body.stop or [],
        "draft": body.draft is not False,
        "own_past": bool(body.own_past),
    }
    asked = request(predictor=predictor, seed=seed, max_tokens=max(1, tokens), **options)
    order = asked.order(run.book.model, run.allowed(body.only, body.exclude))
    return replace(order, max_tokens=tokens)


def _prompts(desk: Desk, run: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[Given]:
    several: list[Any] = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
    found = []
    for one in several:
        if isinstance(one, str):
            ids, starts = run.tokenize(one)
            desk.check_length(ids, "prompt")
            found.append(Given(one, ids, starts, ids))
        else:
            run.check_ids(one, "prompt")
            desk.check_length(one, "prompt")
            found.append(Given.of_ids(run.book.model.lm, one))
    return found


def _check_texts(desk: Desk, count: int) -> None:
    if count > desk.limits.max_texts:
        message = (
            f"this server writes at most {desk.limits.max_texts} texts for a request (prompts times n), got {count}"
        )
        raise Problem(400, message, param="n")
