"""Writing over HTTP: completions and chat completions, whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from gnnlm.serve import openai
from gnnlm.serve.api_errors import Problem, encoded
from gnnlm.serve.context import Desk, desk_of, found_run, while_connected
from gnnlm.serve.openai import TokenizedPrompt
from gnnlm.serve.requests import ChatBody, CompletionBody, Writing
from gnnlm.serve.responses import (
    ERRORS,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    Usage,
)
from gnnlm.serve.runs import Served
from gnnlm.serve.worker import Asked, News
from gnnlm.write.generate_options import GenerateOptions, TextOptions
from gnnlm.write.text_state import TextSettings

router = APIRouter(responses=ERRORS)
CHAT_TOKENS = 512  # written if a chat does not say how many


class UpdateQueue:
    """Updates of texts, from the worker's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[News | Problem]()

    def put(self, item: News | Problem) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> News:
        item = await self._queue.get()
        if isinstance(item, Problem):
            raise item
        return item


@dataclass(frozen=True)
class TextRequest:
    """A request that has been checked: what is written, and how the answer shows it."""

    run: Served
    body: Writing
    prompts: Sequence[TokenizedPrompt]
    settings: TextSettings
    n: int
    best_of: int
    logprobs: int | None
    echo: bool = False
    chat: bool = False

    def asked(self, updates: UpdateQueue) -> Asked:
        prompts = [prompt.read for prompt in self.prompts]
        return Asked(self.run, prompts, self.settings, self.best_of, self.body.sources, bool(self.body.stream), updates)

    def envelope(self) -> dict[str, Any]:
        if not self.chat:
            return openai.envelope("text_completion", "cmpl", self.body.model)
        kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        return openai.envelope(kind, "chatcmpl", self.body.model)

    def answer(
        self, head: dict[str, Any], choices: Sequence[Any], **usage: Usage | None
    ) -> Completion | ChatCompletion:
        return (ChatCompletion if self.chat else Completion)(**head, choices=list(choices), **usage)

    def choice(self, number: int, news: News, first: bool = True) -> CompletionChoice | ChatChoice:
        """What is new of a text; without `stream`, all of it."""
        lm = self.run.book.model.lm
        choice: CompletionChoice | ChatChoice
        if not self.chat:
            echoed = self.prompts[number // self.n] if self.echo and first else None
            choice = openai.completion_choice(number, lm, news, self.logprobs, echoed)
        else:
            choice = openai.chat_choice(number, lm, news, self.logprobs)
            if self.body.stream:
                choice.delta = openai.chat_delta(news, first)
            else:
                choice.message = ChatMessage(role="assistant", content=openai.text_of(news), refusal=None)
        if self.body.sources is not None:
            choice.gnnlm = openai.details(news)
        return choice

    def usage(self, written: int) -> Usage:
        return Usage.of(sum(len(prompt.ids) for prompt in self.prompts), written)


@router.post("/v1/completions", response_model=Completion, response_model_exclude_unset=True)
async def completions(request: Request, body: CompletionBody) -> Completion | ChatCompletion | StreamingResponse:
    """Continue prompts."""
    found = await found_run(request, body, body.attach)
    return await _answer(request, await run_in_threadpool(_completion_request, desk_of(request), body, *found))


@router.post("/v1/chat/completions", response_model=ChatCompletion, response_model_exclude_unset=True)
async def chat_completions(request: Request, body: ChatBody) -> Completion | ChatCompletion | StreamingResponse:
    """Answer a conversation, with a model whose tokenizer has a chat template."""
    found = await found_run(request, body, body.attach)
    return await _answer(request, await run_in_threadpool(_chat_request, desk_of(request), body, *found))


async def _answer(request: Request, wanted: TextRequest) -> Completion | ChatCompletion | StreamingResponse:
    desk = desk_of(request)
    updates = UpdateQueue()
    asked = wanted.asked(updates)
    desk.worker.submit(asked)
    if not wanted.body.stream:
        try:
            return await while_connected(request, _whole(wanted, updates))
        finally:
            desk.worker.cancel(asked)
    try:  # an error before the first token is an answer with its own status
        first = await while_connected(request, updates.get())
    except BaseException:
        desk.worker.cancel(asked)
        raise
    events = _events(desk, wanted, asked, updates, first)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _whole(wanted: TextRequest, updates: UpdateQueue) -> Completion | ChatCompletion:
    """Return the answer when all texts are finished; each comes as one update."""
    texts: dict[int, News] = {}
    while len(texts) < len(wanted.prompts) * wanted.best_of:
        news = await updates.get()
        texts[news.number] = news
    written = sum(news.ending.tokens for news in texts.values() if news.ending is not None)
    chosen: list[News] = []
    for first in range(0, len(texts), wanted.best_of):
        some = [texts[number] for number in range(first, first + wanted.best_of)]
        if wanted.best_of > wanted.n:
            some = sorted(some, key=openai.mean_log_prob, reverse=True)[: wanted.n]
        chosen += some
    choices = [wanted.choice(number, news) for number, news in enumerate(chosen)]
    return wanted.answer(wanted.envelope(), choices, usage=wanted.usage(written))


async def _events(
    desk: Desk, wanted: TextRequest, asked: Asked, updates: UpdateQueue, news: News
) -> AsyncIterator[bytes]:
    """Yield server-sent events: what is new of each text, its end, the usage if asked for, and [DONE]."""
    head = wanted.envelope()
    counted = wanted.body.stream_options is not None and wanted.body.stream_options.include_usage
    no_usage = {"usage": None} if counted else {}
    unfinished = len(wanted.prompts) * wanted.n
    written = 0
    begun = set[int]()
    try:
        while True:
            if news.records or news.number not in begun:
                choice = wanted.choice(news.number, replace(news, ending=None), news.number not in begun)
                yield _event(wanted.answer(head, [choice], **no_usage))
                begun.add(news.number)
            if news.ending is not None:
                end = replace(news, records=[], tokens=[], scored=[])
                yield _event(wanted.answer(head, [wanted.choice(news.number, end, first=False)], **no_usage))
                unfinished -= 1
                written += news.ending.tokens
            if not unfinished:
                break
            news = await updates.get()
        if counted:
            yield _event(wanted.answer(head, [], usage=wanted.usage(written)))
        yield b"data: [DONE]\n\n"
    except Problem as problem:
        yield b"data: " + encoded(problem.body) + b"\n\n"
    finally:
        desk.worker.cancel(asked)


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


# -- checking --------------------------------------------------------------------------------------------------


def _completion_request(desk: Desk, body: CompletionBody, run: Served, predictor: str | None) -> TextRequest:
    if body.suffix is not None:
        raise Problem(400, "suffix is not supported: these models write from left to right", param="suffix")
    n = body.n
    best_of = body.best_of or n
    if best_of < n:
        raise Problem(400, f"best_of: expected at least n ({n}), got {best_of}", param="best_of")
    if best_of > n and body.stream:
        raise Problem(400, "best_of: the best text is known only at the end; do not stream it", param="best_of")
    prompts = _prompts(desk, run, body.prompt)
    _check_texts(desk, len(prompts) * best_of)
    tokens = 16 if body.max_tokens is None else body.max_tokens
    settings = _settings(desk, run, predictor, body, tokens)
    echo = bool(body.echo)
    settings = replace(settings, top=body.logprobs or 0, scored=echo and body.logprobs is not None)
    return TextRequest(run, body, prompts, settings, n, best_of, body.logprobs, echo)


def _chat_request(desk: Desk, body: ChatBody, run: Served, predictor: str | None) -> TextRequest:
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs: set logprobs to true as well", param="top_logprobs")
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in body.messages
    ]
    ids = desk.chat(run, messages)
    desk.check_length(ids, "messages")
    n = body.n
    _check_texts(desk, n)
    tokens = body.max_completion_tokens or body.max_tokens or min(CHAT_TOKENS, desk.limits.max_tokens)
    top = body.top_logprobs or 0
    settings = replace(_settings(desk, run, predictor, body, tokens), top=top)
    prompts = [TokenizedPrompt("", ids, [0] * len(ids), ids)]
    return TextRequest(run, body, prompts, settings, n, n, top if body.logprobs else None, chat=True)


def _settings(desk: Desk, run: Served, predictor: str | None, body: Writing, tokens: int) -> TextSettings:
    """Check what the model of the body cannot, and resolve the options against the run's book."""
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
    values = body.model_dump(include=set(TextOptions.model_fields))
    options = GenerateOptions.checked(predictor=predictor, seed=seed, **values)
    settings = TextSettings.of(options, run.book.model, run.allowed(body.only, body.exclude))
    return replace(settings, max_tokens=tokens)


def _prompts(desk: Desk, run: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[TokenizedPrompt]:
    several: list[Any] = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
    found = []
    for one in several:
        if isinstance(one, str):
            ids, starts = run.tokenize(one)
            desk.check_length(ids, "prompt")
            found.append(TokenizedPrompt(one, ids, starts, ids))
        else:
            run.check_ids(one, "prompt")
            desk.check_length(one, "prompt")
            found.append(TokenizedPrompt.of_ids(run.book.model.lm, one))
    return found


def _check_texts(desk: Desk, count: int) -> None:
    if count > desk.limits.max_texts:
        message = (
            f"this server writes at most {desk.limits.max_texts} texts for a request (prompts times n), got {count}"
        )
        raise Problem(400, message, param="n")
