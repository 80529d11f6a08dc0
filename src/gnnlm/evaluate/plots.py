"""Figures: the rows of a report, and the course of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnnlm.evaluate.report import Report
from gnnlm.predict.predictor import LABELS, perplexity

TALLEST = 1e9  # a larger perplexity is meaningless, and the axis cannot show it
COLOURS = {"base": "#9aa5b1", "knn": "#6baed6", "gnn": "#fd8d3c", "gnn_knn": "#31a354"}
DARK = "#333333"


def plot_rows(report: Report, path: Path) -> None:
    """Perplexity of each predictor in the report, with its 95% interval."""
    figure, (axes,) = _axes(1, height=4.0)
    tops = []
    for place, name in enumerate(report.predictors):
        row = report.rows[name]
        ends = [row.ppl if end is None else end for end in row.ppl_95]
        if row.ppl is None or any(end is None or end > TALLEST for end in ends):
            axes.text(place, 0, "infinite" if row.ppl is None else f"{row.ppl:.3g}", ha="center", va="bottom")
            continue
        below, above = (max(0.0, sign * (row.ppl - (end or 0))) for sign, end in zip((1, -1), ends, strict=True))
        axes.bar(place, row.ppl, color=COLOURS[name], width=0.65)
        axes.errorbar(place, row.ppl, yerr=[[below], [above]], color=DARK, capsize=4, lw=1)
        plain = name == "base" or row.change is None
        words = f"{row.ppl:.2f}" if plain else f"{row.ppl:.2f}\n{100 * (row.change or 0):+.1f}%"
        axes.text(place, 1.01 * (row.ppl + above), words, ha="center", va="bottom")
        tops.append(row.ppl + above)
    axes.set_xlim(-0.6, len(report.rows) - 0.4)
    axes.set_xticks(range(len(report.rows)), [LABELS[name] for name in report.predictors])
    axes.set_ylim(0, 1.18 * max(tops, default=1.0))
    axes.set_ylabel("test perplexity")
    axes.set_title(f"{report.test_tokens:,} test tokens, {report.store_tokens:,} in the store", fontsize=10)
    _save(figure, path)


def plot_training(history: Sequence[Mapping[str, Any]], best_step: int, path: Path) -> None:
    """Above, the validation perplexity of GNN and base model; below, the GNN's change on valid and on train text.

    The loss of the training steps is not shown: each step reads different text, so the losses cannot be compared.
    """
    figure, (above, below) = _axes(2, height=6.0)
    steps = [entry["step"] for entry in history]
    for name, label, style in (("valid_gnn", "GNN", "o-"), ("valid_base", "base model", "--")):
        values = [perplexity(entry[name]) for entry in history]
        above.plot(steps, values, style, color=COLOURS[name.removeprefix("valid_")], ms=4, label=label)
    above.set_ylabel("validation perplexity")
    above.set_title("Training the graph network", fontsize=11)
    for part, label, style, colour in (
        ("valid", "validation text", "o-", COLOURS["gnn"]),
        ("train", "training text, a fixed sample", "s:", DARK),
    ):
        known = [entry for entry in history if f"{part}_gnn" in entry]
        changes = [100 * (perplexity(entry[f"{part}_gnn"] - entry[f"{part}_base"]) - 1) for entry in known]
        if known:
            below.plot([entry["step"] for entry in known], changes, style, color=colour, ms=4, label=label)
    below.axhline(0, color=COLOURS["base"], ls="--", label="base model")
    below.set_ylabel("change against base model (%)")
    below.set_xlabel("training step")
    for axes in (above, below):
        axes.axvline(best_step, color=COLOURS["gnn_knn"], lw=1, label=f"kept: step {best_step}")
        axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _axes(count: int, height: float) -> tuple[Any, list[Any]]:
    """A figure with this many panels, one below the other, that share their x axis."""
    from matplotlib.figure import Figure  # no global state, no display

    figure = Figure(figsize=(6.4, height), layout="constrained")
    panels = list(figure.subplots(count, sharex=True, squeeze=False)[:, 0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
