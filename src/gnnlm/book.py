"""The Python API: text and document names on top of an open-book model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.config import load_config
from gnnlm.corpus.sources import check_text
from gnnlm.datastore.filter import Names, open_documents
from gnnlm.errors import ConfigError, CorpusError
from gnnlm.predict.open_book import BLOCK, OpenBook, Past, Reading
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.progress import warn
from gnnlm.retrieval.index import Allowed
from gnnlm.retrieval.neighbours import Neighbours
from gnnlm.run import Run
from gnnlm.write.request import Pen, Stream, request
from gnnlm.write.sources import Generation

Floats = npt.NDArray[np.float32]
Text = str | tuple[str, str]  # a text, or (context, continuation)
BATCH_TOKENS = 1024  # tokens of several texts that are scored at once, padding included


@dataclass(frozen=True)
class Scores:
    """The tokens of a text and, by predictor, the log-probability of each and whether it was the likeliest.

    `offsets` are where each token begins and ends in the text; the bytes of one character may be several tokens, which
    then share it.
    """

    tokens: list[str]
    ids: list[int]
    offsets: list[tuple[int, int]]
    log_probs: Mapping[str, Floats]
    top1: Mapping[str, npt.NDArray[np.bool_]]

    def __getattr__(self, name: str) -> Floats:
        """`scores.base`, `scores.knn`, `scores.gnn`, `scores.gnn_knn`: the log-probabilities of a predictor."""
        if name not in PREDICTORS:
            raise AttributeError(name)
        if name not in self.log_probs:
            raise AttributeError(f"these scores have no {name}; they have {', '.join(self.log_probs)}")
        return self.log_probs[name]

    def __len__(self) -> int:
        return len(self.ids)

    def perplexity(self, predictor: str | None = None) -> float:
        """The perplexity of the text under a predictor; without a name, under the last one scored."""
        return float(np.exp(-self.log_probs[predictor or list(self.log_probs)[-1]].mean()))


@dataclass(frozen=True)
class Neighbour:
    """A place in the store that resembles the text before a token; `token` is what comes next there.

    `start` and `end` are the token's characters in the document.
    """

    document: str
    similarity: float
    position: int
    start: int
    end: int
    before: str
    token: str
    after: str


@dataclass(frozen=True)
class Next:
    """The distribution of the next token by predictor: log-probabilities over the vocabulary."""

    log_probs: Mapping[str, Floats]
    pieces: Mapping[str, list[tuple[str, float]]]  # the likeliest tokens and their probabilities, likeliest first


@dataclass(frozen=True)
class StoredDocument:
    """A document of the store."""

    name: str
    tokens: int


class Book:
    """An open-book model for texts. `gnnlm.open(run)` makes one from a finished run."""

    def __init__(self, model: OpenBook, origin: str = "in memory") -> None:
        self.model, self.origin = model, origin

    def __repr__(self) -> str:
        rows, documents = len(self.model.index), len(self.model.store.names)
        names = ", ".join(self.predictors)
        return f"<gnnlm.Book {self.origin}: {rows:,} rows of {documents:,} documents; predictors {names}>"

    @property
    def predictors(self) -> tuple[str, ...]:
        """The names of the predictors this book has."""
        return self.model.predictor.names

    @cached_property
    def documents(self) -> list[StoredDocument]:
        """The documents of the store, in its order."""
        sizes = (self.model.store.document_starts.diff() - 1).tolist()
        return [StoredDocument(name, size) for name, size in zip(self.model.store.names, sizes, strict=True)]

    # -- scoring -------------------------------------------------------------------------------------------

    @overload
    def score(
        self, texts: Text, *, predictors: Iterable[str] | None = None, only: Names = None, exclude: Names = None
    ) -> Scores: ...

    @overload
    def score(
        self, texts: list[Text], *, predictors: Iterable[str] | None = None, only: Names = None, exclude: Names = None
    ) -> list[Scores]: ...

    def score(
        self,
        texts: Text | list[Text],
        *,
        predictors: Iterable[str] | None = None,
        only: Names = None,
        exclude: Names = None,
    ) -> Scores | list[Scores]:
        """The log-probability of every token, by predictor, of one text or many.

        A pair (context, continuation) scores the continuation as it follows the context. `only` and `exclude` name the
        documents of the store (or globs of names) that may or may not be looked up.
        """
        several = texts if isinstance(texts, list) else [texts]
        wanted = self._wanted(predictors)
        jobs = [_Job.make(self.model, text, number) for number, text in enumerate(several)]
        allowed = self._allowed(only, exclude)
        done: dict[int, Scores] = {}
        for batch in _batches(jobs):
            for job, scores in zip(batch, self._score(batch, wanted, allowed), strict=True):
                done[job.number] = scores
        found = [done[number] for number in range(len(jobs))]
        return found if isinstance(texts, list) else found[0]

    @torch.inference_mode()
    def _score(self, jobs: list[_Job], wanted: tuple[str, ...], allowed: Allowed | None) -> list[Scores]:
        """Score texts of similar length as one batch, a block of tokens at a time."""
        log_probs: list[dict[str, list[Tensor]]] = [{name: [] for name in wanted} for _ in jobs]
        top1: list[dict[str, list[Tensor]]] = [{name: [] for name in wanted} for _ in jobs]
        past: Past | None = None
        longest = max(len(job.ids) for job in jobs)
        for start in range(0, longest, BLOCK):
            parts = [
                job.ids[start : min(start + BLOCK, len(job.ids) - 1)] for job in jobs
            ]  # nothing is predicted after the last token
            first = 0 if past is None else start + 1  # the first new prediction is that of this token
            prediction, past = self.model.read(parts, past, wanted, allowed)
            for line, job in enumerate(jobs):
                targets = torch.tensor(job.ids[first : first + int(prediction.real[line].sum())], dtype=torch.long)
                places = torch.nonzero(torch.arange(first, first + len(targets)) >= job.first)[:, 0]
                if not len(places):
                    continue
                targets = targets[places].to(prediction.real.device)
                for name, full_NV in prediction[line, places].log_probs(wanted).items():
                    log_probs[line][name].append(full_NV.gather(1, targets[:, None])[:, 0].cpu())
                    top1[line][name].append((full_NV.argmax(1) == targets).cpu())
        return [
            Scores(
                job.pieces,
                job.ids[job.first :],
                job.offsets,
                {name: torch.cat(values).numpy() for name, values in log_probs[line].items()},
                {name: torch.cat(values).numpy() for name, values in top1[line].items()},
            )
            for line, job in enumerate(jobs)
        ]

    # -- looking up ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def neighbors(
        self, text: str, k: int = 3, *, only: Names = None, exclude: Names = None, left: int = 8, right: int = 8
    ) -> list[list[Neighbour]]:
        """For every token of the text, the k store positions that are retrieved to predict it, nearest first."""
        if k < 1:
            raise ConfigError(f"neighbors: k must be at least 1 (got {k})")
        job, allowed = _Job.make(self.model, text, 0), self._allowed(only, exclude)
        lines: list[list[Neighbour]] = []
        past: Past | None = None
        for start in range(0, len(job.ids), BLOCK):
            part = job.ids[start : min(start + BLOCK, len(job.ids) - 1)]
            prediction, past = self.model.read([part], past, ("base",), allowed, k)
            for found in _each(prediction.neighbours[0].nearest(k)):
                lines.append([self._neighbour(row, score, left, right) for row, score in found])
        return lines

    def _neighbour(self, position: int, similarity: float, left: int, right: int) -> Neighbour:
        passage = self.model.store.passage(position, left, right)
        start, end = self.model.store.characters(position)
        return Neighbour(
            passage.document, similarity, position, start, end, passage.before, passage.token, passage.after
        )

    @torch.inference_mode()
    def next(
        self,
        text: str,
        *,
        predictors: Iterable[str] | None = None,
        top: int = 10,
        only: Names = None,
        exclude: Names = None,
    ) -> Next:
        """The distribution of the token that follows a text (which may be empty), by predictor."""
        wanted, allowed = self._wanted(predictors), self._allowed(only, exclude)
        ids = _tokenized(self.model, text)[0]
        prediction, past = self.model.read([ids[:BLOCK]], None, wanted, allowed)
        for start in range(BLOCK, len(ids), BLOCK):
            prediction, past = self.model.read([ids[start : start + BLOCK]], past, wanted, allowed)
        log_probs = {name: full_1V[0].cpu() for name, full_1V in prediction[0, -1:].log_probs(wanted).items()}
        pieces = {}
        for name, values_V in log_probs.items():
            best = values_V.topk(min(top, len(values_V)))
            pieces[name] = [
                (self.model.lm.piece(token), float(np.exp(value)))
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        return Next({name: values_V.numpy() for name, values_V in log_probs.items()}, pieces)

    # -- writing -------------------------------------------------------------------------------------------

    @cached_property
    def _pen(self) -> Pen:
        return Pen(self.model)

    @overload
    def generate(
        self, prompt: str, *, only: Names = None, exclude: Names = None, chat: bool = False, **options: Any
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        only: Names = None,
        exclude: Names = None,
        chat: bool = False,
        **options: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        only: Names = None,
        exclude: Names = None,
        chat: bool = False,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Write on from a prompt, or from several at once; each token comes with its sources.

        A prompt is a text, or token ids in a list of prompts; an empty one starts a text. With `n` above 1 or several
        prompts, a list: n texts for each prompt, in order. `chat` puts prompts into the model's chat template.
        `draft=False` writes the same, only slower. `search="pointers"` saves searches and is approximate. The other
        options are the fields of `gnnlm.write.request.Request`.
        """
        asked = request(**options)
        several: list[str | Sequence[int]] = [prompt] if isinstance(prompt, str) else [*prompt]
        if not several:
            raise ConfigError("generate expects at least one prompt")
        ids = [self._prompt(one, chat) for one in several]
        found = self._pen.generate(asked, ids, self._allowed(only, exclude))
        return found[0] if isinstance(prompt, str) and asked.n == 1 else found

    def stream(
        self, prompt: str, *, only: Names = None, exclude: Names = None, chat: bool = False, **options: Any
    ) -> Stream:
        """Write one text and give it out as it comes; see `generate`."""
        return self._pen.stream(request(**options), self._prompt(prompt, chat), self._allowed(only, exclude))

    def _prompt(self, prompt: str | Sequence[int], chat: bool) -> list[int]:
        """The token ids of a prompt."""
        if isinstance(prompt, str):
            if chat:
                return self.model.lm.chat([{"role": "user", "content": prompt}])
            return _tokenized(self.model, prompt)[0]
        if not isinstance(prompt, (list, tuple)) or not all(type(token) is int for token in prompt):
            raise ConfigError(f"expected a prompt as text or as a list of token ids, got {str(prompt)[:80]}")
        if chat:
            raise ConfigError("chat puts text into a template; give the prompt as text")
        return list(prompt)

    def _wanted(self, predictors: Iterable[str] | None) -> tuple[str, ...]:
        wanted = (
            self.predictors
            if predictors is None
            else tuple([predictors] if isinstance(predictors, str) else predictors)
        )
        self.model.predictor.check(wanted)
        if not wanted:
            raise ConfigError(f"name at least one predictor; this run has {', '.join(self.predictors)}")
        return wanted

    def _allowed(self, only: Names, exclude: Names) -> Allowed | None:
        """The positions that may be looked up; None for all."""
        if only is None and exclude is None:
            return None
        store = self.model.store
        numbers = open_documents(store.names, only, exclude)
        if not len(numbers):
            warn("only and exclude leave no document to look up: every predictor predicts without neighbours")
        open_D = torch.zeros(len(store.names), dtype=torch.bool)
        open_D[torch.tensor(numbers, dtype=torch.long)] = True
        return Allowed(positions=open_D.repeat_interleave(store.document_starts.diff()))


