"""Number of neighbours: perplexity, memory and speed by k in the graph and by k of kNN (paper, Figure 2).

The network and the mix are those of the run; only k changes. One pass over the test text is made for each k in the
graph. The k of kNN needs none: it reads the pass that is kept.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

from gnnlm.artifact import Draft
from gnnlm.evaluate.analysis.figure import axes_of, line_of
from gnnlm.evaluate.analysis.memory import MEASURED, base_bytes, network_bytes
from gnnlm.evaluate.analysis.score_cache import ScoredSplit
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, change_of, number, perplexity, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.bootstrap import Floats
from gnnlm.predict.predictor import LABELS, MIXED, STATE_OF, Predictor
from gnnlm.predict.split_scoring import score_text

GRAPH_KS = (8, 16, 32, 64, 128)
KNN_KS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Rows = list[dict[str, Any]]


def measure(subject: Subject, draft: Draft, scored: ScoredSplit) -> dict[str, Any]:
    """Rows of the graph's k are kept as they are made."""
    base = subject.scores["base"]
    found: dict[str, Any] = {
        "base": subject.changed(base, base) | _base_speed(subject),
        "graph_k": draft.notes.setdefault("graph_k", []),
        "knn_k": _knn_rows(subject, scored),
        "chosen": {"graph_k": subject.parts.predictor.graph_k}
        | {name: subject.parts.predictor.mixes[STATE_OF[name]].k for name in scored.names if name in MIXED},
    }
    if subject.parts.gnn is None:
        return found
    done = {row["k"] for row in found["graph_k"]}
    for k in (k for k in GRAPH_KS if k <= subject.test.table.k and k not in done):
        found["graph_k"].append(_graph_row(subject, k))
        draft.commit()
    return found


def _graph_row(subject: Subject, k: int) -> dict[str, Any]:
    predictor = replace(subject.parts.predictor, graph_k=k)
    names = ("gnn", "gnn_knn")
    began = time.perf_counter()
    scores, seconds = score_text(predictor, subject.test, subject.config.eval.block, f"score test with k = {k}", names)
    took = time.perf_counter() - began
    base, tokens = subject.scores["base"], len(subject.positions_N)
    encode = subject.report.seconds["encode"]
    return {
        "k": k,
        **subject.changed(scores["gnn"], base),
        "gnn_knn": subject.changed(scores["gnn_knn"], base),
        "memory_mb": network_bytes(subject, predictor) / 1e6,
        "tokens_per_s": tokens / (encode + seconds["gnn"] + seconds["head"] / len(names)),
        "gnn_tokens_per_s": tokens / seconds["gnn"],
        "seconds": took,
    }


def _base_speed(subject: Subject) -> dict[str, float]:
    """The base model's speed as the report has it, and the memory that it takes for as many tokens."""
    return {"memory_mb": base_bytes(subject) / 1e6, "tokens_per_s": subject.report.rows["base"].tokens_per_second}


def _knn_rows(subject: Subject, scored: ScoredSplit) -> Rows:
    rows, predictor = [], subject.parts.predictor
    for k in (k for k in KNN_KS if k <= subject.test.table.k):
        row: dict[str, Any] = {"k": k}
        for name in (name for name in scored.names if name in MIXED):
            row[name] = subject.changed(knn_scores(subject, scored, predictor, name, k), subject.scores["base"])
        rows.append(row)
    return rows


def knn_scores(subject: Subject, scored: ScoredSplit, predictor: Predictor, name: str, k: int) -> Floats:
    """Log-probabilities of the test tokens under a mixed predictor with another k; all else as tuned."""
    state = STATE_OF[name]
    return scored.mixed(subject, state, replace(predictor.mixes[state], k=k))


