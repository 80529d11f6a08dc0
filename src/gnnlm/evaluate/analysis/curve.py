"""Curves of loss against size, by least squares.

    log:    loss = a + b ln(x)
    power:  loss = a + b x^-c

x is the size relative to the largest. With c given, both are linear in a and b, so only c is searched for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnnlm.predict.bootstrap import Floats

POWERS = (0.01, 5.0)  # the exponents that are tried; towards 0 the power becomes the logarithm
ROUNDS, TRIED = 6, 60  # the exponents are tried in finer and finer steps
POINTS = 5  # the fewest that a third parameter is fitted to


@dataclass(frozen=True)
class Curve:
    """A fitted curve; `error` is the standard deviation of the residuals, its parameters taken into account."""

    kind: str
    a: float
    b: float
    c: float
    error: float

    def at(self, x: float) -> float:
        """
        >>> Curve("log", 3.0, -0.5, 0.0, 0.0).at(1.0), Curve("power", 2.0, 1.0, 1.0, 0.0).at(4.0)
        (3.0, 2.25)
        """
        return self.a + self.b * (math.log(x) if self.kind == "log" else x**-self.c)


def log_curve(x: Sequence[float], loss: Sequence[float]) -> Curve:
    sizes = np.log(np.asarray(x, dtype=np.float64))
    a, b, squares = _linear(sizes, np.asarray(loss, dtype=np.float64))
    return Curve("log", a, b, 0.0, _error(squares, len(sizes) - 2))


def power_curve(x: Sequence[float], loss: Sequence[float]) -> Curve:
    """The best of the curves with each exponent."""
    sizes = np.asarray(x, dtype=np.float64)
    y = np.asarray(loss, dtype=np.float64)
    low, high = POWERS
    for _ in range(ROUNDS):
        tried = np.geomspace(low, high, TRIED)
        best = int(np.argmin([_linear(sizes**-c, y)[2] for c in tried]))
        low, high = float(tried[max(0, best - 1)]), float(tried[min(TRIED - 1, best + 1)])
    c = float(tried[best])
    a, b, squares = _linear(sizes**-c, y)
    return Curve("power", a, b, c, _error(squares, len(sizes) - 3))


def fit_curves(x: Sequence[float], loss: Sequence[float]) -> tuple[Curve, Curve | None]:
    """The curve that fits better, and the other one; the power only where there are enough points for it."""
    simple = log_curve(x, loss)
    if len(x) < POINTS:
        return simple, None
    power = power_curve(x, loss)
    inside = POWERS[0] * 1.01 < power.c < POWERS[1] / 1.01
    return (power, simple) if inside and power.error < simple.error else (simple, power)


def _linear(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Intercept, slope and the sum of squared residuals."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    intercept = float(y.mean() - slope * x.mean())
    return intercept, slope, float(np.square(y - intercept - slope * x).sum())


def _error(squares: float, freedom: int) -> float:
    return math.sqrt(squares / freedom) if freedom > 0 else 0.0
