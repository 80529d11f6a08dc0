"""Requests in progress, and what they are told of their texts: new tokens, and in the end how a text ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gnnlm.serve.api_errors import ApiError
from gnnlm.serve.runs import ServedRun
from gnnlm.write.attribution import copied_spans, described_tokens
from gnnlm.write.batch_loop import Writer
from gnnlm.write.text_state import ScoredToken, TextSettings, TextState
from gnnlm.write.written_text import Span, Token


@dataclass(frozen=True)
class TextPiece:
    """A written token whose text is final, and the character at which it begins."""

    text: str
    start: int
    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TextUpdate:
    """What is new of one text of a request, and what the text has taken so far."""

    number: int
    pieces: Sequence[TextPiece]
    tokens: Sequence[Token]  # the same with their sources, if those are asked for
    scored: Sequence[ScoredToken]  # the prompt's tokens, with the first update, if they are asked for
    steps: int
    drafted: int
    accepted: int
    searches: int
    seconds: float
    written: int  # tokens so far, those behind a stop string included
    finish_reason: str | None  # with the last update
    spans: Sequence[Span]  # with the last update

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(eq=False)
class QueuedRequest:
    """A request to write n texts for each prompt. `sources` is how many each token shows; None: no details at all."""

    run: ServedRun
    prompts: Sequence[Sequence[int]]
    settings: TextSettings
    n: int
    sources: int | None
    stream: bool
    deliver: Callable[[TextUpdate | ApiError], None]  # called by the worker's thread
    began: float = field(default_factory=time.monotonic)
    prompts_begun: int = 0
    first_token: bool = False  # whether a text has a token
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.unfinished = len(self.prompts) * self.n

    @property
    def model(self) -> str:
        return f"{self.run.name}:{self.settings.predictor}"


@dataclass(eq=False)
class ActiveText:
    """A text of a request while it is written."""

    request: QueuedRequest
    number: int
    state: TextState
    writer: Writer
    delivered: int = 0  # tokens
    updated: bool = False

    def new_places(self) -> range | None:
        """Return the places of tokens to deliver; None if no update is due.

        A stream is told of every token whose text is final, other requests only of finished texts.
        """
        detokenizer = self.state.detokenizer
        if self.state.finish_reason is not None:
            detokenizer.finish()
            ends = len(self.state.tokens) - len(detokenizer.offsets)  # an end token has no text
            return range(self.delivered, max(self.delivered, detokenizer.kept + ends))
        if not self.request.stream or detokenizer.settled == self.delivered:
            return None
        return range(self.delivered, detokenizer.settled)

    def update(self, places: range, tokens: Sequence[Token]) -> TextUpdate:
        """Return what is new, which is then delivered."""
        state = self.state
        detokenizer = state.detokenizer
        pieces = []
        for place in places:
            token = state.tokens[place]
            start = detokenizer.offsets[place] if place < len(detokenizer.offsets) else len(detokenizer.text)
            pieces.append(TextPiece(detokenizer.piece(place), start, token.id, token.log_prob, token.top))
        spans: Sequence[Span] = ()
        if state.finish_reason is not None and self.request.sources is not None:
            spans = copied_spans(self.request.run.book.model, state, places.stop)
        update = TextUpdate(
            number=self.number,
            pieces=pieces,
            tokens=tokens,
            scored=() if self.updated else state.scored,
            steps=state.steps,
            drafted=state.drafted,
            accepted=state.accepted,
            searches=state.searches,
            seconds=state.seconds,
            written=len(state.tokens),
            finish_reason=state.finish_reason,
            spans=spans,
        )
        self.delivered = places.stop
        self.updated = True
        return update


def updates_of(texts: Sequence[ActiveText]) -> list[tuple[ActiveText, TextUpdate]]:
    """Return what is new of texts of one run; the sources of all of them are looked up together."""
    new = [(text, places) for text in texts if (places := text.new_places()) is not None]
    sourced = [(text, places) for text, places in new if text.request.sources is not None]
    tokens: dict[ActiveText, list[Token]] = {}
    if sourced:
        most = max(text.request.sources or 0 for text, _ in sourced)
        model = sourced[0][0].request.run.book.model
        found = described_tokens(model, [(text.state, places) for text, places in sourced], most)
        for (text, _), line in zip(sourced, found, strict=True):
            tokens[text] = [replace(token, sources=token.sources[: text.request.sources]) for token in line]
    return [(text, text.update(places, tokens.get(text, []))) for text, places in new]