def show(found: dict[str, Any]) -> Section:
    base, graph, knn = found["base"], found["graph_k"], found["knn_k"]
    tables, figures, said = [], [], []
    if graph:
        columns = [
            text("k"),
            perplexity("+GNN"),
            text("change, 95%"),
            perplexity("+GNN+kNN"),
            text("change, 95% "),
            number("memory (MB)", 0),
            number("tokens/s", 0),
            number("network alone, tokens/s", 0),
        ]
        first: list[list[Cell]] = [
            ["base", base["ppl"], "", base["ppl"], "", base["memory_mb"], base["tokens_per_s"], None]
        ]
        tables.append(Table("graph_k", "Neighbours in the graph", columns, first + [_row(row) for row in graph]))
        figures.append(_graph_figure(base, graph))
        low, high = graph[0], graph[-1]
        falls = all(b["ppl"] <= a["ppl"] for a, b in itertools.pairwise(graph))
        said.append(
            f"From {low['k']} to {high['k']} neighbours in the graph, perplexity of +GNN goes from {low['ppl']:.2f} to "
            f"{high['ppl']:.2f}{', falling all the way as in the paper' if falls and len(graph) > 1 else ''}, and the "
            f"network's own speed from {low['gnn_tokens_per_s']:,.0f} to {high['gnn_tokens_per_s']:,.0f} tokens/s."
        )
    names = [name for name in knn[0] if name != "k"]
    columns = [text("k")]
    for name in names:
        columns += [perplexity(LABELS[name]), text(f"{LABELS[name]}: change, 95%")]
    rows: list[list[Cell]] = []
    for row in knn:
        rows.append([str(row["k"])])
        for name in names:
            rows[-1] += [row[name]["ppl"], change_of(row[name])]
    tables.append(Table("knn_k", "Neighbours in the kNN distribution", columns, rows))
    figures.append(_knn_figure(found))
    best = {name: min(knn, key=lambda row: row[name]["ppl"]) for name in names}
    said += [
        f"{LABELS[name]} is best with k = {row['k']:,} in kNN ({row[name]['ppl']:.2f}); valid chose "
        f"{found['chosen'][name]:,}."
        for name, row in best.items()
    ]
    return Section(
        "neighbours",
        "Number of neighbours",
        [
            "Network and mix are those of the run; only k changes. Memory is the peak of tensors for "
            f"{MEASURED} tokens. Speed counts the base model's reading, the network and the softmax, not search, which "
            "the paper makes beforehand. The paper finds its model 8 to 20 times slower than the base model, and "
            "perplexity falling from k = 8 to 128.",
            *said,
        ],
        tables,
        figures,
        said[:1],
    )


def _row(row: dict[str, Any]) -> list[Cell]:
    both = row["gnn_knn"]
    return [str(row["k"]), row["ppl"], change_of(row), both["ppl"], change_of(both), row["memory_mb"],
            row["tokens_per_s"], row["gnn_tokens_per_s"]]  # fmt: skip


def _graph_figure(base: dict[str, Any], graph: Rows) -> Figure:
    figure, panels = axes_of(3)
    ks = [row["k"] for row in graph]
    for axes, key, title in zip(
        panels, ("memory_mb", "tokens_per_s", "ppl"), ("memory (MB)", "tokens/s", "perplexity"), strict=True
    ):
        line_of(axes, "gnn", ks, [row[key] for row in graph])
        if key == "ppl":
            line_of(axes, "gnn_knn", ks, [row["gnn_knn"]["ppl"] for row in graph])
        axes.axhline(base[key], color="#666666", ls="--", label="base")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.set_xlabel("k in the graph")
        axes.set_title(title, fontsize=10)
        if key != "ppl":
            axes.set_ylim(bottom=0)
    panels[2].legend(frameon=False, fontsize=9)
    words = ", ".join(f"{row['ppl']:.2f} at k = {row['k']}" for row in graph)
    return Figure("graph_k", "Memory, speed and perplexity by k in the graph", f"Perplexity of +GNN: {words}.", figure)


def _knn_figure(found: dict[str, Any]) -> Figure:
    figure, (axes,) = axes_of(1)
    rows = found["knn_k"]
    ks, names = [row["k"] for row in rows], [name for name in rows[0] if name != "k"]
    for name in names:
        line_of(axes, name, ks, [row[name]["ppl"] for row in rows])
        axes.axvline(found["chosen"][name], color="#999999", lw=0.8)
    axes.axhline(found["base"]["ppl"], color="#666666", ls="--", label="base")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k of kNN (thin lines: chosen on valid)")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False, fontsize=9)
    ends = "; ".join(
        f"{LABELS[name]} {rows[0][name]['ppl']:.2f} at k = {ks[0]}, {rows[-1][name]['ppl']:.2f} at k = {ks[-1]}"
        for name in names
    )
    return Figure("knn_k", "Perplexity by k of kNN", f"Perplexity: {ends}.", figure)
