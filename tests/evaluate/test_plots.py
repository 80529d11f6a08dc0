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


def test_one_bootstrap_sample(tmp_path: Path) -> None:
    """The interval is then one point, which need not hold the figure."""
    plot_rows(report(base={"ppl_95": [11.0, 11.0]}, knn={"ppl_95": [9.0, 9.0]}), tmp_path / "rows.png")
    assert is_png(tmp_path / "rows.png")


@pytest.mark.parametrize(
    ("ppl", "interval"),
    [
        (10.0, (11.0, 12.0)),  # an interval of few resamplings may miss the value itself
        (10.0, (8.0, 9.0)),
        (1.0, (1.0, 1.0)),
        (1e300, (1e300, 1e304)),
    ],
)
def test_odd_figures(tmp_path: Path, ppl: float, interval: tuple[float, float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_rows(report(**{name: {"ppl": ppl, "ppl_95": interval} for name in PREDICTORS}), tmp_path / "rows.png")
    assert is_png(tmp_path / "rows.png")


def test_missing_values(tmp_path: Path, figures: list[Any]) -> None:
    infinite = {"ppl": None, "ppl_95": [None, None], "change": None}
    plot_rows(report(knn=infinite), tmp_path / "one.png")
    assert texts(figures[0])[1] == "infinite"
    nothing = {name: {"change": None} for name in PREDICTORS[1:]}
    plot_rows(report(base=infinite, **nothing), tmp_path / "base.png")  # nothing to compare with
    assert texts(figures[1]) == ["infinite", "10.00", "10.00", "10.00"]
    plot_rows(report(**dict.fromkeys(PREDICTORS, infinite)), tmp_path / "all.png")
    assert texts(figures[2]) == ["infinite"] * 4
    plot_rows(report(gnn={"ppl_95": [9.0, None]}), tmp_path / "half.png")  # some samples are infinite
    assert all(is_png(path) for path in tmp_path.iterdir())


def test_fewer_rows(tmp_path: Path, figures: list[Any]) -> None:
    plot_rows(make_report({"base": {}, "knn": {}}), tmp_path / "rows.png")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["base", "+kNN"]
    assert len(axes.patches) == 2


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


def test_a_history_of_an_older_version(tmp_path: Path, figures: list[Any]) -> None:
    plot_training([entry(0, valid_gnn=3.0), entry(5, valid_gnn=900.0)], 0, tmp_path / "training.png")
    assert "training text, a fixed sample" not in [line.get_label() for line in figures[0].axes[1].get_lines()]
    assert is_png(tmp_path / "training.png")
