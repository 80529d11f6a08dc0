"""Written texts in the wire format of OpenAI's API: choices, chunks, log-probabilities, and our fields."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from gnnlm.serve.text_updates import TextPiece, TextUpdate
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


def details(update: TextUpdate) -> OpenBookDetails:
    """Return shares, sources and counts, and with the end of a text its spans."""
    tokens = [
        replace(token, log_prob=finite(token.log_prob), base_log_prob=finite(token.base_log_prob))
        for token in update.tokens
    ]
    found = OpenBookDetails(
        tokens=tokens,
        steps=update.steps,
        drafted=update.drafted,
        accepted=update.accepted,
        searches=update.searches,
        seconds=update.seconds,
    )
    if update.finish_reason is not None:
        found.spans = [CopiedSpan.of(span) for span in update.spans]
    return found


def mean_log_prob(update: TextUpdate) -> float:
    """Return the mean log-probability of a finished text's tokens, by which `best_of` chooses."""
    return sum(finite(piece.log_prob) for piece in update.pieces) / max(1, len(update.pieces))


# -- completions -----------------------------------------------------------------------------------------------


def completion_choice(
    index: int, lm: BaseLM, update: TextUpdate, top: int | None, echoed: TokenizedPrompt | None
) -> CompletionChoice:
    """Return what is new of a completion, behind the prompt if that is `echoed`."""
    return CompletionChoice(
        index=index,
        finish_reason=update.finish_reason,
        logprobs=None if top is None else completion_logprobs(lm, update, top, echoed),
        text=update.text if echoed is None else echoed.text + update.text,
    )


def completion_logprobs(lm: BaseLM, update: TextUpdate, top: int, echoed: TokenizedPrompt | None) -> CompletionLogprobs:
    """Return lists over tokens, those of an `echoed` prompt first. The very first token has no value."""
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[ScoredToken | TextPiece | None] = []
    before = 0
    if echoed is not None:
        before = len(echoed.text)
        tokens += echoed.pieces
        offsets += echoed.starts
        values += [None] * (len(echoed.ids) - len(update.scored))  # a start token, which nothing predicts
        values += update.scored
        if values:
            values[0] = None
    tokens += [piece.text for piece in update.pieces]
    offsets += [before + piece.start for piece in update.pieces]
    values += update.pieces
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if one is None else finite(one.log_prob) for one in values],
        top_logprobs=[None if one is None else _top_pieces(lm, one) for one in values] if top else None,
        text_offset=offsets,
    )


def _top_pieces(lm: BaseLM, token: ScoredToken | TextPiece) -> dict[str, float]:
    """Return the likeliest tokens and the token itself; of tokens with equal text, only the likeliest."""
    found: dict[str, float] = {}
    for one, value in [*token.top, (token.id, token.log_prob)]:
        found.setdefault(lm.piece(one), finite(value))
    return found


# -- chat completions ------------------------------------------------------------------------------------------


def chat_choice(index: int, lm: BaseLM, update: TextUpdate, top: int | None) -> ChatChoice:
    """Return a choice, without its message or delta."""
    return ChatChoice(
        index=index,
        finish_reason=update.finish_reason,
        logprobs=None if top is None else chat_logprobs(lm, update.pieces, top),
    )


def chat_delta(update: TextUpdate, first: bool) -> ChatDelta:
    """Return what a chunk adds to a message; nothing in the last one."""
    delta = ChatDelta()
    if first:
        delta.role = "assistant"
    if update.finish_reason is None:
        delta.content = update.text
    return delta


def chat_logprobs(lm: BaseLM, pieces: Sequence[TextPiece], top: int) -> ChatLogprobs:
    content = []
    for piece in pieces:
        likeliest = [
            TokenLogprob(token=lm.piece(token), logprob=finite(value), bytes=list(lm.bytes_of(token)))
            for token, value in piece.top[:top]
        ]
        content.append(
            ChatTokenLogprob(
                token=piece.text,
                logprob=finite(piece.log_prob),
                bytes=list(lm.bytes_of(piece.id)),
                top_logprobs=likeliest,
            )
        )
    return ChatLogprobs(content=content, refusal=None)