@dataclass(frozen=True)
class _Job:
    """A text to score: all its token ids, and pieces and offsets of the tokens from `first` on."""

    number: int
    ids: list[int]
    first: int
    pieces: list[str]
    offsets: list[tuple[int, int]]

    @classmethod
    def make(cls, model: OpenBook, text: Text, number: int) -> _Job:
        if isinstance(text, tuple):
            if len(text) != 2:
                raise CorpusError(f"expected a pair (context, continuation), got {len(text)} texts")
            before, after = (_tokenized(model, part) for part in text)
            ids, first, offsets, last = [*before[0], *after[0]], len(before[0]), after[1], text[1]
        else:
            ids, offsets = _tokenized(model, text)
            first, last = 0, text
        if len(ids) == first:
            raise CorpusError("nothing to score: the text has no tokens")
        later = dict(itertools.pairwise([*sorted(set(offsets)), len(last)]))  # tokens of one character share its end
        ends = [later[start] for start in offsets]
        shared = [starts == after for starts, after in zip(offsets, [*offsets[1:], -1], strict=True)]
        pieces = [
            model.lm.piece(token) if shared[i] or (i and shared[i - 1]) else last[start:end]
            for i, (token, start, end) in enumerate(zip(ids[first:], offsets, ends, strict=True))
        ]
        return cls(number, ids, first, pieces, list(zip(offsets, ends, strict=True)))


