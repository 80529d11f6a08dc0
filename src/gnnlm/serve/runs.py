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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from gnnlm.book import Book, book_of
from gnnlm.config import load_config
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.engine import HERE, Engine
from gnnlm.errors import ConfigError, GnnlmError
from gnnlm.evaluate.report import read_report
from gnnlm.predict.attach import taken
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.predict.scoring import tokenized
from gnnlm.retrieval.index import Allowed
from gnnlm.run import Run
from gnnlm.serve.api_errors import ApiError, unknown_model

log = logging.getLogger("gnnlm.serve")
FILTERS = 64  # remembered for each run


@dataclass(eq=False)
class ServedRun:
    """A run that is served under a name, at one generation; a request keeps the one that it began with."""

    name: str
    book: Book
    report: dict[str, Any]
    opened: int = field(default_factory=lambda: int(time.time()))
    outdated: bool = False  # whether later requests use another: a newer generation, or one without attached documents
    _lock: threading.Lock = field(default_factory=threading.Lock)  # tokenizers are not safe to use from several threads

    def __post_init__(self) -> None:
        self._allowed = lru_cache(FILTERS)(self.book.allowed)

    def refreshed(self) -> ServedRun:
        """Return the run at its current generation; itself if nothing has changed."""
        book = self.book.refreshed()
        return self if book is self.book else ServedRun(self.name, book, self.report, self.opened, _lock=self._lock)

    @property
    def models(self) -> list[str]:
        return [self.name, *(f"{self.name}:{predictor}" for predictor in self.book.predictors)]

    def allowed(self, only: Sequence[str] | None, exclude: Sequence[str] | None) -> Allowed | None:
        """Return what a filter lets through: the same object for equal filters, so that they are searched together."""
        return self._allowed(None if only is None else tuple(only), None if exclude is None else tuple(exclude))

    def attached(self, documents: Sequence[TokenizedDocument]) -> ServedRun:
        """Return the run with documents for one request."""
        session = self.book.with_documents(documents)
        return ServedRun(self.name, session, self.report, self.opened, outdated=True, _lock=self._lock)

    def tokenized_documents(self, documents: Sequence[tuple[str, str]]) -> list[TokenizedDocument]:
        """Tokenize names and texts of documents to attach."""
        with self._lock:
            return taken(self.book.model, documents)

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Return token ids, and the character at which each token begins."""
        with self._lock:
            return tokenized(self.book.model, text)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        most = self.book.model.lm.vocab_size - 1
        wrong = next((token for token in ids if not 0 <= token <= most), None)
        if wrong is not None:
            raise ApiError(400, f"{param}: expected token ids from 0 to {most}, got {str(wrong)[:40]}", param=param)


class ServedRuns:
    """All runs of a server, by name."""

    def __init__(self, runs: Iterable[ServedRun]) -> None:
        self._runs: dict[str, ServedRun] = {}
        for run in runs:
            if run.name in self._runs:
                raise ConfigError(
                    f"two runs are named {run.name}: {self._runs[run.name].book.origin} and {run.book.origin}; models "
                    "are named after the run directory, so rename or link one of them"
                )
            self._runs[run.name] = run
        self._refreshing = threading.Lock()
        self._warned: set[str] = set()

    def __iter__(self) -> Iterator[ServedRun]:
        return iter(self._runs.values())

    @property
    def models(self) -> list[str]:
        return [model for run in self for model in run.models]

    def descriptions(self) -> list[str]:
        return [f"{run.name}: {run.book!r}" for run in self]

    def refresh(self) -> None:
        """Open the current generation of every run for later requests; requests in progress keep theirs."""
        for name in self._runs:
            self._current(name)

    def find(self, model: str | None) -> tuple[ServedRun, str | None]:
        """Return the run and the predictor that a model names; without a name, the first run."""
        if model is None:
            return self._current(next(iter(self._runs))), None
        if model in self._runs:
            return self._current(model), None
        name, _, predictor = model.rpartition(":")
        if name not in self._runs or predictor not in PREDICTORS:
            raise unknown_model(model, self.models)
        run = self._current(name)
        try:
            run.book.model.predictor.check((predictor,))
        except GnnlmError as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from error
        return run, predictor

    def _current(self, name: str) -> ServedRun:
        """Return a run at its current generation, or at the last one that could be opened."""
        with self._refreshing:
            before = self._runs[name]
            try:
                after = before.refreshed()
            except Exception as error:  # of any kind: what is open can still be served
                warning = f"{name} is still served as it was opened: {error}"
                if warning not in self._warned:
                    self._warned.add(warning)
                    log.warning(warning)
                return before
            if after is not before:
                self._runs[name] = after
                before.outdated = True
            return after


def open_runs(paths: Sequence[Path], engine: Engine = HERE) -> ServedRuns:
    """Open finished runs, their segments held by `engine`; refuse a run that is not finished or is being built."""
    found = []
    for path in paths:
        run = Run(load_config(path), reading=True)
        book = book_of(run, engine)
        name = Path(os.path.abspath(path if path.is_dir() else run.root)).name  # links keep their own name
        found.append(ServedRun(name, book, _report_of(run)))
    return ServedRuns(found)


def _report_of(run: Run) -> dict[str, Any]:
    """Return the report and the history of the graph network's training."""
    history = json.loads(run.artifact("train").text("history.json")) if "train" in run.stages else []
    return {**read_report(run.artifact("eval")).as_json(), "history": history}
