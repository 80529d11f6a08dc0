"""Calibration: whether a predictor is right as often as it is sure.

At each test token, the likeliest token has a probability, its confidence, and is right or not. Tokens are sorted by
confidence and cut into bins of the same size; in each, the mean confidence is set against the share that is right.

    expected calibration error = sum over bins of (tokens in the bin / all tokens) |share right - mean confidence|

Shapes: N tokens, B bins, M documents, S resamples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.evaluate.analysis.figure import axes_of, line_of
from gnnlm.evaluate.analysis.score_cache import ScoredSplit
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, number, percent, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS

BINS = 15
Right = npt.NDArray[np.bool_]


def bins_of(confidence_N: Floats, bins: int) -> Ints:
    """The bin of each token: the same number of tokens in each, up to one, in the order of confidence.

    >>> bins_of(np.array([0.9, 0.1, 0.5, 0.2]), 2).tolist()
    [1, 0, 1, 0]
    """
    bin_N = np.empty(len(confidence_N), dtype=np.int64)
    for place, part in enumerate(np.array_split(np.argsort(confidence_N, kind="stable"), bins)):
        bin_N[part] = place
    return bin_N


def reliability(confidence_N: Floats, right_N: Right, bins: int = BINS) -> list[dict[str, Any]]:
    """Tokens, mean confidence and share right of each bin; there are at most as many bins as tokens."""
    bin_N = bins_of(confidence_N, bins)
    rows = []
    for place in range(min(bins, len(confidence_N))):
        here = bin_N == place
        rows.append(
            {
                "tokens": int(here.sum()),
                "confidence": float(confidence_N[here].mean()),
                "right": float(right_N[here].mean()),
            }
        )
    return rows


def calibration_error(rows: list[dict[str, Any]]) -> float:
    """The expected calibration error of bins as `reliability` gives them."""
    gaps = sum(row["tokens"] * abs(row["right"] - row["confidence"]) for row in rows)
    return float(gaps / sum(row["tokens"] for row in rows))


def error_draws(
    confidence_N: Floats, right_N: Right, document_N: Ints, samples: int, seed: int, bins: int = BINS
) -> Floats:
    """The calibration error in each resample of the documents, [S]; the bins stay those of all tokens.

    With one seed the same documents are drawn, so that two predictors' errors can be subtracted. An error is a sum of
    distances, which resampling makes larger, and most where it is small: the difference errs against the better one.
    """
    number_N = np.unique(document_N, return_inverse=True)[1]
    count = int(number_N.max()) + 1
    gaps_MB, sizes_M = np.zeros((count, bins)), np.bincount(number_N, minlength=count)
    np.add.at(gaps_MB, (number_N, bins_of(confidence_N, bins)), right_N - confidence_N)
    rng = np.random.default_rng(seed)
    drawn = (rng.integers(count, size=count) for _ in range(samples))
    return np.array([np.abs(gaps_MB[d].sum(0)).sum() / sizes_M[d].sum() for d in drawn])


def measure(subject: Subject, scored: ScoredSplit) -> dict[str, Any]:
    found: dict[str, Any] = {"bins": BINS, "tokens": len(subject.positions_N), "predictors": {}}
    draws: dict[str, Floats] = {}
    targets, samples = subject.targets_N.numpy(), subject.config.eval.bootstrap
    for name in scored.names:
        sure = scored.sure(name)
        confidence = np.exp(sure.log_prob.double().numpy()).clip(max=1.0)
        right = sure.token.numpy() == targets
        rows = reliability(confidence, right)
        draws[name] = error_draws(confidence, right, subject.document_N, samples, subject.seed)
        error = calibration_error(rows)
        found["predictors"][name] = {
            "error": error,
            "confidence": float(confidence.mean()),
            "right": float(right.mean()),
            "curve": rows,
            "against_base": _against(draws, name, error, found),
        }
    return found


def _against(draws: dict[str, Floats], name: str, error: float, found: dict[str, Any]) -> dict[str, float]:
    """The difference of the error to that of base, with its paired 95% interval."""
    if name == "base":
        return {}
    low, high = np.quantile(draws[name] - draws["base"], (0.025, 0.975))
    return {"change": error - found["predictors"]["base"]["error"], "low": float(low), "high": float(high)}


def show(found: dict[str, Any]) -> Section:
    rows: list[list[Cell]] = []
    for name, one in found["predictors"].items():
        gap = one["confidence"] - one["right"]
        rows.append([LABELS[name], one["right"], one["confidence"], gap, one["error"], _words(one["against_base"])])
    columns = [
        text("predictor"),
        percent("likeliest token is right"),
        percent("mean confidence"),
        percent("too sure by", sign=True),
        number("calibration error", 4),
        text("against base, 95%"),
    ]
    best = min(found["predictors"], key=lambda name: found["predictors"][name]["error"])
    said = " ".join(_said(name, one) for name, one in found["predictors"].items())
    ending = _ending(best, found["predictors"])
    return Section(
        "calibration",
        "Calibration",
        [
            f"The probability of the likeliest token against how often it is right, over {found['tokens']:,} test "
            f"tokens in {found['bins']} bins of equal size. The expected calibration error is the mean distance of "
            "the two; its difference to base has a 95% interval by paired bootstrap over documents, with fixed bins.",
            said,
            ending,
        ],
        [Table("calibration", "Calibration of the predictors", columns, rows)],
        [_figure(found)],
        [ending],
    )


def _ending(best: str, predictors: dict[str, dict[str, Any]]) -> str:
    """Which predictor has the lowest error, and whether that is more than chance."""
    ending = f"{LABELS[best]} has the lowest calibration error ({predictors[best]['error']:.4f}"
    if best == "base":
        return f"{ending})."
    row = predictors[best]["against_base"]
    word = "significant" if row["high"] < 0 else "not significant"
    return f"{ending}, base {predictors['base']['error']:.4f}); the difference, {_words(row)}, is {word}."


def _said(name: str, one: dict[str, Any]) -> str:
    gap = one["confidence"] - one["right"]
    side = "too sure" if gap > 0 else "not sure enough"
    return f"{LABELS[name]} is {side} by {100 * abs(gap):.1f} points on average."


def _words(row: dict[str, float]) -> str:
    if not row:
        return ""
    return f"{row['change']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"


def _figure(found: dict[str, Any]) -> Figure:
    figure, (curve, gap) = axes_of(2, height=3.8)
    for axes in (curve, gap):
        axes.set_xlabel("mean confidence of a bin")
    curve.plot([0, 1], [0, 1], color="#999999", lw=0.8)
    gap.axhline(0, color="#999999", lw=0.8)
    for name, one in found["predictors"].items():
        x, y = [row["confidence"] for row in one["curve"]], [row["right"] for row in one["curve"]]
        line_of(curve, name, x, y, f"{LABELS[name]} ({one['error']:.4f})")
        line_of(gap, name, x, [100 * (right - sure) for sure, right in zip(x, y, strict=True)])
    curve.set_ylabel("share right")
    gap.set_ylabel("share right - confidence, in points")
    curve.set_title("reliability (error in brackets)", fontsize=10)
    gap.set_title("the same, as distance from the diagonal", fontsize=10)
    curve.legend(frameon=False, fontsize=8)
    errors = ", ".join(f"{LABELS[name]} {one['error']:.4f}" for name, one in found["predictors"].items())
    return Figure("calibration", "Reliability of the likeliest token", f"Calibration error: {errors}.", figure)
