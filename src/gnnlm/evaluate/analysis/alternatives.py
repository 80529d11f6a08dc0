"""The alternatives: frozen, with passages in the context, fine-tuned, each without and with the book.

All are measured on the test tokens that the runs share (and that were read with passages, where some were), so that
their perplexities can stand beside each other. Costs are those that the runs recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from gnnlm.errors import ConfigError
from gnnlm.evaluate.analysis.figure import MARKS, axes_of, spread_of
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.compare import AlternativeRun, shared_places
from gnnlm.evaluate.plots import COLOURS, DARK
from gnnlm.evaluate.table import Table, number, perplexity, text
from gnnlm.predict.predictor import LABELS

KINDS = {"frozen": "frozen", "scratch": "trained", "full": "fine-tuned", "lora": "fine-tuned (LoRA)"}
PASSAGES = "passages"
NEEDED = {  # the stages that take time before the first token can be predicted
    "base": ("lm",),
    "knn": ("lm", "encode", "search valid"),
    "gnn": ("lm", "encode", "search train", "search valid", "train"),
    "gnn_knn": ("lm", "encode", "search train", "search valid", "train"),
}


class AlternativeRow(PerplexityChange):
    """An alternative: a predictor of a run, perhaps with passages, and its costs.

    `best_by_...`: no other alternative is at least as good in both perplexity and this cost, and better in one.
    """

    run: str
    kind: str
    passages: bool
    row: str
    seconds_per_token: float
    preparation_minutes: float
    best_by_seconds_per_token: bool = False
    best_by_preparation_minutes: bool = False

    def label(self, with_run: bool) -> str:
        words = [self.kind]
        if self.passages:
            words.append("passages")
        if self.row != "base":
            words.append(LABELS[self.row])
        return ", ".join(words) + (f" ({self.run})" if with_run else "")

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds_per_token

    @property
    def best_words(self) -> str:
        return ", ".join(
            word
            for word, best in (
                ("time", self.best_by_seconds_per_token),
                ("preparation", self.best_by_preparation_minutes),
            )
            if best
        )


class AlternativesResult(PartResult):
    """The alternatives on `tokens` test tokens of `documents`; changes are against the base model of the first run."""

    tokens: int
    documents: int
    runs: int
    rows: list[AlternativeRow]


def measure(alternatives: Sequence[AlternativeRun], samples: int, seed: int) -> AlternativesResult:
    first = alternatives[0].run
    places, document = shared_places([each.run for each in alternatives])
    for each, at in zip(alternatives[1:], places[1:], strict=True):
        if not len(at):
            raise ConfigError(f"{each.run.name} and {first.name} share no test document; compare runs of the same text")
    read = np.full(len(document), True)
    for each, at in zip(alternatives, places, strict=True):
        if each.with_passages:
            read &= at < min(len(scores) for scores in each.with_passages.values())
    document = np.unique(document[read], return_inverse=True)[1]
    base = first.scores["base"][places[0][read]]
    rows = []
    for each, at in zip(alternatives, places, strict=True):
        for name, scores in {**each.run.scores, **each.with_passages}.items():
            change = PerplexityChange.paired(scores[at[read]], base, document, samples, seed)
            rows.append(_row(each, name, change))
    by_time = frontier([(row.seconds_per_token, row.ppl) for row in rows])
    by_preparation = frontier([(row.preparation_minutes, row.ppl) for row in rows])
    rows = [
        row.model_copy(update={"best_by_seconds_per_token": time, "best_by_preparation_minutes": preparation})
        for row, time, preparation in zip(rows, by_time, by_preparation, strict=True)
    ]
    return AlternativesResult(tokens=len(base), documents=int(document.max()) + 1, runs=len(alternatives), rows=rows)


def _row(alternative: AlternativeRun, name: str, change: PerplexityChange) -> AlternativeRow:
    report = alternative.run.report
    passages = name in alternative.with_passages
    plain = without_passages(name) if passages else name
    if passages and report.passages is not None:
        speed = report.passages.rows[name].tokens_per_second
    else:
        speed = report.rows[name].tokens_per_second
    return AlternativeRow(
        **change.model_dump(),
        run=alternative.run.name,
        kind=KINDS.get(report.lm.kind, f"fine-tuned ({report.lm.kind})"),
        passages=passages,
        row=plain,
        seconds_per_token=1 / speed,
        preparation_minutes=sum(alternative.seconds.get(stage, 0.0) for stage in NEEDED[plain]) / 60,
    )


def without_passages(name: str) -> str:
    """
    >>> without_passages("passages"), without_passages("passages_gnn")
    ('base', 'gnn')
    """
    return name.removeprefix(PASSAGES).removeprefix("_") or "base"


def frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other point beats: at least as good in both values, and better in one.

    >>> frontier([(1, 5), (2, 3), (2, 4), (3, 3)])
    [True, True, False, False]
    """
    return [not any(all(a <= b for a, b in zip(q, p, strict=True)) and q != p for q in points) for p in points]


