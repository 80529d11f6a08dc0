"""Figures of whatever a report and a history can hold."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnlm.evaluate import plots
from gnnlm.evaluate.plots import plot_rows, plot_training
from gnnlm.evaluate.report import Report
from gnnlm.predict.predictor import PREDICTORS
from tests.evaluate.reports import make_report


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved, to look into."""
    saved: list[Any] = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (saved.append(figure), save(figure, path)))
    return saved


def report(**changes: dict[str, Any]) -> Report:
    """A report of the four rows with some of their figures changed."""
    return make_report({name: changes.get(name, {}) for name in PREDICTORS})


def texts(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def changed(change: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"change": change, "change_low": low, "change_high": high}


def test_changes_with_their_intervals(tmp_path: Path, figures: list[Any]) -> None:
    plot_rows(report(knn=changed(-0.1, -0.125, -0.08), gnn=changed(0.02, -0.01, 0.05)), tmp_path / "rows.png")
    (axes,) = figures[0].axes
    assert [label.get_text().split("\n")[0] for label in axes.get_yticklabels()] == ["+kNN", "+GNN", "+GNN+kNN"]
    assert texts(figures[0])[:2] == ["-10.0% (-12.5 to -8.0)", "+2.0% (-1.0 to +5.0)"]
    bars = [line.get_xdata() for line in axes.get_lines() if line.get_linestyle() == "-"]
    np.testing.assert_allclose(bars[:2], [[-12.5, -8], [-1, 5]])
    points = [line for line in axes.get_lines() if line.get_label() in ("+kNN", "+GNN", "+GNN+kNN")]
    assert [line.get_xdata()[0] for line in points] == pytest.approx([-10, 2, 0])
    assert len({line.get_marker() for line in points}) == 3  # readable without colours
    left, right = axes.get_xlim()
    assert left < -12.5 < 5 < right


@pytest.mark.parametrize("interval", [(-0.4, -0.3), (0.0, 0.0), (-1.0, 1e300), (None, None)])
def test_odd_figures(tmp_path: Path, interval: tuple[float | None, float | None]) -> None:
    """An interval of few resamplings may miss the value itself, or be one point, or none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_rows(report(**{name: changed(0.0, *interval) for name in PREDICTORS}), tmp_path / "rows.png")
    assert is_png(tmp_path / "rows.png")


def test_missing_values(tmp_path: Path, figures: list[Any]) -> None:
    plot_rows(report(knn=changed(None), gnn=changed(1e300)), tmp_path / "one.png")
    assert texts(figures[0]) == ["  infinite", "  +1e+302%", "+0.0% (-1.0 to +1.0)"]
    infinite = {"ppl": None, "ppl_95": [None, None], **changed(None)}
    plot_rows(report(**dict.fromkeys(PREDICTORS, infinite)), tmp_path / "all.png")
    assert texts(figures[1]) == ["  infinite"] * 3
    assert all(is_png(path) for path in tmp_path.iterdir())


def test_fewer_rows(tmp_path: Path, figures: list[Any]) -> None:
    plot_rows(make_report({"base": {}, "knn": {}}), tmp_path / "rows.png")
    plot_rows(make_report({"base": {}}), tmp_path / "base.png")
    assert [len(figure.axes[0].get_yticklabels()) for figure in figures] == [1, 0]


def entry(step: int, **losses: float) -> dict[str, Any]:
    return {"step": step, "loss": None, "valid_base": 3.0, **losses}


def test_training_shows_what_can_be_compared(tmp_path: Path, figures: list[Any]) -> None:
    history = [
        {**entry(step, valid_gnn=3 - 0.02 * step), "loss": 9.0, "train_base": 2.0, "train_gnn": 2 - 0.04 * step}
        for step in (0, 5, 10)
    ]
    plot_training(history, 10, tmp_path / "training.png")
    above, below = figures[0].axes
    assert above.get_title() == "Training the graph network"
    assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == (
        "validation perplexity",
        "change against base model (%)",
        "training step",
    )
    lines = {line.get_label(): line for axes in (above, below) for line in axes.get_lines()}
    assert lines["GNN"].get_ydata()[-1] == pytest.approx(math.exp(2.8))
    np.testing.assert_allclose(lines["validation text"].get_ydata(), 100 * np.expm1([0.0, -0.1, -0.2]))
    np.testing.assert_allclose(lines["training text, a fixed sample"].get_ydata(), 100 * np.expm1([0.0, -0.2, -0.4]))
    assert not any(math.exp(9.0) in line.get_ydata() for line in lines.values())  # the loss of unlike steps


def test_training_shows_the_interval_on_valid(tmp_path: Path, figures: list[Any]) -> None:
    history = [entry(step, valid_gnn=3.0, valid_change_low=-0.2, valid_change_high=0.1) for step in (0, 5)]
    plot_training(history, 0, tmp_path / "training.png")
    (band,) = figures[0].axes[1].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((-20, 10))


def test_a_history_of_an_older_version(tmp_path: Path, figures: list[Any]) -> None:
    plot_training([entry(0, valid_gnn=3.0), entry(5, valid_gnn=900.0)], 0, tmp_path / "training.png")
    assert "training text, a fixed sample" not in [line.get_label() for line in figures[0].axes[1].get_lines()]
    assert is_png(tmp_path / "training.png")
