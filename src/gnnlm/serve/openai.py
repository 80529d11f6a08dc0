"""Written texts in the wire format of OpenAI's API: choices, chunks, log-probabilities, and our fields."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gnnlm.lm.base_lm import BaseLM
from gnnlm.serve.api_errors import finite
from gnnlm.serve.responses import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    CopiedSpan,
    OpenBookDetails,
    TokenLogprob,
)
from gnnlm.serve.worker import News, Record
from gnnlm.write.text_state import ScoredToken


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt: its text, its tokens, and the character at which each token begins.

    `read` is what the model reads as the text. If the ids begin with the model's start token, `read` is without it: the
    model reads a start token before every text anyway.
    """

    text: str
    ids: Sequence[int]
    starts: Sequence[int]
    read: Sequence[int]

    @classmethod
    def of_ids(cls, lm: BaseLM, ids: Sequence[int]) -> TokenizedPrompt:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts = []
        count = 0
        for token in ids:
            starts.append(count)
            count += len(decoder.decode(lm.bytes_of(token)))
        text = lm.detokenize(list(ids)) if ids else ""
        has_start = bool(ids) and ids[0] == lm.start_token
        return cls(text, ids, [min(start, len(text)) for start in starts], ids[1:] if has_start else ids)

    @property
    def pieces(self) -> list[str]:
        ends = [*self.starts[1:], len(self.text)]
        return [self.text[start:end] for start, end in zip(self.starts, ends, strict=True)]


def envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return the first fields of an answer or a chunk."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def details(news: News) -> OpenBookDetails:
    """Return shares, sources and counts, and with the end of a text its spans."""
    tokens = [
        replace(token, log_prob=finite(token.log_prob), base_log_prob=finite(token.base_log_prob))
        for token in news.tokens
    ]
    found = OpenBookDetails(tokens=tokens, **asdict(news.counts))
    if news.ending is not None:
        found.spans = [CopiedSpan.of(span) for span in news.ending.spans]
    return found


def text_of(news: News) -> str:
    return "".join(record.text for record in news.records)


def mean_log_prob(news: News) -> float:
    """The mean log-probability of a text's tokens, by which `best_of` chooses."""
    return sum(finite(record.log_prob) for record in news.records) / max(1, len(news.records))


# -- completions -----------------------------------------------------------------------------------------------


def completion_choice(
    index: int, lm: BaseLM, news: News, top: int | None, echoed: TokenizedPrompt | None
) -> CompletionChoice:
    """Return what is new of a completion, behind the prompt if that is `echoed`."""
    text = text_of(news)
    return CompletionChoice(
        index=index,
        finish_reason=None if news.ending is None else news.ending.reason,
        logprobs=None if top is None else completion_logprobs(lm, news, top, echoed),
        text=text if echoed is None else echoed.text + text,
    )


def completion_logprobs(lm: BaseLM, news: News, top: int, echoed: TokenizedPrompt | None) -> CompletionLogprobs:
    """Return lists over tokens, those of an `echoed` prompt first. The very first token has no value."""
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[ScoredToken | Record | None] = []
    before = 0
    if echoed is not None:
        before = len(echoed.text)
        tokens += echoed.pieces
        offsets += echoed.starts
        values += [None] * (len(echoed.ids) - len(news.scored))  # a start token, which nothing predicts
        values += news.scored
        if values:
            values[0] = None
    tokens += [record.text for record in news.records]
    offsets += [before + record.start for record in news.records]
    values += news.records
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if one is None else finite(one.log_prob) for one in values],
        top_logprobs=[None if one is None else _top_pieces(lm, one) for one in values] if top else None,
        text_offset=offsets,
    )


def _top_pieces(lm: BaseLM, token: ScoredToken | Record) -> dict[str, float]:
    """Return the likeliest tokens and the token itself; of tokens with equal text, only the likeliest."""
    found: dict[str, float] = {}
    for one, value in [*token.top, (token.id, token.log_prob)]:
        found.setdefault(lm.piece(one), finite(value))
    return found


# -- chat completions ------------------------------------------------------------------------------------------


def chat_choice(index: int, lm: BaseLM, news: News, top: int | None) -> ChatChoice:
    """Return a choice, without its message or delta."""
    return ChatChoice(
        index=index,
        finish_reason=None if news.ending is None else news.ending.reason,
        logprobs=None if top is None else chat_logprobs(lm, news.records, top),
    )


def chat_delta(news: News, first: bool) -> ChatDelta:
    """Return what a chunk adds to a message; nothing in the last one."""
    delta = ChatDelta()
    if first:
        delta.role = "assistant"
    if news.ending is None:
        delta.content = text_of(news)
    return delta


def chat_logprobs(lm: BaseLM, records: Sequence[Record], top: int) -> ChatLogprobs:
    content = []
    for record in records:
        likeliest = [
            TokenLogprob(token=lm.piece(token), logprob=finite(value), bytes=list(lm.bytes_of(token)))
            for token, value in record.top[:top]
        ]
        content.append(
            ChatTokenLogprob(
                token=record.text,
                logprob=finite(record.log_prob),
                bytes=list(lm.bytes_of(record.id)),
                top_logprobs=likeliest,
            )
        )
    return ChatLogprobs(content=content, refusal=None)