def show(result: AlternativesResult) -> AnalysisSection:
    rows = _briefly_named(result.rows)
    with_run = result.runs > 1
    names = [row.label(with_run) for row in rows]
    first = rows[0]
    lowest = min(range(len(rows)), key=lambda at: rows[at].ppl)
    best = rows[lowest]
    finding = (
        f"Of {len(rows)} alternatives, {names[lowest]} has the lowest perplexity, {best.ppl:.2f}, at "
        f"{best.ms_per_token:.2f} ms per token and {best.preparation_minutes:.1f} minutes of preparation; {names[0]} "
        f"has {first.ppl:.2f} at {first.ms_per_token:.2f} ms."
    )
    unbeaten = [name for name, row in zip(names, rows, strict=True) if row.best_by_seconds_per_token]
    table = Table.of(
        "alternatives",
        "What each alternative brings and costs",
        zip(range(1, len(rows) + 1), names, rows, strict=True),
        number("no.", lambda line: line[0], 0),
        text("alternative", lambda line: line[1]),
        perplexity("ppl", lambda line: line[2].ppl),
        text("change, 95%", lambda line: "" if line[0] == 1 else line[2].words),
        number("ms per token", lambda line: line[2].ms_per_token),
        number("preparation (minutes)", lambda line: line[2].preparation_minutes, 1),
        text("unbeaten in", lambda line: line[2].best_words),
    )
    shared = f", which the {result.runs} runs share" if with_run else ""
    return AnalysisSection(
        [
            f"All on the same {result.tokens:,} test tokens of {result.documents} documents{shared}; changes are "
            f"against {names[0]}. Time per token counts reading, search and prediction. Preparation is what the runs "
            "recorded: training of the base model, encoding, search, training of the network; index, codec, cache, "
            "tuning and BM25 are not recorded.",
            finding,
            f"By time per token, none beats {_listed(unbeaten)}.",
            _absent(rows),
        ],
        [table],
        [_figure(rows, names)],
        [finding],
    )


def _absent(rows: Sequence[AlternativeRow]) -> str:
    """Which alternatives are missing, and how to add them."""
    absent = []
    if not any(row.passages for row in rows):
        absent.append("passages in the context")
    if not any(row.kind.startswith("fine") for row in rows):
        absent.append("fine-tuned")
    if not absent:
        return "Frozen, passages and fine-tuned are all here."
    return f"Not here: {', '.join(absent)} (eval.context_retrieval, or runs named with --with)."


def _briefly_named(rows: Sequence[AlternativeRow]) -> list[AlternativeRow]:
    """Name the runs by the last part of their path, where that tells them apart."""
    brief = {row.run: PurePath(row.run).name for row in rows}
    if len({*brief.values()}) < len(brief):
        return list(rows)
    return [row.model_copy(update={"run": brief[row.run]}) for row in rows]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{'; '.join(names[:-1])} and {names[-1]}"


def _figure(rows: Sequence[AlternativeRow], names: Sequence[str]) -> Figure:
    figure, (by_time, by_preparation) = axes_of(2, height=3.8, width=7.2)
    times = [row.ms_per_token for row in rows]
    minutes = [row.preparation_minutes for row in rows]
    _costs(by_time, rows, names, times, [row.best_by_seconds_per_token for row in rows])
    _costs(by_preparation, rows, names, minutes, [row.best_by_preparation_minutes for row in rows])
    by_time.set(xlabel="ms per token", ylabel="perplexity")
    by_preparation.set_xlabel("minutes of preparation")
    by_preparation.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    points = "; ".join(
        f"{at} {name}: {row.ppl:.2f} at {row.ms_per_token:.2f} ms, {row.preparation_minutes:.1f} min"
        for at, (name, row) in enumerate(zip(names, rows, strict=True), 1)
    )
    caption = (
        "Perplexity against time per token and against preparation (dashed: not beaten by "
        "another; ringed: with passages; hollow: another base model)"
    )
    return Figure("alternatives", caption, f"{points}.", figure)


def _costs(
    axes: Any, rows: Sequence[AlternativeRow], names: Sequence[str], costs: Sequence[float], best: Sequence[bool]
) -> None:
    """Perplexity against one cost, and the line of those that are not beaten."""
    line = sorted((cost, row.ppl) for cost, row, unbeaten in zip(costs, rows, best, strict=True) if unbeaten)
    axes.plot(*zip(*line, strict=True), color=DARK, lw=1, ls="--", drawstyle="steps-post", zorder=1)
    for place, (name, row, cost) in enumerate(zip(names, rows, costs, strict=True), 1):
        colour = COLOURS.get(row.row, DARK)
        face = colour if row.kind == rows[0].kind else "white"
        if row.passages:
            axes.plot(cost, row.ppl, "o", ms=14, mfc="none", mec="#999999", mew=0.8)
        look = {"ms": 7, "mfc": face, "mec": colour, "mew": 1.4, "ls": "none"}
        axes.plot(cost, row.ppl, marker=MARKS.get(row.row, "v"), label=f"{place} {name}", **look)
        axes.annotate(str(place), (cost, row.ppl), (6, 4), textcoords="offset points", fontsize=9)
    spread_of(axes, "y", [row.ppl for row in rows])
    spread_of(axes, "x", costs)


PART = AnalysisPart(
    "alternatives",
    "The alternatives",
    AlternativesResult,
    lambda m: measure(m.alternatives, m.subject.config.eval.bootstrap, m.subject.seed),
    show,
    lambda subject: 1 + subject.report.test_tokens / 1e5,
    compares=True,
)