def _tokenized(model: OpenBook, text: str) -> tuple[list[int], list[int]]:
    if not isinstance(text, str):
        raise CorpusError(f"expected a string, got {type(text).__name__}")
    check_text(text, "the text")
    return model.lm.tokenize(text)


def _batches(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Batches of jobs of similar length."""
    rest = sorted(jobs, key=lambda job: -len(job.ids))
    while rest:
        count = max(1, BATCH_TOKENS // len(rest[0].ids))
        yield rest[:count]
        rest = rest[count:]


def _each(neighbours: Neighbours) -> Iterator[Sequence[tuple[int, float]]]:
    """The real neighbours of each query."""
    for positions, similarity in zip(neighbours.positions.tolist(), neighbours.similarity.tolist(), strict=True):
        yield [(row, score) for row, score in zip(positions, similarity, strict=True) if row >= 0]


def open_book(path: str | Path) -> Book:
    """Open a finished run directory."""
    run = Run(load_config(Path(path)), reading=True)
    run.open_all()  # refuses an unfinished or stale run before anything is loaded
    config, parts = run.config, run.parts
    reading = Reading(config.lm.window, config.lm.context, config.store.key, config.store.dtype)
    return Book(OpenBook(parts.lm, parts.store, parts.index, parts.predictor, reading), str(run.root))
