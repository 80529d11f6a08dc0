"""Calibration: whether a predictor is right as often as it is confident.

At each test token, the likeliest token has a probability, its confidence, and is right or not. Tokens are sorted by
confidence and cut into bins of the same size; in each, the mean confidence is set against the share that is right.

    expected calibration error = sum over bins of (tokens in the bin / all tokens) |share right - mean confidence|

Shapes: N tokens, B bins, M documents, S resamples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gnnlm.evaluate.analysis.figure import axes_of, legend_of, line_of
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.table import Table, number, percent, text
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS

BINS = 15
Right = npt.NDArray[np.bool_]


class CalibrationBin(PartResult):
    tokens: int
    confidence: float
    right: float


class ErrorChange(PartResult):
    """The difference of an error to that of base, with its paired 95% interval."""

    change: float
    low: float
    high: float

    @property
    def words(self) -> str:
        return f"{self.change:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


class PredictorCalibration(PartResult):
    """The expected calibration error of a predictor, its mean confidence, and how often it is right."""

    error: float
    confidence: float
    right: float
    curve: list[CalibrationBin]
    against_base: ErrorChange | None

    @property
    def gap(self) -> float:
        return self.confidence - self.right


class CalibrationResult(PartResult):
    bins: int
    tokens: int
    predictors: dict[str, PredictorCalibration]


def bins_of(confidence_N: Floats, bins: int) -> Ints:
    """The bin of each token: the same number of tokens in each, up to one, in the order of confidence.

    >>> bins_of(np.array([0.9, 0.1, 0.5, 0.2]), 2).tolist()
    [1, 0, 1, 0]
    """
    bin_N = np.empty(len(confidence_N), dtype=np.int64)
    for place, members in enumerate(np.array_split(np.argsort(confidence_N, kind="stable"), bins)):
        bin_N[members] = place
    return bin_N


def reliability(confidence_N: Floats, right_N: Right, bins: int = BINS) -> list[CalibrationBin]:
    """The bins of some tokens; there are at most as many bins as tokens."""
    bin_N = bins_of(confidence_N, bins)
    members = [bin_N == place for place in range(min(bins, len(confidence_N)))]
    return [
        CalibrationBin(
            tokens=int(here.sum()), confidence=float(confidence_N[here].mean()), right=float(right_N[here].mean())
        )
        for here in members
    ]


def calibration_error(curve: list[CalibrationBin]) -> float:
    """The expected calibration error of some bins."""
    gaps = sum(each.tokens * abs(each.right - each.confidence) for each in curve)
    return gaps / sum(each.tokens for each in curve)


def error_draws(
    confidence_N: Floats, right_N: Right, document_N: Ints, samples: int, seed: int, bins: int = BINS
) -> Floats:
    """The calibration error in each resample of the documents, [S]; the bins stay those of all tokens.

    With one seed the same documents are drawn, so that two predictors' errors can be subtracted. An error is a sum of
    distances, which resampling makes larger, and most where it is small: the difference errs against the better one.
    """
    number_N = np.unique(document_N, return_inverse=True)[1]
    count = int(number_N.max()) + 1
    gaps_MB = np.zeros((count, bins))
    np.add.at(gaps_MB, (number_N, bins_of(confidence_N, bins)), right_N - confidence_N)
    sizes_M = np.bincount(number_N, minlength=count)
    rng = np.random.default_rng(seed)
    draws = (rng.integers(count, size=count) for _ in range(samples))
    return np.array([np.abs(gaps_MB[d].sum(0)).sum() / sizes_M[d].sum() for d in draws])


def measure(subject: Subject, scores: CachedScores) -> CalibrationResult:
    predictors: dict[str, PredictorCalibration] = {}
    draws: dict[str, Floats] = {}
    targets = subject.targets_N.numpy()
    samples = subject.config.eval.bootstrap
    for name in scores.names:
        likeliest = scores.confidence(name)
        confidence = np.exp(likeliest.log_prob.double().numpy()).clip(max=1.0)
        right = likeliest.token.numpy() == targets
        curve = reliability(confidence, right)
        error = calibration_error(curve)
        draws[name] = error_draws(confidence, right, subject.document_N, samples, subject.seed)
        against = None
        if name != "base":
            low, high = np.quantile(draws[name] - draws["base"], (0.025, 0.975))
            against = ErrorChange(change=error - predictors["base"].error, low=float(low), high=float(high))
        predictors[name] = PredictorCalibration(
            error=error,
            confidence=float(confidence.mean()),
            right=float(right.mean()),
            curve=curve,
            against_base=against,
        )
    return CalibrationResult(bins=BINS, tokens=len(targets), predictors=predictors)


def show(result: CalibrationResult) -> AnalysisSection:
    table = Table.of(
        "calibration",
        "Calibration of the predictors",
        result.predictors.items(),
        text("predictor", lambda line: LABELS[line[0]]),
        percent("likeliest token is right", lambda line: line[1].right),
        percent("mean confidence", lambda line: line[1].confidence),
        percent("too confident by", lambda line: line[1].gap, sign=True),
        number("calibration error", lambda line: line[1].error, 4),
        text("against base, 95%", lambda line: "" if line[1].against_base is None else line[1].against_base.words),
    )
    sides = [
        f"{LABELS[name]} is {'too confident' if one.gap > 0 else 'not confident enough'} by {100 * abs(one.gap):.1f} "
        "points on average."
        for name, one in result.predictors.items()
    ]
    finding = _finding(result)
    return AnalysisSection(
        [
            f"The probability of the likeliest token against how often it is right, over {result.tokens:,} test "
            f"tokens in {result.bins} bins of equal size. The expected calibration error is the mean distance of "
            "the two; its difference to base has a 95% interval by paired bootstrap over documents, with fixed bins.",
            " ".join(sides),
            finding,
        ],
        [table],
        [_figure(result)],
        [finding],
    )


def _finding(result: CalibrationResult) -> str:
    """Which predictor has the lowest error, and whether that is significant."""
    best = min(result.predictors, key=lambda name: result.predictors[name].error)
    one = result.predictors[best]
    said = f"{LABELS[best]} has the lowest calibration error ({one.error:.4f}"
    if one.against_base is None:
        return f"{said})."
    word = "significant" if one.against_base.high < 0 else "not significant"
    base = result.predictors["base"].error
    return f"{said}, base {base:.4f}); the difference, {one.against_base.words}, is {word}."


def _figure(result: CalibrationResult) -> Figure:
    titles = ("reliability (error in brackets)", "the same, as distance from the diagonal")
    figure, (curve, gap) = axes_of(2, height=3.8, titles=titles)
    curve.plot([0, 1], [0, 1], color="#999999", lw=0.8)
    gap.axhline(0, color="#999999", lw=0.8)
    for name, one in result.predictors.items():
        x = [each.confidence for each in one.curve]
        line_of(curve, name, x, [each.right for each in one.curve], f"{LABELS[name]} ({one.error:.4f})")
        line_of(gap, name, x, [100 * (each.right - each.confidence) for each in one.curve])
    curve.set(xlabel="mean confidence of a bin", ylabel="share right")
    gap.set(xlabel="mean confidence of a bin", ylabel="share right - confidence, in points")
    legend_of(curve, 8)
    errors = ", ".join(f"{LABELS[name]} {one.error:.4f}" for name, one in result.predictors.items())
    return Figure("calibration", "Reliability of the likeliest token", f"Calibration error: {errors}.", figure)


PART = AnalysisPart(
    "calibration",
    "Calibration",
    CalibrationResult,
    lambda m: measure(m.subject, m.scores("test")),
    show,
    lambda subject: 1 + subject.report.test_tokens / 1e5,
    after=("scored-test",),
)
