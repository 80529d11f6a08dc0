"""Number of neighbours: perplexity, memory and speed by k in the graph and by k of kNN (paper, Figure 2).

The network and the mix are those of the run; only k changes. Test is scored once for each k in the graph. The k of kNN
needs no pass of its own: it is computed from the cached scores.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from pydantic import ConfigDict

from gnnlm.artifact import Draft
from gnnlm.evaluate.analysis.figure import axes_of, base_line, k_axis, legend_of, line_of
from gnnlm.evaluate.analysis.memory import MEASURED, base_bytes, network_bytes
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.table import Cell, Column, Table, change_columns, number, text
from gnnlm.predict.predictor import LABELS, MIXED, STATE_OF
from gnnlm.predict.split_scoring import score_text

GRAPH_KS = (8, 16, 32, 64, 128)
KNN_KS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class BaseModelRow(PerplexityChange):
    memory_mb: float
    tokens_per_s: float


class GraphCountRow(BaseModelRow):
    """The figures of +GNN with k neighbours in the graph; `gnn_tokens_per_s` is the network's own speed."""

    k: int
    gnn_knn: PerplexityChange
    gnn_tokens_per_s: float
    seconds: float


class KnnCountRow(PartResult):
    """The figures with k neighbours in kNN, by predictor."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, PerplexityChange]

    k: int

    @property
    def predictors(self) -> dict[str, PerplexityChange]:
        return self.__pydantic_extra__


class NeighbourCountsResult(PartResult):
    base: BaseModelRow
    graph_k: list[GraphCountRow]
    knn_k: list[KnnCountRow]
    chosen: dict[str, int]


def measure(subject: Subject, draft: Draft, scores: CachedScores) -> NeighbourCountsResult:
    """Measure each k; the rows of the graph's k are kept in the draft as they are made."""
    base = subject.scores["base"]
    predictor = subject.snapshot.predictor
    notes = draft.notes.setdefault("graph_k", [])
    known = {row["k"] for row in notes}
    for k in GRAPH_KS if subject.snapshot.gnn is not None else ():
        if k <= subject.test.table.k and k not in known:
            notes.append(_graph_row(subject, k).model_dump(mode="json"))
            draft.commit()
    mixed = [name for name in scores.names if name in MIXED]
    return NeighbourCountsResult(
        base=BaseModelRow(
            **subject.changed(base, base).model_dump(),
            memory_mb=base_bytes(subject) / 1e6,
            tokens_per_s=subject.report.rows["base"].tokens_per_second,
        ),
        graph_k=[GraphCountRow.model_validate(row) for row in notes],
        knn_k=[_knn_row(subject, scores, mixed, k) for k in KNN_KS if k <= subject.test.table.k],
        chosen={
            "graph_k": predictor.graph_k,
            **{name: predictor.mixes[STATE_OF[name]].k for name in mixed},
        },
    )


def _graph_row(subject: Subject, k: int) -> GraphCountRow:
    predictor = replace(subject.snapshot.predictor, graph_k=k)
    names = ("gnn", "gnn_knn")
    began = time.perf_counter()
    scores, seconds = score_text(predictor, subject.test, subject.config.eval.block, f"score test with k = {k}", names)
    took = time.perf_counter() - began
    base = subject.scores["base"]
    encode = subject.report.seconds["encode"]
    return GraphCountRow(
        **subject.changed(scores["gnn"], base).model_dump(),
        k=k,
        gnn_knn=subject.changed(scores["gnn_knn"], base),
        memory_mb=network_bytes(subject, predictor) / 1e6,
        tokens_per_s=len(base) / (encode + seconds["gnn"] + seconds["head"] / len(names)),
        gnn_tokens_per_s=len(base) / seconds["gnn"],
        seconds=took,
    )


def _knn_row(subject: Subject, scores: CachedScores, names: Sequence[str], k: int) -> KnnCountRow:
    """The mixed predictors with another k in kNN; all else as tuned."""
    changes = {}
    for name in names:
        state = STATE_OF[name]
        mix = replace(subject.snapshot.predictor.mixes[state], k=k)
        mixed = scores.mixed(subject.test, subject.snapshot.store, state, mix)
        changes[name] = subject.changed(mixed, subject.scores["base"])
    return KnnCountRow(k=k, **changes)


