"""Figures are drawn whatever the figures are."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from gnnlm.evaluate.plots import plot_rows
from gnnlm.predict.predictor import PREDICTORS


@pytest.mark.parametrize(
    ("ppl", "interval"),
    [
        (10.0, [9.0, 11.0]),
        (10.0, [11.0, 12.0]),  # an interval of few resamplings may miss the value itself
        (10.0, [8.0, 9.0]),
        (1.0, [1.0, 1.0]),
        (10.0, [9.0, None]),
        (None, [None, None]),
        (1e300, [1e300, 1e304]),
    ],
)
def test_rows(tmp_path: Path, ppl: float | None, interval: list[float | None]) -> None:
    rows = {name: {"ppl": ppl, "ppl_95": interval, "change": 0.0} for name in PREDICTORS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_rows({"rows": rows, "test_tokens": 1, "store_tokens": 1}, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000
