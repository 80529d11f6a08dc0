"""The runs that are served, and the names of their models.

A model is a predictor of a run. `mine:knn` is the predictor knn of the run directory `runs/mine`; `mine` alone is its
best predictor.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnlm.book import Book, book_of
from gnnlm.config import load_config
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.datastore.filter import Names
from gnnlm.engine import HERE, Engine
from gnnlm.errors import ConfigError, GnnlmError
from gnnlm.evaluate.report import read_report
from gnnlm.predict.attach import taken
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.predict.scoring import tokenized
from gnnlm.retrieval.index import Allowed
from gnnlm.run import Run
from gnnlm.serve.api_errors import Problem, unknown_model

log = logging.getLogger("gnnlm.serve")
FILTERS = 64  # that are remembered: texts with the same filter are searched together


@dataclass(eq=False)
class Served:
    """A run that is served under a name, at one generation: a request keeps the one that it began with."""

    name: str
    book: Book
    report: dict[str, Any]
    opened: int = field(default_factory=lambda: int(time.time()))
    _filters: dict[tuple[Any, ...], Allowed | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    outdated: bool = False  # whether new requests get another: a later generation, or it was made for one

    def moved_on(self) -> Served:
        """The same run at its current generation; this one, if that is its own."""
        book = self.book.refreshed()
        return self if book is self.book else Served(self.name, book, self.report, self.opened, _lock=self._lock)

    @property
    def models(self) -> list[str]:
        return [self.name, *(f"{self.name}:{predictor}" for predictor in self.book.predictors)]

    def allowed(self, only: Names, exclude: Names) -> Allowed | None:
        """What a filter lets through; the same object for the same filter."""
        key = tuple(None if names is None else tuple(names) for names in (only, exclude))
        with self._lock:
            if key not in self._filters:
                found = self.book.allowed(only, exclude)
                if len(self._filters) >= FILTERS:
                    self._filters.pop(next(iter(self._filters)))
                self._filters[key] = found
            return self._filters[key]

    def attached(self, documents: Sequence[TokenizedDocument]) -> Served:
        """The run with documents that only one request sees."""
        return Served(self.name, self.book.with_documents(documents), self.report, self.opened, outdated=True)

    def taken(self, documents: Sequence[tuple[str, str]]) -> list[TokenizedDocument]:
        """Names and texts as documents to attach."""
        with self._lock:
            return taken(self.book.model, documents)

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids, and the character at which each begins."""
        with self._lock:
            return tokenized(self.book.model, text)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        most = self.book.model.lm.vocab_size - 1
        wrong = next((token for token in ids if not 0 <= token <= most), None)
        if wrong is not None:
            raise Problem(400, f"{param}: expected token ids from 0 to {most}, got {str(wrong)[:40]}", param=param)


class Runs:
    """All runs of a server, by name."""

    def __init__(self, runs: Iterable[Served]) -> None:
        self._runs: dict[str, Served] = {}
        for run in runs:
            if run.name in self._runs:
                raise ConfigError(
                    f"two runs are named {run.name}: {self._runs[run.name].book.origin} and {run.book.origin}; models "
                    "are named after the run directory, so rename or link one of them"
                )
            self._runs[run.name] = run
        self._moving, self._refused = threading.Lock(), set[str]()

    def move_on(self) -> None:
        """Let new requests see the current generation of every run; those that are going on keep theirs."""
        for name in self._runs:
            self._move_on(name)

    def _move_on(self, name: str) -> Served:
        with self._moving:
            before = self._runs[name]
            try:
                after = before.moved_on()
            except (GnnlmError, OSError) as error:  # what is open can still be served
                if (words := f"{name}: {error}") not in self._refused:
                    self._refused.add(words)
                    log.warning("%s goes on being served as it was opened", words)
                return before
            if after is not before:
                self._runs[name], before.outdated = after, True
            return after

    def __iter__(self) -> Any:
        return iter(self._runs.values())

    @property
    def models(self) -> list[str]:
        return [model for run in self for model in run.models]

    def find(self, model: str | None) -> tuple[Served, str | None]:
        """The run and the predictor of a model's name; without a name, the first run."""
        if model is None:
            return self._move_on(next(iter(self._runs))), None
        if model in self._runs:
            return self._move_on(model), None
        name, _, predictor = model.rpartition(":")
        if name in self._runs and predictor in PREDICTORS:
            run = self._move_on(name)
            try:
                run.book.model.predictor.check((predictor,))
            except GnnlmError as error:
                raise Problem(404, str(error), param="model", code="model_not_found") from error
            return run, predictor
        raise unknown_model(model, self.models)


def open_runs(paths: Sequence[Path], engine: Engine = HERE) -> Runs:
    """Open finished runs; each is refused by name if it is not finished or is being built.

    The engine holds their segments.
    """
    found = []
    for path in paths:
        run = Run(load_config(path), reading=True)
        book = book_of(run, engine)
        name = Path(os.path.abspath(path if path.is_dir() else run.root)).name  # links keep their own name
        found.append(Served(name, book, _report_of(run)))
    return Runs(found)


def _report_of(run: Run) -> dict[str, Any]:
    """The report, and the history of the graph network's training."""
    history = json.loads(run.artifact("train").text("history.json")) if "train" in run.stages else []
    return {**read_report(run.artifact("eval")).as_json(), "history": history}
