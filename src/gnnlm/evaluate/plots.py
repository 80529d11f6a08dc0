"""Figures: the rows of a report, and the course of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnnlm.artifact import writing
from gnnlm.evaluate.change import short
from gnnlm.evaluate.report import Report
from gnnlm.predict.predictor import LABELS, perplexity

COLOURS = {"base": "#666666", "knn": "#0072b2", "gnn": "#d55e00", "gnn_knn": "#009e73"}  # told apart without hue too
MARKERS = {"knn": "s", "gnn": "D", "gnn_knn": "o"}
DARK = "#333333"
WIDEST = 1e4  # percent; a larger change is meaningless, and the axis cannot show it


def plot_rows(report: Report, path: Path) -> None:
    """The figure of a report's rows, as a file."""
    _save(rows_figure(report), path)


def rows_figure(report: Report) -> Any:
    """The change of perplexity against base of each predictor, in percent, with its 95% interval."""
    names = [name for name in report.predictors if name != "base"]
    figure, (axes,) = _axes(1, height=1.5 + 0.6 * max(1, len(names)))
    ends = [0.0]
    for place, name in enumerate(names):
        row, colour = report.rows[name], COLOURS.get(name, DARK)
        change = None if row.change is None else 100 * row.change
        if change is None or change > WIDEST:
            axes.text(0, place, "  infinite" if change is None else f"  {change:+.3g}%", va="center")
            continue
        low, high = (change if end is None else min(WIDEST, 100 * end) for end in (row.change_low, row.change_high))
        axes.plot([low, high], [place, place], color=colour, lw=2.5, solid_capstyle="butt")
        axes.plot([low, high], [place, place], "|", color=colour, ms=12, mew=2)
        axes.plot(change, place, MARKERS.get(name, "^"), color=colour, ms=8, mec="white", label=LABELS[name])
        axes.annotate(row.change_words, (change, place), (0, 9), textcoords="offset points", ha="center", fontsize=9)
        ends += [low, change, high]
    left, right = min(ends), max(ends)
    room = 0.3 * (right - left) or 1.0  # for the words over a point at the edge
    axes.set_xlim(left - room, right + room)
    axes.set_ylim(len(names) - 0.4, -0.8)
    axes.axvline(0, color=COLOURS["base"], ls="--", lw=1)
    axes.set_yticks(range(len(names)), [f"{LABELS[name]}\n{short(report.rows[name].ppl)}" for name in names])
    axes.set_xlabel(
        f"change of test perplexity against base ({short(report.rows['base'].ppl)}) in %, with 95% interval"
    )
    axes.set_title(f"{report.test_tokens:,} test tokens, {report.store_tokens:,} in the store", fontsize=10)
    return figure


def plot_training(history: Sequence[Mapping[str, Any]], best_step: int, path: Path) -> None:
    """Above, the validation perplexity of GNN and base model; below, the GNN's change on valid and on train text.

    The change on valid text has its 95% interval; the sample of train text is too small for one.

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
    shown = [entry for entry in history if "valid_change_low" in entry]
    if shown:
        ends = [[100 * entry[f"valid_change_{end}"] for entry in shown] for end in ("low", "high")]
        below.fill_between([entry["step"] for entry in shown], *ends, color=COLOURS["gnn"], alpha=0.2, lw=0,
                           label="validation text, 95% interval")  # fmt: skip
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
    with writing(path):
        figure.savefig(path, dpi=130, metadata={"Software": None})
