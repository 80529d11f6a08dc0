"""A request for texts: from a body that has been validated to what the worker writes, and to the choices of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gnnlm.serve import openai
from gnnlm.serve.api_errors import ApiError
from gnnlm.serve.context import ServerContext
from gnnlm.serve.openai import TokenizedPrompt
from gnnlm.serve.requests import ChatBody, CompletionBody, TextBody
from gnnlm.serve.responses import ChatChoice, ChatCompletion, ChatMessage, Completion, CompletionChoice, Usage
from gnnlm.serve.runs import ServedRun
from gnnlm.serve.text_updates import TextUpdate
from gnnlm.write.text_state import TextSettings

CHAT_TOKENS = 512  # written if a chat does not say how many


@dataclass(frozen=True)
class TextRequest:
    """Prompts of a run, with `n` texts shown for each of them, the likeliest of `best_of`.

    `logprobs` is how many likely tokens are shown beside each one; None: no log-probabilities at all.
    """

    run: ServedRun
    body: TextBody
    prompts: Sequence[TokenizedPrompt]
    settings: TextSettings
    best_of: int
    logprobs: int | None
    echo: bool = False
    chat: bool = False

    @classmethod
    def of_completion(
        cls, context: ServerContext, body: CompletionBody, run: ServedRun, predictor: str | None
    ) -> TextRequest:
        prompts = _prompts(context, run, body.prompt)
        best_of = body.best_of or body.n
        _check_texts(context, len(prompts) * best_of)
        scored = body.echo and body.logprobs is not None
        settings = _settings(context, run, predictor, body, body.max_tokens)
        settings = replace(settings, top=body.logprobs or 0, scored=scored)
        return cls(run, body, prompts, settings, best_of, body.logprobs, body.echo)

    @classmethod
    def of_chat(cls, context: ServerContext, body: ChatBody, run: ServedRun, predictor: str | None) -> TextRequest:
        messages = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in body.messages
        ]
        ids = run.book.model.lm.chat(messages)
        context.check_length(ids, "messages")
        _check_texts(context, body.n)
        default = min(CHAT_TOKENS, context.limits.max_tokens)
        settings = _settings(context, run, predictor, body, body.max_completion_tokens or body.max_tokens or default)
        top = body.top_logprobs or 0
        prompts = [TokenizedPrompt("", ids, [0] * len(ids), ids)]
        settings = replace(settings, top=top)
        return cls(run, body, prompts, settings, body.n, top if body.logprobs else None, chat=True)

    def envelope(self) -> dict[str, Any]:
        """Return the first fields of the answer, which all chunks of a stream share."""
        if not self.chat:
            return openai.envelope("text_completion", "cmpl", self.body.model)
        kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        return openai.envelope(kind, "chatcmpl", self.body.model)

    def choice(self, number: int, update: TextUpdate, first: bool = True) -> CompletionChoice | ChatChoice:
        """Return what is new of a text; without `stream`, that is all of it."""
        lm = self.run.book.model.lm
        choice: CompletionChoice | ChatChoice
        if not self.chat:
            echoed = self.prompts[number // self.body.n] if self.echo and first else None
            choice = openai.completion_choice(number, lm, update, self.logprobs, echoed)
        else:
            choice = openai.chat_choice(number, lm, update, self.logprobs)
            if self.body.stream:
                choice.delta = openai.chat_delta(update, first)
            else:
                choice.message = ChatMessage(role="assistant", content=update.text, refusal=None)
        if self.body.sources is not None:
            choice.gnnlm = openai.details(update)
        return choice

    def answer(
        self, head: dict[str, Any], choices: Sequence[Any], **usage: Usage | None
    ) -> Completion | ChatCompletion:
        """Return an answer or a chunk; without `usage`, the field is left out."""
        kind = ChatCompletion if self.chat else Completion
        return kind(**head, choices=list(choices), **usage)

    def usage(self, written: int) -> Usage:
        return Usage.of(sum(len(prompt.ids) for prompt in self.prompts), written)


def _settings(
    context: ServerContext, run: ServedRun, predictor: str | None, body: TextBody, tokens: int
) -> TextSettings:
    if tokens > context.limits.max_tokens:
        message = f"max_tokens: this server writes at most {context.limits.max_tokens:,} tokens, got {tokens:,}"
        raise ApiError(400, message, param="max_tokens")
    settings = TextSettings.of(body.options(predictor), run.book.model, run.allowed(body.only, body.exclude))
    return replace(settings, max_tokens=tokens)


def _prompts(
    context: ServerContext, run: ServedRun, prompt: str | list[str] | list[int] | list[list[int]]
) -> list[TokenizedPrompt]:
    several: list[Any] = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
    found = []
    for one in several:
        if isinstance(one, str):
            ids, starts = run.tokenize(one)
            context.check_length(ids, "prompt")
            found.append(TokenizedPrompt(one, ids, starts, ids))
        else:
            run.check_ids(one, "prompt")
            context.check_length(one, "prompt")
            found.append(TokenizedPrompt.of_ids(run.book.model.lm, one))
    return found


def _check_texts(context: ServerContext, count: int) -> None:
    most = context.limits.max_texts
    if count > most:
        message = f"this server writes at most {most} texts for a request (prompts times n), got {count}"
        raise ApiError(400, message, param="n")
