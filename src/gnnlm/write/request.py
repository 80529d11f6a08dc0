"""From what a caller asks for to written texts with their sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gnnlm.datastore.store import Store
from gnnlm.errors import ConfigError
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.own_past import with_text
from gnnlm.retrieval.index import Allowed
from gnnlm.write.attribution import Generation, Span, Token, sources_of, spans_of
from gnnlm.write.batch_loop import Writer
from gnnlm.write.drafter import Costs, Drafter
from gnnlm.write.generate_options import GenerateOptions
from gnnlm.write.text_state import TextSettings, Writing, Written


class Pen:
    """Writes with one open book; remembers the store's suffixes and how long steps take."""

    def __init__(self, model: OpenBook, before: Pen | None = None) -> None:
        """`before` writes with the same model, over the first segments of its store."""
        self.model = model
        self.drafter: Drafter = Drafter(model.store, None if before is None else before.drafter)
        self.costs: dict[str, Costs] = {} if before is None else before.costs

    def writer(self, predictor: str) -> Writer:
        return Writer(self.model, predictor, self.drafter, self.costs.setdefault(predictor, Costs()))

    def generate(
        self, options: GenerateOptions, prompts: Sequence[Sequence[int]], allowed: Allowed | None
    ) -> list[Generation]:
        """The texts of all prompts, n for each, in the order of the prompts."""
        settings = TextSettings.of(options, self.model, allowed)
        writer = self.writer(settings.predictor)
        found = [writer.add(prompt, settings, options.n) for prompt in prompts]
        while writer.busy:
            writer.step()
        return [self.finished(writing, options.sources) for writings in found for writing in writings]

    def stream(self, options: GenerateOptions, prompt: Sequence[int], allowed: Allowed | None) -> Stream:
        if options.n > 1:
            raise ConfigError(f"n: stream writes one text, got {options.n}; use generate for more")
        return Stream(self, prompt, TextSettings.of(options, self.model, allowed))

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
        return with_text(store, self.model.lm, tokens) if writing.settings.options.own_past else store

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

    def __init__(self, pen: Pen, prompt: Sequence[int], settings: TextSettings) -> None:
        self._pen, self._prompt, self._settings = pen, prompt, settings
        self._writer = pen.writer(settings.predictor)
        self.writing: Writing | None = None

    def __iter__(self) -> Iterator[str]:
        (self.writing,) = self._writer.add(self._prompt, self._settings)
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
        return self._pen.finished(self.writing, self._settings.options.sources)
