"""Curves of loss against size: numpy and scipy as oracles, and which of the two is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.evaluate.analysis.curve import fit_curves, log_curve, power_curve

SIZES = [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]


def noise(seed: int, scale: float = 0.003) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=len(SIZES))


@given(st.integers(0, 1000))
def test_the_logarithm_against_numpy(seed: int) -> None:
    loss = 2.5 - 0.04 * np.log(SIZES) + noise(seed)
    slope, intercept = np.polyfit(np.log(SIZES), loss, 1)
    curve = log_curve(SIZES, loss.tolist())
    assert (curve.a, curve.b) == pytest.approx((intercept, slope))
    residuals = loss - intercept - slope * np.log(SIZES)
    assert curve.error == pytest.approx(np.sqrt((residuals**2).sum() / 5))


@pytest.mark.parametrize(("a", "b", "c"), [(2.0, 0.3, 0.2), (1.0, 0.01, 1.1), (3.0, -0.05, 0.4)])
def test_the_power_is_recovered(a: float, b: float, c: float) -> None:
    curve = power_curve(SIZES, [a + b * x**-c for x in SIZES])
    assert (curve.a, curve.b, curve.c) == pytest.approx((a, b, c), rel=1e-4)
    assert curve.at(10.0) == pytest.approx(a + b * 10**-c)


@pytest.mark.parametrize("seed", range(5))
def test_the_power_against_scipy(seed: int) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    loss = 2.2 + 0.1 * np.power(SIZES, -0.35) + noise(seed)
    wanted, _ = optimize.curve_fit(lambda x, a, b, c: a + b * x**-c, SIZES, loss, p0=(2.0, 0.1, 0.3), maxfev=20_000)
    curve = power_curve(SIZES, loss.tolist())
    assert (curve.a, curve.b, curve.c) == pytest.approx(tuple(wanted), rel=2e-3)


def test_the_better_curve_is_taken() -> None:
    bent = [2.0 + 0.02 * x**-0.8 for x in SIZES]
    straight = [2.0 - 0.05 * np.log(x) + e for x, e in zip(SIZES, noise(0, 1e-3), strict=True)]
    assert [curve.kind for curve in fit_curves(SIZES, bent) if curve] == ["power", "log"]
    assert [curve.kind for curve in fit_curves(SIZES, straight) if curve] == ["log", "power"]


def test_few_points_get_the_simple_curve() -> None:
    best, other = fit_curves(SIZES[:4], [2.0 + 0.02 * x**-0.8 for x in SIZES[:4]])
    assert best.kind == "log"
    assert other is None
