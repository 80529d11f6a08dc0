"""Texts in the wire format of OpenAI's API: choices, chunks, log-probabilities, and what we add to them."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gnnlm.lm.base_lm import BaseLM
from gnnlm.serve.api_errors import finite
from gnnlm.serve.worker import Counts, Ending, News, Record
from gnnlm.write.attribution import Token
from gnnlm.write.text_state import Scored


@dataclass(frozen=True)
class Given:
    """A prompt as it was given: its text, its tokens, and the character at which each begins.

    `read` is what the model reads as the text. If the ids begin with the model's start token, that is the one which it
    reads before every text anyway, and so it is not read twice.
    """

    text: str
    ids: Sequence[int]
    starts: Sequence[int]
    read: Sequence[int]

    @classmethod
    def of_ids(cls, lm: BaseLM, ids: Sequence[int]) -> Given:
        decoder, starts, count = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
        for token in ids:
            starts.append(count)
            count += len(decoder.decode(lm.bytes_of(token)))
        text = lm.detokenize(list(ids)) if ids else ""
        return cls(text, ids, [min(start, len(text)) for start in starts], ids[1:] if _starts(lm, ids) else ids)

    @property
    def pieces(self) -> list[str]:
        ends = [*self.starts[1:], len(self.text)]
        return [self.text[start:end] for start, end in zip(self.starts, ends, strict=True)]


def _starts(lm: BaseLM, ids: Sequence[int]) -> bool:
    return bool(ids) and ids[0] == lm.start_token


@dataclass
class Text:
    """A text as its news come in."""

    records: list[Record] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    counts: Counts | None = None
    ending: Ending | None = None

    def add(self, news: News) -> None:
        self.records += news.records
        self.tokens += news.tokens
        self.scored += news.scored
        self.counts, self.ending = news.counts, news.ending or self.ending

    @property
    def text(self) -> str:
        return "".join(record.text for record in self.records)

    @property
    def mean(self) -> float:
        """The mean log-probability of its tokens, by which `best_of` chooses."""
        return sum(finite(record.log_prob) for record in self.records) / max(1, len(self.records))


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every object of an answer begins with."""
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def details(tokens: Sequence[Token], counts: Counts, ending: Ending | None) -> dict[str, Any]:
    """What only an open book has: shares, sources and, at the end, spans; and what the text has taken so far."""
    shown: dict[str, Any] = {"tokens": [token_json(token) for token in tokens], **asdict(counts)}
    if ending is not None:
        shown["spans"] = [
            {**asdict(span), "tokens": span.tokens, "characters": span.end - span.start} for span in ending.spans
        ]
    return shown


def token_json(token: Token) -> dict[str, Any]:
    values = asdict(token)
    return {**values, "log_prob": finite(token.log_prob), "base_log_prob": finite(token.base_log_prob)}


# -- log-probabilities of completions ------------------------------------------------------------------------


def legacy_logprobs(
    lm: BaseLM, records: Sequence[Record], top: int, given: Given | None = None, scored: Sequence[Scored] = ()
) -> dict[str, Any]:
    """Parallel lists over tokens; with `given`, those of the prompt come first, the very first without a value."""
    tokens: list[str] = []
    log_probs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    before = 0
    if given is not None:
        before = len(given.text)
        tokens += given.pieces
        offsets += given.starts
        known = [(one.log_prob, one.id, one.top) for one in scored]
        unknown = len(given.ids) - len(known)  # a start token, which nothing predicts
        for place in range(len(given.ids)):
            if place == 0 or place < unknown:
                log_probs.append(None)
                tops.append(None)
            else:
                log_prob, token, best = known[place - unknown]
                log_probs.append(finite(log_prob))
                tops.append(_top(lm, token, log_prob, best) if top else None)
    for record in records:
        tokens.append(record.text)
        offsets.append(before + record.start)
        log_probs.append(finite(record.log_prob))
        tops.append(_top(lm, record.id, record.log_prob, record.top) if top else None)
    return {
        "tokens": tokens,
        "token_logprobs": log_probs,
        "top_logprobs": tops if top else None,
        "text_offset": offsets,
    }


def _top(lm: BaseLM, token: int, log_prob: float, best: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The likeliest tokens, and the one that is there; tokens that look alike are shown once, as the likeliest."""
    found: dict[str, float] = {}
    for one, value in [*best, (token, log_prob)]:
        found.setdefault(lm.piece(one), finite(value))
    return found


# -- log-probabilities of chats --------------------------------------------------------------------------------


def chat_logprobs(lm: BaseLM, records: Sequence[Record], top: int) -> dict[str, Any]:
    content = [
        {
            **_chat_token(lm, record.id, record.log_prob, record.text),
            "top_logprobs": [_chat_token(lm, token, value, lm.piece(token)) for token, value in record.top[:top]],
        }
        for record in records
    ]
    return {"content": content, "refusal": None}


def _chat_token(lm: BaseLM, token: int, log_prob: float, text: str) -> Mapping[str, Any]:
    return {"token": text, "logprob": finite(log_prob), "bytes": list(lm.bytes_of(token))}
