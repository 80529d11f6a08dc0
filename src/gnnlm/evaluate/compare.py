"""Several finished runs side by side, and whether their figures can be compared.

Changes are measured on the test documents that two runs share, equal in name, text and tokens, with the 95% interval
of a paired bootstrap over these documents.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table as RichTable

from gnnlm.artifact import Artifact
from gnnlm.corpus.stream import Stream
from gnnlm.evaluate.change import PerplexityChange, short
from gnnlm.evaluate.report import FEW_DOCUMENTS, Report
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS, PREDICTORS

SAMPLES, SEED = 1000, 0
DocumentId = tuple[str, int]  # what identifies a test document (name, text, tokens), and its number of tokens


@dataclass(frozen=True, eq=False)
class ComparableRun:
    """A finished run: its report, the log-probabilities of its test tokens by row, their documents, its base model."""

    name: str
    report: Report
    scores: dict[str, Floats]
    documents: list[DocumentId]
    base: str

    @classmethod
    def of(cls, name: str, report: Report, scored: Artifact, corpus: Artifact, lm: Artifact | None) -> ComparableRun:
        """Read a run's artifacts; `lm` is the base model that the run itself trained, if any."""
        scores = {row: np.asarray(scored.array(f"{row}.log_probs.npy"), dtype=np.float64) for row in report.rows}
        base = lm.fingerprint if lm is not None else str(corpus.inputs["model files"])
        return cls(name, report, scores, document_ids(Stream(corpus, "test")), base)

    def ppl(self, row: str) -> float | None:
        """The perplexity of a row; None if it is infinite, or if there is no such row."""
        return self.report.rows[row].ppl if row in self.report.rows else None


@dataclass(frozen=True, eq=False)
class AlternativeRun:
    """A run among the alternatives: its figures, the scores of its rows with passages, and the seconds of its stages.

    `seconds` has what the run recorded of: lm, encode, search train, search valid, train.
    """

    run: ComparableRun
    with_passages: Mapping[str, Floats]
    seconds: Mapping[str, float]


def document_ids(stream: Stream) -> list[DocumentId]:
    """What identifies each document of a split; documents that are alike in everything are numbered."""
    seen = Counter[str]()
    ids = []
    for number, document in enumerate(stream.documents):
        first, end = stream.starts[number : number + 2].tolist()
        tokens = np.asarray(stream.tokens[first : end - 1], dtype=np.int64)
        texts = (document.name.encode("utf-8", "surrogatepass"), document.text.encode("utf-8", "surrogatepass"))
        digest = hashlib.sha256(b"\0".join((*texts, tokens.tobytes()))).hexdigest()
        ids.append((f"{digest} {seen[digest]}", len(tokens)))
        seen[digest] += 1
    return ids


@dataclass(frozen=True)
class SharedTokens:
    """The test tokens that two runs share: their places in each run, and the number of their document."""

    here: Ints
    there: Ints
    document: Ints

    @classmethod
    def between(cls, run: ComparableRun, first: ComparableRun) -> SharedTokens:
        (here, there), document = shared_places([run, first])
        return cls(here, there, document)

    @property
    def documents(self) -> int:
        return int(self.document[-1]) + 1 if len(self.document) else 0


def shared_places(runs: Sequence[ComparableRun]) -> tuple[list[Ints], Ints]:
    """The test tokens that all of some runs share: their places in each run, and the number of their document."""
    places = [_places(run.documents) for run in runs]
    keys = [key for key in places[0] if all(key in others for others in places[1:])]
    document = _concatenated([np.full(len(places[0][key]), number) for number, key in enumerate(keys)])
    return [_concatenated([at[key] for key in keys]) for at in places], document


def _places(documents: list[DocumentId]) -> dict[str, Ints]:
    ends = np.cumsum([size for _, size in documents])
    return {key: np.arange(end - size, end) for (key, size), end in zip(documents, ends.tolist(), strict=True) if size}


def _concatenated(arrays: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def change_of(run: ComparableRun, first: ComparableRun, row: str, shared: SharedTokens) -> PerplexityChange | None:
    """The change of a row on the shared tokens; None if there are none, or if a score is infinite."""
    if row not in run.scores or row not in first.scores or not shared.documents:
        return None
    here = run.scores[row][shared.here]
    there = first.scores[row][shared.there]
    if not (np.isfinite(here).all() and np.isfinite(there).all()):
        return None
    return PerplexityChange.paired(here, there, shared.document, SAMPLES, SEED)


def comparison(runs: Sequence[ComparableRun]) -> RichTable:
    """The rows of several runs, one run per line; changes only where the first run has the same test documents."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = [name for name in PREDICTORS if any(name in run.report.rows for run in runs)]
    for column in ("run", *(LABELS[name] for name in names), "codec", "smaller than fp32"):
        table.add_column(column, justify="left" if column in ("run", "codec") else "right", no_wrap=True)
    for run in runs:
        codec = run.report.codec
        shared = SharedTokens.between(run, runs[0])
        figures = [_figure(run, runs[0], name, shared) for name in names]
        table.add_row(run.name, *figures, f"{codec.kind}, {codec.bytes} bytes", f"{codec.compression:.0f}x")
    return table


def _figure(run: ComparableRun, first: ComparableRun, name: str, shared: SharedTokens) -> str:
    if name not in run.report.rows:
        return "-"
    ppl = short(run.ppl(name))
    change = None if run is first else change_of(run, first, name, shared)
    if change is None:
        return ppl
    return f"{ppl} [{change.words}{'' if change.is_significant else ', n.s.'}]"


def remarks(runs: Sequence[ComparableRun]) -> list[str]:
    """Caveats for reading the comparison, one sentence or two per line."""
    first, *others = runs
    lines = []
    found = {run.name: SharedTokens.between(run, first) for run in others}
    if any(shared.documents for shared in found.values()):
        lines.append(
            f"Percentages are changes against the same row of {first.name}, with the 95% interval of a paired "
            "bootstrap over test documents; n.s.: not significant, the interval holds 0 or there is one document only."
        )
    for run in others:
        shared = found[run.name]
        counts = f"{run.report.test_tokens:,} and {first.report.test_tokens:,} tokens"
        if not shared.documents:
            lines.append(
                f"{run.name} and {first.name} have different test text or tokens ({counts}): their figures cannot be "
                "compared."
            )
        elif not len(shared.here) == len(run.scores["base"]) == len(first.scores["base"]):
            lines.append(
                f"{run.name} and {first.name} have different test texts ({counts}). Changes are measured on the "
                f"{shared.documents} documents that both have by name, with equal text and tokens "
                f"({len(shared.here):,} tokens); perplexities are of each run's whole test text."
            )
        if 0 < shared.documents < FEW_DOCUMENTS:
            lines.append(
                f"{run.name} and {first.name} share fewer than {FEW_DOCUMENTS} test documents ({shared.documents}): "
                "intervals are too narrow."
            )
        if run.base != first.base:
            models = run.report.model, first.report.model
            which = f"both {models[0]}, not the same weights" if models[0] == models[1] else " and ".join(models)
            lines.append(f"{run.name} and {first.name} have different base models ({which}).")
    return lines
