"""Figures: the four rows, and how training went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnnlm.predict.predictor import LABELS, PREDICTORS, perplexity

TALLEST = 1e9  # a larger perplexity says nothing, and the axis cannot show it
COLOURS = {"base": "#9aa5b1", "knn": "#6baed6", "gnn": "#fd8d3c", "gnn_knn": "#31a354"}


def plot_rows(report: dict[str, Any], path: Path) -> None:
    """Perplexity of the four predictors with their 95% intervals."""
    figure, axes = _axes()
    highest = 1.0
    for place, name in enumerate(PREDICTORS):
        row = report["rows"][name]
        if any(value is None or value > TALLEST for value in (row["ppl"], *row["ppl_95"])):
            axes.text(place, 0, "infinite" if row["ppl"] is None else f"{row['ppl']:.3g}", ha="center", va="bottom")
            continue
        low, high = min(row["ppl"], row["ppl_95"][0]), max(row["ppl"], row["ppl_95"][1])  # few samples may miss it
        highest = max(highest, high)
        axes.bar(place, row["ppl"], color=COLOURS[name], width=0.65)
        axes.errorbar(place, row["ppl"], yerr=[[row["ppl"] - low], [high - row["ppl"]]], color="#333", capsize=4, lw=1)
        change = "" if name == "base" else f"\n{100 * row['change']:+.1f}%"
        axes.text(place, high * 1.01, f"{row['ppl']:.2f}{change}", ha="center", va="bottom")
    axes.set_xticks(range(len(PREDICTORS)), [LABELS[name] for name in PREDICTORS])
    axes.set_ylim(0, 1.18 * highest)
    axes.set_ylabel("test perplexity")
    axes.set_title(f"{report['test_tokens']:,} test tokens, {report['store_tokens']:,} in the store", fontsize=10)
    _save(figure, path)


def plot_training(history: list[dict[str, Any]], best_step: int, path: Path) -> None:
    """Validation perplexity of the GNN against the base model, and the training loss."""
    figure, axes = _axes()
    steps = [entry["step"] for entry in history]
    valid = [perplexity(entry["valid_gnn"]) for entry in history]
    axes.plot(steps, valid, "o-", color=COLOURS["gnn"], label="valid, GNN")
    axes.axhline(perplexity(history[0]["valid_base"]), color=COLOURS["base"], ls="--", label="valid, base")
    trained = [entry for entry in history if entry["loss"] is not None]
    losses = [perplexity(entry["loss"]) for entry in trained]
    axes.plot([entry["step"] for entry in trained], losses, ":", color="#333", label="train")
    axes.axvline(best_step, color=COLOURS["gnn_knn"], lw=1, label=f"best: step {best_step}")
    axes.set_xlabel("step")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False)
    _save(figure, path)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no global state, no display

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
