"""The Python API: text and document names on top of an open-book model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from gnnlm.answers import Attention, DocumentText, Floats, Neighbour, Next, Scores, StoredDocument
from gnnlm.config import load_config
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.datastore.filter import Names, open_documents
from gnnlm.engine import HERE, Engine
from gnnlm.errors import ConfigError, CorpusError
from gnnlm.explain import attention_after, looked_up_documents
from gnnlm.predict.attach import Attachments, attached, taken
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.own_past import with_text
from gnnlm.predict.scoring import Text, TokenizedText, score_texts, tokenized
from gnnlm.progress import warn
from gnnlm.retrieval.index import Allowed
from gnnlm.run import Run
from gnnlm.run.snapshot import Snapshot
from gnnlm.write.attribution import written_text
from gnnlm.write.batch_loop import Writer
from gnnlm.write.drafter import Drafter
from gnnlm.write.generate_options import GenerateOptions
from gnnlm.write.text_state import TextSettings
from gnnlm.write.text_stream import TextStream
from gnnlm.write.written_text import WrittenText


class Book:
    """An open-book model for texts. `gnnlm.open(run)` makes one from a finished run."""

    _model: OpenBook | None = None
    _snapshot: Snapshot | None = None
    _base: Book | None = None

    def __init__(
        self,
        model: OpenBook,
        origin: str = "in memory",
        snapshot: Snapshot | None = None,
        base: Book | None = None,
    ) -> None:
        """`snapshot` is what the book was opened from, `base` the book that this one adds attached documents to."""
        self._model, self.origin, self._snapshot, self._base = model, origin, snapshot, base

    @property
    def model(self) -> OpenBook:
        """The open-book model without texts and document names."""
        if self._model is None:
            raise ConfigError(
                f"the book of {self.origin} is closed; open the run again, or call book.attached again for attached "
                "documents"
            )
        return self._model

    @property
    def generation(self) -> int:
        """The generation of the run's store that is open: 0 is the run as it was built."""
        return 0 if self._snapshot is None else self._snapshot.number

    @property
    def run(self) -> Run | None:
        """The run that the book was opened from; None for one in memory or with attached documents."""
        return None if self._snapshot is None or self._base is not None else self._snapshot.run

    def __contains__(self, name: str) -> bool:
        """Whether a document of this name can be looked up."""
        return name in self._numbers

    def refreshed(self) -> Book:
        """Return a book of the generation that the run serves now; this one, if it has that generation open."""
        newer = None if self.run is None or self._snapshot is None else self._snapshot.newer()
        return self if newer is None else Book(newer.model(), self.origin, newer)

    def refresh(self) -> bool:
        """Move on to the generation that the run serves now; returns whether there was a new one."""
        book = self.refreshed()
        if book is self:
            return False
        self.__dict__ = book.__dict__  # nothing that was computed from the older store stays
        return True

    def close(self) -> None:
        """Let go of everything that is open; a book with attached documents leaves its base open."""
        if self._base is None and self._snapshot is not None and self._snapshot.lease is not None:
            self._snapshot.lease.release()
        self.__dict__ = {"origin": self.origin}

    def __enter__(self) -> Book:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rows = len(self.model.index)
        documents = len(self.model.store.live)
        names = ", ".join(self.predictors)
        return f"<gnnlm.Book {self.origin}: {rows:,} rows of {documents:,} documents; predictors {names}>"

    @property
    def predictors(self) -> tuple[str, ...]:
        """The names of the predictors this book has."""
        return self.model.predictor.names

    @cached_property
    def documents(self) -> list[StoredDocument]:
        """The documents of the store, in its order."""
        store = self.model.store
        tags: dict[int, list[str]] = {}
        sizes = (store.document_starts.diff() - 1).tolist()
        for tag, numbers in sorted(store.tags.items()):
            for number in numbers:
                tags.setdefault(number, []).append(tag)
        return [StoredDocument(store.names[n], sizes[n], tuple(tags.get(n, ()))) for n in store.live]

    def document(self, name: str) -> DocumentText:
        """Return the whole text of a document of the store."""
        if name not in self._numbers:
            raise CorpusError(f"no document of the store is named {name!r}; book.documents lists the names")
        text, offsets = self.model.store.document(self._numbers[name])
        return DocumentText(name, text, offsets)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {self.model.store.names[number]: number for number in self.model.store.live}

    def attached(self, documents: Attachments) -> Book:
        """This book with more documents, which are looked up beside the store's and never written to disk.

        Each is a text file, or a pair (name, text); it is cited as `attached:` and its name, also in filters. They are
        encoded once, for all that is asked of the session: `with book.attached(["notes.txt"]) as session: ...`
        """
        return self.with_documents(taken(self.model, documents))

    def _with(self, attach: Attachments | None) -> Book:
        return self if attach is None else self.attached(attach)

    def with_documents(self, documents: Sequence[TokenizedDocument]) -> Book:
        """See `attached`; the documents are tokenized already."""
        names = ", ".join(document.name for document in documents)
        return Book(attached(self.model, documents), f"{self.origin} and {names}", self._snapshot, self)

    # -- scoring -------------------------------------------------------------------------------------------

    @overload
    def score(
        self,
        texts: Text,
        *,
        predictors: Iterable[str] | None = None,
        only: Names = None,
        exclude: Names = None,
        attach: Attachments | None = None,
        own_past: bool = False,
    ) -> Scores: ...

    @overload
    def score(
        self,
        texts: list[Text],
        *,
        predictors: Iterable[str] | None = None,
        only: Names = None,
        exclude: Names = None,
        attach: Attachments | None = None,
        own_past: bool = False,
    ) -> list[Scores]: ...

    def score(
        self,
        texts: Text | list[Text],
        *,
        predictors: Iterable[str] | None = None,
        only: Names = None,
        exclude: Names = None,
        attach: Attachments | None = None,
        own_past: bool = False,
    ) -> Scores | list[Scores]:
        """Return the log-probability of every token, by predictor, of one text or many.

        A pair (context, continuation) scores the continuation as it follows the context; each is a text or a list of
        token ids. `only` and `exclude` name the documents of the store that may or may not be looked up: names, globs
        of names, or `tag:T` for those with a tag. `attach` names files that are looked up too: see `attached`. With
        `own_past`, a text also looks up its own tokens that the base model no longer sees, cited as `own:text`.
        """
        book = self._with(attach)
        several = texts if isinstance(texts, list) else [texts]
        wanted = book._wanted(predictors)
        tokenized_texts = [TokenizedText.of(book.model, text) for text in several]
        scores = score_texts(book.model, tokenized_texts, wanted, book.allowed(only, exclude), own_past)
        found = [
            Scores(text.pieces, text.ids[text.first :], text.offsets, *values)
            for text, values in zip(tokenized_texts, scores, strict=True)
        ]
        return found if isinstance(texts, list) else found[0]

    # -- looking up ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def neighbors(
        self,
        text: str,
        k: int = 3,
        *,
        only: Names = None,
        exclude: Names = None,
        left: int = 8,
        right: int = 8,
        attach: Attachments | None = None,
        own_past: bool = False,
    ) -> list[list[Neighbour]]:
        """Return, for every token of the text, the k store positions retrieved to predict it, nearest first."""
        book = self._with(attach)
        if k < 1:
            raise ConfigError(f"neighbors: k must be at least 1 (got {k})")
        ids = TokenizedText.of(book.model, text).ids
        allowed = book.allowed(only, exclude)
        store = with_text(book.model.store, book.model.lm, ids) if own_past else book.model.store
        lines: list[list[Neighbour]] = []
        for prediction, _ in book.model.read_blocks([ids[:-1]], None, ("base",), allowed, k, own_past):
            for found in prediction.neighbours[0].nearest(k).listed():
                lines.append([Neighbour.at(store, row, score, left, right) for row, score in found])
        return lines

    @torch.inference_mode()
    def next(
        self,
        text: str | Sequence[int],
        *,
        predictors: Iterable[str] | None = None,
        top: int = 10,
        only: Names = None,
        exclude: Names = None,
        attach: Attachments | None = None,
        own_past: bool = False,
    ) -> Next:
        """Return the distribution of the token that follows a text or token ids (either may be empty), by predictor."""
        book = self._with(attach)
        wanted = book._wanted(predictors)
        allowed = book.allowed(only, exclude)
        ids = book._prompt(text, chat=False)
        prediction, _ = book.model.read_to_end([ids], None, wanted, allowed, own_past)
        log_probs = {name: full_1V[0].cpu() for name, full_1V in prediction[0, -1:].log_probs(wanted).items()}
        pieces = {}
        for name, values_V in log_probs.items():
            best = values_V.topk(min(top, len(values_V)))
            pieces[name] = [
                (book.model.lm.piece(token), float(np.exp(value)))
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        return Next({name: values_V.numpy() for name, values_V in log_probs.items()}, pieces)

    # -- writing -------------------------------------------------------------------------------------------

    @cached_property
    def drafter(self) -> Drafter:
        """Drafts from this book; uses what a book without the attached documents knows of the store's suffixes."""
        return Drafter(self.model.store, None if self._base is None else self._base.drafter)

    def writer(self, predictor: str) -> Writer:
        """Return a writer for texts by one predictor; see `generate`."""
        return Writer(self.model, predictor, self.drafter)

    @overload
    def generate(
        self,
        prompt: str,
        *,
        only: Names = None,
        exclude: Names = None,
        chat: bool = False,
        attach: Attachments | None = None,
        **options: Any,
    ) -> WrittenText: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        only: Names = None,
        exclude: Names = None,
        chat: bool = False,
        attach: Attachments | None = None,
        **options: Any,
    ) -> list[WrittenText]: ...

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        only: Names = None,
        exclude: Names = None,
        chat: bool = False,
        attach: Attachments | None = None,
        **options: Any,
    ) -> WrittenText | list[WrittenText]:
        """Continue a prompt, or several at once; each token comes with its sources.

        A prompt is a text, or token ids in a list of prompts; an empty one starts a text. With `n` above 1 or several
        prompts, the result is a list: n texts for each prompt, in order. `chat` puts prompts into the model's chat
        template. `only`, `exclude` and `attach` are those of `score`. The other options are the fields of
        `gnnlm.write.generate_options.GenerateOptions`.
        """
        book = self._with(attach)
        checked = GenerateOptions.checked(**options)
        settings = TextSettings.of(checked, book.model, book.allowed(only, exclude))
        several: list[str | Sequence[int]] = [prompt] if isinstance(prompt, str) else [*prompt]
        if not several:
            raise ConfigError("generate expects at least one prompt")
        ids = [book._prompt(one, chat) for one in several]
        writer = book.writer(settings.predictor)
        texts = [text for one in ids for text in writer.add(one, settings, checked.n)]
        while writer.busy:
            writer.step()
        found = [written_text(book.model, text, checked.sources) for text in texts]
        return found[0] if isinstance(prompt, str) and checked.n == 1 else found

    def stream(
        self,
        prompt: str,
        *,
        only: Names = None,
        exclude: Names = None,
        chat: bool = False,
        attach: Attachments | None = None,
        **options: Any,
    ) -> TextStream:
        """Return one text as a stream that is written while it is iterated over; see `generate`."""
        book = self._with(attach)
        checked = GenerateOptions.checked(**options)
        if checked.n > 1:
            raise ConfigError(f"n: stream writes one text, got {checked.n}; use generate for more")
        settings = TextSettings.of(checked, book.model, book.allowed(only, exclude))
        return TextStream(book.writer(settings.predictor), book._prompt(prompt, chat), settings)

    # -- explaining ----------------------------------------------------------------------------------------

    def influence(
        self, text: Text, documents: Iterable[str] | None = None, *, predictor: str | None = None, most: int = 8
    ) -> dict[str, Floats]:
        """Return, by document, how far each token's log-probability falls when the document is left out.

        By default, the documents are those with the most neighbours of the text, at most `most`. Each costs a scoring.
        Unlike shares and attention, this includes all that the graph network took from a document.
        """
        names = looked_up_documents(self.model, text, most) if documents is None else list(documents)
        wanted = [predictor or self.predictors[-1]]
        (whole,) = self.score(text, predictors=wanted).log_probs.values()
        found = {}
        for name in names:
            (without,) = self.score(text, predictors=wanted, exclude=[name]).log_probs.values()
            found[name] = whole - without
        return found

    def attention(self, text: str | Sequence[int], *, only: Names = None, exclude: Names = None) -> Attention:
        """Return the graph network's attention when it predicts the token after a text or token ids.

        Attention does not say what a document changes; `influence` does.
        """
        self.model.predictor.check(("gnn",))
        return attention_after(self.model, self._prompt(text, chat=False), self.allowed(only, exclude))

    def _prompt(self, prompt: str | Sequence[int], chat: bool) -> list[int]:
        """Return the token ids of a prompt."""
        if isinstance(prompt, str):
            if chat:
                return self.model.lm.chat([{"role": "user", "content": prompt}])
            return tokenized(self.model, prompt)[0]
        if not isinstance(prompt, (list, tuple)) or not all(type(token) is int for token in prompt):
            raise ConfigError(f"expected a prompt as text or as a list of token ids, got {str(prompt)[:80]}")
        if chat:
            raise ConfigError("chat puts text into a template; give the prompt as text")
        return list(prompt)

    def _wanted(self, predictors: Iterable[str] | None) -> tuple[str, ...]:
        if predictors is None:
            predictors = self.predictors
        wanted = (predictors,) if isinstance(predictors, str) else tuple(predictors)
        self.model.predictor.check(wanted)
        if not wanted:
            raise ConfigError(f"name at least one predictor; this run has {', '.join(self.predictors)}")
        return wanted

    def allowed(self, only: Names, exclude: Names) -> Allowed | None:
        """Return the positions that may be looked up; None for all."""
        if only is None and exclude is None:
            return None
        store = self.model.store
        numbers = open_documents(store.names, only, exclude, store.live, store.tags)
        if not len(numbers):
            warn("only and exclude leave no document to look up: every predictor predicts without neighbours")
        open_D = torch.zeros(len(store.names), dtype=torch.bool)
        open_D[torch.tensor(numbers, dtype=torch.long)] = True
        return Allowed(positions=open_D.repeat_interleave(store.document_starts.diff()))


def open_book(path: str | Path, engine: Engine = HERE) -> Book:
    """Open a finished run directory; `engine` (see `gnnlm.engine.using`) may hold its segments on a cluster."""
    return book_of(Run(load_config(Path(path)), reading=True), engine)


def book_of(run: Run, engine: Engine = HERE) -> Book:
    """Open the book of a run."""
    snapshot = run.open_current(engine)
    return Book(snapshot.model(), str(run.root), snapshot)
