"""Calibration against hand, loops and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.evaluate.analysis.calibration import (
    BINS,
    CalibrationResult,
    bins_of,
    calibration_error,
    error_draws,
    reliability,
    show,
)
from gnnlm.run import Run
from tests.evaluate.analysis.analysed import analysis_of, results_of, scored_of

SEEN = st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=40)


def test_by_hand() -> None:
    confidence, right = np.array([0.9, 0.2, 0.8, 0.4]), np.array([True, False, False, True])
    rows = reliability(confidence, right, bins=2)
    assert [row.model_dump() for row in rows] == [
        {"tokens": 2, "confidence": pytest.approx(0.3), "right": 0.5},
        {"tokens": 2, "confidence": pytest.approx(0.85), "right": 0.5},
    ]
    assert calibration_error(rows) == pytest.approx((2 * 0.2 + 2 * 0.35) / 4)


def error_by_loop(confidence: list[float], right: list[bool], bins: int) -> float:
    """Sort, deal out so that the first bins have one more, add up."""
    order = sorted(range(len(confidence)), key=lambda i: (confidence[i], i))
    size, more = divmod(len(order), bins)
    total, first = 0.0, 0
    for number in range(bins):
        members = order[first : first + size + (number < more)]
        first += len(members)
        if members:
            sure = sum(confidence[i] for i in members) / len(members)
            hits = sum(right[i] for i in members) / len(members)
            total += len(members) / len(order) * abs(hits - sure)
    return total


@given(SEEN, st.integers(1, 7))
def test_error_by_loop(seen: list[tuple[int, bool]], bins: int) -> None:
    confidence, right = [c / 20 for c, _ in seen], [r for _, r in seen]
    rows = reliability(np.array(confidence), np.array(right), bins)
    assert sum(row.tokens for row in rows) == len(seen)
    assert max(row.tokens for row in rows) - min(row.tokens for row in rows) <= 1
    assert calibration_error(rows) == pytest.approx(error_by_loop(confidence, right, bins), abs=1e-12)


def test_curve_is_scikit_learns() -> None:
    library = pytest.importorskip("sklearn.calibration")
    rng = np.random.default_rng(0)
    confidence = rng.uniform(size=300)
    right = rng.uniform(size=300) < confidence**2
    rows = reliability(confidence, right, 10)
    share, mean = library.calibration_curve(right, confidence, n_bins=10, strategy="quantile")
    assert [row.right for row in rows] == pytest.approx(share)
    assert [row.confidence for row in rows] == pytest.approx(mean)


def test_resampled_by_repeating_documents() -> None:
    rng = np.random.default_rng(1)
    confidence, document = rng.uniform(size=60), np.repeat([3, 5, 6, 9], [10, 20, 5, 25])
    right = rng.uniform(size=60) < 0.5
    found = error_draws(confidence, right, document, samples=8, seed=4, bins=3)
    bins, again = bins_of(confidence, 3), np.random.default_rng(4)
    for error in found:
        drawn = [i for d in again.integers(4, size=4) for i in np.flatnonzero(document == (3, 5, 6, 9)[d])]
        gaps = [abs(sum(float(right[i]) - confidence[i] for i in drawn if bins[i] == b)) for b in range(3)]
        assert error == pytest.approx(sum(gaps) / len(drawn))
    once = error_draws(confidence, right, np.zeros(60, dtype=np.int64), samples=2, seed=0, bins=3)
    assert once == pytest.approx(calibration_error(reliability(confidence, right, 3)))


def test_a_calibrated_predictor_and_a_boaster() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(size=40_000)
    right = rng.uniform(size=40_000) < confidence
    assert calibration_error(reliability(confidence, right)) < 0.015
    boast = np.full(40_000, 0.999)
    assert calibration_error(reliability(boast, right)) == pytest.approx(0.999 - right.mean())


def test_on_a_run(tiny_run: Run) -> None:
    found = results_of(tiny_run, "calibration")["calibration"]
    subject, scored = analysis_of(tiny_run.root).subject, scored_of(tiny_run)
    assert list(found["predictors"]) == ["base", "knn", "gnn", "gnn_knn"]
    for name, one in found["predictors"].items():
        right = sum(
            a == b for a, b in zip(scored.confidence(name).token.tolist(), subject.targets_N.tolist(), strict=True)
        )
        assert one["right"] == pytest.approx(right / found["tokens"])
        assert len(one["curve"]) == BINS
        change = one["error"] - found["predictors"]["base"]["error"]
        assert name == "base" or one["against_base"]["change"] == pytest.approx(change)
    section = show(CalibrationResult.model_validate(found))
    best = min(one["error"] for one in found["predictors"].values())
    assert f"lowest calibration error ({best:.4f}" in section.summary[0]
    assert section.tables[0].cells()[0][-1] == ""  # base has no change against base