def show(result: NeighbourCountsResult) -> AnalysisSection:
    tables, figures, findings = [], [], []
    if result.graph_k:
        tables.append(_graph_table(result))
        figures.append(_graph_figure(result))
        findings.append(_graph_finding(result.graph_k))
    names = list(result.knn_k[0].predictors)
    tables.append(
        Table.of(
            "knn_k",
            "Neighbours in the kNN distribution",
            result.knn_k,
            text("k", lambda row: str(row.k)),
            *itertools.chain.from_iterable(map(_knn_columns, names)),
        )
    )
    figures.append(_knn_figure(result, names))
    for name in names:
        best = min(result.knn_k, key=lambda row: row.predictors[name].ppl)
        findings.append(
            f"{LABELS[name]} is best with k = {best.k:,} in kNN ({best.predictors[name].ppl:.2f}); valid chose "
            f"{result.chosen[name]:,}."
        )
    return AnalysisSection(
        [
            "Network and mix are those of the run; only k changes. Memory is the peak of tensors for "
            f"{MEASURED} tokens. Speed counts the base model's reading, the network and the softmax, not search, which "
            "the paper makes beforehand. The paper finds its model 8 to 20 times slower than the base model, and "
            "perplexity falling from k = 8 to 128.",
            *findings,
        ],
        tables,
        figures,
        findings[:1],
    )


def _knn_columns(name: str) -> list[Column]:
    return change_columns(LABELS[name], lambda row: row.predictors[name], f"{LABELS[name]}: change, 95%")


def _graph_finding(rows: Sequence[GraphCountRow]) -> str:
    low, high = rows[0], rows[-1]
    falls = len(rows) > 1 and all(b.ppl <= a.ppl for a, b in itertools.pairwise(rows))
    return (
        f"From {low.k} to {high.k} neighbours in the graph, perplexity of +GNN goes from {low.ppl:.2f} to "
        f"{high.ppl:.2f}{', falling all the way as in the paper' if falls else ''}, and the network's own speed from "
        f"{low.gnn_tokens_per_s:,.0f} to {high.gnn_tokens_per_s:,.0f} tokens/s."
    )


def _graph_table(result: NeighbourCountsResult) -> Table:
    base = result.base
    columns = [
        text("k", lambda row: str(row.k)),
        *change_columns("+GNN", lambda row: row),
        *change_columns("+GNN+kNN", lambda row: row.gnn_knn, "change, 95% "),
        number("memory (MB)", lambda row: row.memory_mb, 0),
        number("tokens/s", lambda row: row.tokens_per_s, 0),
        number("network alone, tokens/s", lambda row: row.gnn_tokens_per_s, 0),
    ]
    rows = [[column.value(row) for column in columns] for row in result.graph_k]
    first: list[Cell] = ["base", base.ppl, "", base.ppl, "", base.memory_mb, base.tokens_per_s, None]
    return Table("graph_k", "Neighbours in the graph", columns, [first, *rows])


def _graph_figure(result: NeighbourCountsResult) -> Figure:
    rows, base = result.graph_k, result.base
    ks = [row.k for row in rows]
    figure, panels = axes_of(3, titles=("memory (MB)", "tokens/s", "perplexity"))
    memory, speed, perplexity = panels
    line_of(memory, "gnn", ks, [row.memory_mb for row in rows])
    line_of(speed, "gnn", ks, [row.tokens_per_s for row in rows])
    line_of(perplexity, "gnn", ks, [row.ppl for row in rows])
    line_of(perplexity, "gnn_knn", ks, [row.gnn_knn.ppl for row in rows])
    for axes, value in zip(panels, (base.memory_mb, base.tokens_per_s, base.ppl), strict=True):
        base_line(axes, value)
        k_axis(axes, ks, "k in the graph")
    memory.set_ylim(bottom=0)
    speed.set_ylim(bottom=0)
    legend_of(perplexity)
    words = ", ".join(f"{row.ppl:.2f} at k = {row.k}" for row in rows)
    return Figure("graph_k", "Memory, speed and perplexity by k in the graph", f"Perplexity of +GNN: {words}.", figure)


def _knn_figure(result: NeighbourCountsResult, names: Sequence[str]) -> Figure:
    figure, (axes,) = axes_of()
    rows = result.knn_k
    ks = [row.k for row in rows]
    for name in names:
        line_of(axes, name, ks, [row.predictors[name].ppl for row in rows])
        axes.axvline(result.chosen[name], color="#999999", lw=0.8)
    base_line(axes, result.base.ppl)
    k_axis(axes, ks, "k of kNN (thin lines: chosen on valid)")
    axes.set_ylabel("perplexity")
    legend_of(axes)
    first, last = rows[0].predictors, rows[-1].predictors
    ends = "; ".join(
        f"{LABELS[name]} {first[name].ppl:.2f} at k = {ks[0]}, {last[name].ppl:.2f} at k = {ks[-1]}" for name in names
    )
    return Figure("knn_k", "Perplexity by k of kNN", f"Perplexity: {ends}.", figure)


PART = AnalysisPart(
    "neighbours",
    "Number of neighbours",
    NeighbourCountsResult,
    lambda m: measure(m.subject, m.draft, m.scores("test")),
    show,
    lambda subject: 5 * subject.seconds_to_score(),
    stages=("tune", "eval"),
    after=("scored-test",),
)
