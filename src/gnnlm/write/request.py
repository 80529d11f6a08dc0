"""From what a caller asks for to written texts with their sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from gnnlm.datastore.store import Store
from gnnlm.errors import ConfigError
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.own_past import with_text
from gnnlm.retrieval.index import Allowed
from gnnlm.write.attribution import SHOWN, Generation, Span, Token, sources_of, spans_of
from gnnlm.write.batch_loop import Writer
from gnnlm.write.drafter import Costs, Drafter
from gnnlm.write.sampling import Sampling
from gnnlm.write.text_state import Order, Writing, Written

MOST = {"max_tokens": 1_000_000, "n": 1024}


@dataclass(frozen=True)
class Request:
    """What can be asked of `Book.generate`, beside the fields of `Sampling`; see there."""

    sampling: Sampling = field(default_factory=Sampling)
    predictor: str | None = None
    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    n: int = 1
    draft: bool = True
    sources: int = SHOWN
    own_past: bool = False

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name}: expected a whole number from 1 to {most:,}, got {value!r}")
        if isinstance(self.sources, bool) or not isinstance(self.sources, int) or self.sources < 0:
            raise ConfigError(f"sources: expected a whole number of at least 0, got {self.sources!r}")
        if not isinstance(self.own_past, bool):
            raise ConfigError(f"own_past: expected true or false, got {self.own_past!r}")
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError(f"stop: expected strings that are not empty, got {self.stop!r}")

    def order(self, model: OpenBook, allowed: Allowed | None) -> Order:
        name = self.predictor or model.predictor.names[-1]
        model.predictor.check((name,))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Order(name, self.sampling, self.max_tokens, stop, self.draft, allowed, own_past=self.own_past)


def request(**options: Any) -> Request:
    """A request from options by name; a name that does not exist is refused with those that do."""
    sampling = {each.name for each in fields(Sampling)}
    own = {each.name for each in fields(Request)} - {"sampling"}
    for name in options:
        if name not in sampling | own:
            known = ", ".join(sorted(sampling | own))
            raise ConfigError(f"no option named {name!r}; there are {known}, only, exclude, chat and attach")
    chosen = Sampling(**{name: value for name, value in options.items() if name in sampling})
    return Request(chosen, **{name: value for name, value in options.items() if name in own})


class Pen:
    """Writes with one open book; remembers the store's suffixes and how long steps take."""

    def __init__(self, model: OpenBook, before: Pen | None = None) -> None:
        """`before` writes with the same model, over the first segments of its store."""
        self.model = model
        self.drafter: Drafter = Drafter(model.store, None if before is None else before.drafter)
        self.costs: dict[str, Costs] = {} if before is None else before.costs

    def writer(self, predictor: str) -> Writer:
        return Writer(self.model, predictor, self.drafter, self.costs.setdefault(predictor, Costs()))

    def generate(self, asked: Request, prompts: Sequence[Sequence[int]], allowed: Allowed | None) -> list[Generation]:
        """The texts of all prompts, n for each, in the order of the prompts."""
        order = asked.order(self.model, allowed)
        writer = self.writer(order.predictor)
        found = [writer.add(prompt, order, asked.n) for prompt in prompts]
        while writer.busy:
            writer.step()
        return [self.finished(writing, asked.sources) for writings in found for writing in writings]

    def stream(self, asked: Request, prompt: Sequence[int], allowed: Allowed | None) -> Stream:
        if asked.n > 1:
            raise ConfigError(f"n: stream writes one text, got {asked.n}; use generate for more")
        return Stream(self, asked, prompt, asked.order(self.model, allowed))

    def finished(self, writing: Writing, sources: int) -> Generation:
        """A text with the sources of every token."""
        writing.stream.finish()
        ends = len(writing.tokens) - len(writing.stream.offsets)  # an end token has no text
        (tokens,) = self.tokens([(writing, range(writing.stream.kept + ends))], sources)
        return Generation(
            writing.stream.text,
            writing.finish_reason or "interrupted",
            tokens,
            self.spans(writing, len(tokens)),
            writing.steps,
            writing.drafted,
            writing.accepted,
            writing.searches,
            writing.seconds,
        )

    def spans(self, writing: Writing, count: int) -> list[Span]:
        """The passages that the first tokens of a text follow."""
        pieces = [writing.stream.piece(place) for place in range(count)]
        return spans_of(writing.tokens[:count], pieces, self.cited(writing))

    def cited(self, writing: Writing) -> Store:
        """The store that the sources of a text are in, and the text itself if it is looked up."""
        store, tokens = self.model.store, [*writing.prompt, *writing.ids]
        return with_text(store, self.model.lm, tokens) if writing.order.own_past else store

    def tokens(self, parts: Sequence[tuple[Writing, range]], sources: int) -> list[list[Token]]:
        """Some tokens of each text, with their sources."""
        pieces = [[writing.stream.piece(place) for place in places] for writing, places in parts]
        records = [[writing.tokens[place] for place in places] for writing, places in parts]
        stores = [self.cited(writing) for writing, _ in parts]
        return self.described(records, pieces, stores, sources)

    @torch.inference_mode()
    def described(
        self,
        records: Sequence[Sequence[Written]],
        pieces: Sequence[Sequence[str]],
        stores: Sequence[Store],
        sources: int,
    ) -> list[list[Token]]:
        """Records of tokens with their texts and sources, and with what the base model alone thinks of them."""
        every = [record for some in records for record in some]
        base: list[float] = []
        if every:  # one pass of the softmax for all texts
            states = torch.stack([record.base_state for record in every])
            ids = torch.tensor([record.id for record in every], device=states.device)
            base = self.model.lm.head.target_log_probs(states, ids).tolist()
        opinions = iter(base)
        return [
            [
                Token(
                    piece,
                    record.id,
                    record.log_prob,
                    next(opinions),
                    min(1.0, float(record.voters.share.double().sum())),
                    sources_of(record, store, sources),
                )
                for record, piece in zip(some, texts, strict=True)
            ]
            for some, texts, store in zip(records, pieces, stores, strict=True)
        ]


class Stream:
    """A text as it is written: iterating gives pieces of it, whole characters; then `generation` has everything."""

    def __init__(self, pen: Pen, asked: Request, prompt: Sequence[int], order: Order) -> None:
        self._pen, self._asked, self._prompt = pen, asked, prompt
        self._writer = pen.writer(order.predictor)
        self._order = order
        self.writing: Writing | None = None

    def __iter__(self) -> Iterator[str]:
        (self.writing,) = self._writer.add(self._prompt, self._order)
        while self._writer.busy:
            self._writer.step()
            yield from self._new()
        rest = self.writing.stream.finish()
        if rest:
            yield rest

    def _new(self) -> Iterator[str]:
        assert self.writing is not None
        new = self.writing.stream.new()
        if new:
            yield new

    @property
    def generation(self) -> Generation:
        """The text so far, with its sources; `finish_reason` is `interrupted` if it is not finished."""
        if self.writing is None:
            raise ConfigError("nothing has been written yet; iterate over the stream first")
        return self._pen.finished(self.writing, self._asked.sources)
