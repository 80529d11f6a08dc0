"""From what a caller asks for to written texts with their sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from gnnlm.errors import ConfigError
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.pointers import Pointers
from gnnlm.retrieval.index import Allowed
from gnnlm.write.beam import search_beams
from gnnlm.write.draft import Costs, Drafter
from gnnlm.write.loop import Order, Writer, Writing
from gnnlm.write.sampling import Sampling
from gnnlm.write.sources import SHOWN, Generation, Token, sources_of, spans_of

MOST = {"max_tokens": 1_000_000, "n": 1024, "beams": 256}
SEARCHES = ("exact", "pointers")


@dataclass(frozen=True)
class Request:
    """What can be asked of `Book.generate`, beside the fields of `Sampling`; see there."""

    sampling: Sampling = field(default_factory=Sampling)
    predictor: str | None = None
    max_tokens: int = 64
    stop: str | Sequence[str] = ()
    n: int = 1
    beams: int = 1
    draft: bool = True
    search: str | Pointers = "exact"
    sources: int = SHOWN

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name}: expected a whole number from 1 to {most:,}, got {value!r}")
        if isinstance(self.sources, bool) or not isinstance(self.sources, int) or self.sources < 0:
            raise ConfigError(f"sources: expected a whole number of at least 0, got {self.sources!r}")
        if not isinstance(self.search, Pointers) and self.search not in SEARCHES:
            raise ConfigError(f"search: expected {' or '.join(SEARCHES)}, got {self.search!r}")
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError(f"stop: expected strings that are not empty, got {self.stop!r}")
        if self.beams > 1 and self.sampling.temperature:
            raise ConfigError("beams: beam search does not sample; use temperature 0, or 1 beam")
        if self.beams > 1 and self.sampling.repetition_penalty != 1.0:
            raise ConfigError("beams: beam search takes no repetition_penalty")
        if self.beams > 1 and self.n > self.beams:
            raise ConfigError(
                f"n: beam search finds at most as many texts as it has beams ({self.beams}), got {self.n}"
            )

    def order(self, model: OpenBook, allowed: Allowed | None) -> Order:
        name = self.predictor or model.predictor.names[-1]
        model.predictor.check((name,))
        pointers = self.search if isinstance(self.search, Pointers) else Pointers() if self.search != "exact" else None
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Order(name, self.sampling, self.max_tokens, stop, self.draft, allowed, pointers)


def request(**options: Any) -> Request:
    """A request from options by name; a name that does not exist is refused with those that do."""
    sampling = {each.name for each in fields(Sampling)}
    own = {each.name for each in fields(Request)} - {"sampling"}
    for name in options:
        if name not in sampling | own:
            known = ", ".join(sorted(sampling | own))
            raise ConfigError(f"no option named {name!r}; there are {known}, only, exclude and chat")
    chosen = Sampling(**{name: value for name, value in options.items() if name in sampling})
    return Request(chosen, **{name: value for name, value in options.items() if name in own})


class Pen:
    """Writes with one open book; remembers the store's suffixes and how long steps take."""

    def __init__(self, model: OpenBook) -> None:
        self.model, self.drafter, self.costs = model, Drafter(model.store), dict[str, Costs]()

    def writer(self, order: Order) -> Writer:
        return Writer(self.model, order, self.drafter, self.costs.setdefault(order.predictor, Costs()))

    def generate(self, asked: Request, prompts: Sequence[Sequence[int]], allowed: Allowed | None) -> list[Generation]:
        """The texts of all prompts, n for each, in the order of the prompts."""
        order = asked.order(self.model, allowed)
        if asked.beams > 1:
            found = [
                writing
                for prompt in prompts
                for writing in search_beams(self.writer(order), prompt, asked.beams, asked.n)
            ]
        else:
            writer = self.writer(order)
            found = writer.begin(prompts, asked.n)
            while writer.active:
                writer.step()
        return [self.finished(writing, asked.sources) for writing in found]

    def stream(self, asked: Request, prompt: Sequence[int], allowed: Allowed | None) -> Stream:
        if asked.n > 1 or asked.beams > 1:
            raise ConfigError("stream writes one text, without beams; use generate for more")
        return Stream(self, asked, prompt, asked.order(self.model, allowed))

    @torch.inference_mode()
    def finished(self, writing: Writing, sources: int) -> Generation:
        """A text with the sources of every token."""
        lm, store = self.model.lm, self.model.store
        writing.stream.finish()
        text, offsets = writing.stream.text, [*writing.stream.offsets]
        kept = [place for place, offset in enumerate(offsets) if offset < len(text) or not writing.stream.stopped]
        records = [writing.tokens[place] for place in kept]
        starts = [offsets[place] for place in kept]
        pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        if len(writing.tokens) > len(offsets):  # an end token, which has no text
            records, pieces = [*records, writing.tokens[-1]], [*pieces, ""]
        base = []
        if records:
            states = torch.stack([record.base_state for record in records])
            ids = torch.tensor([record.id for record in records], device=states.device)
            base = lm.head.target_log_probs(states, ids).tolist()
        tokens = [
            Token(
                piece,
                record.id,
                record.log_prob,
                base_log_prob,
                min(1.0, float(record.voters.share.double().sum())),
                sources_of(record, store, sources),
            )
            for record, piece, base_log_prob in zip(records, pieces, base, strict=True)
        ]
        return Generation(
            text,
            writing.finish_reason or "interrupted",
            tokens,
            spans_of(records, pieces, store),
            writing.steps,
            writing.drafted,
            writing.accepted,
            writing.searches,
            writing.seconds,
        )


class Stream:
    """A text as it is written: iterating gives pieces of it, whole characters; then `generation` has everything."""

    def __init__(self, pen: Pen, asked: Request, prompt: Sequence[int], order: Order) -> None:
        self._pen, self._asked, self._prompt = pen, asked, prompt
        self._writer = pen.writer(order)
        self.writing: Writing | None = None

    def __iter__(self) -> Iterator[str]:
        (self.writing,) = self._writer.begin([self._prompt])
        yield from self._new()
        while self._writer.active:
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
