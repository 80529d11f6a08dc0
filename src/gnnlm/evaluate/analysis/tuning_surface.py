"""Tuning surface: perplexity over lambda, T and k, on valid, where they are chosen, and on test.

The surface is that of one weight for all positions. What buckets or a gate add to it is in the second table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from gnnlm.evaluate.analysis.figure import heat_of, panels_of
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.table import Table, number, percent, perplexity, text
from gnnlm.evaluate.tune import Grid, LossTable, tune_mixes
from gnnlm.predict.bootstrap import Floats
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import LABELS, MIXED, STATE_OF

BEST = 0.1  # the share of the combinations, best on valid, whose order is also compared
SPLITS = ("valid", "test")


class SurfaceSlices(PartResult):
    """Perplexities on a split: with what valid chose, the best, without kNN, and around what valid chose.

    `temperature_lambda` is over T and lambda at the chosen k, `k_lambda` over k and lambda at the chosen T; `chosen` is
    the best combination of this split.
    """

    ppl: float
    best_ppl: float
    without_knn: float | None
    temperature_lambda: list[list[float]]
    k_lambda: list[list[float]]
    chosen: dict[str, Any]

    @classmethod
    def of(cls, table: LossTable, state: str, valid_mix: Mix, best: Mix) -> SurfaceSlices:
        losses_TkL = np.array(table.losses[state])
        t = table.temperatures.index(valid_mix.temperature)
        k = table.ks.index(valid_mix.k)
        weight = table.lambdas.index(valid_mix.weight)
        without = losses_TkL[0, 0, table.lambdas.index(0.0)] if 0.0 in table.lambdas else None
        return cls(
            ppl=float(np.exp(losses_TkL[t, k, weight])),
            best_ppl=float(np.exp(losses_TkL.min())),
            without_knn=None if without is None else float(np.exp(without)),
            temperature_lambda=np.exp(losses_TkL[:, k]).tolist(),
            k_lambda=np.exp(losses_TkL[t]).tolist(),
            chosen=best.as_dict(),
        )

    @property
    def point(self) -> str:
        chosen = self.chosen
        return f"k = {chosen['k']}, T = {chosen['temperature']:.3g}, lambda = {chosen['weight']:g}"


class WeightVariant(PerplexityChange):
    """A way to weigh kNN: its figures on test against base, and `against_one` weight for all positions."""

    variant: str
    valid_ppl: float | None
    used: bool
    against_one: PerplexityChange


class SurfaceAgreement(PartResult):
    """How well valid's losses foretell test's.

    `better` is the share of the combinations that are better on test than the one that is best on valid, `cost` how
    much higher perplexity is there than at test's own best, `ranks` and `ranks_best` the rank correlation of all
    combinations and of those that are best on valid.
    """

    better: float
    cost: float
    ranks: float
    ranks_best: float


class PredictorSurface(SurfaceAgreement):
    valid: SurfaceSlices
    test: SurfaceSlices
    weights: list[WeightVariant]


class SurfaceResult(PartResult):
    ks: list[int]
    temperatures: list[float]
    lambdas: list[float]
    predictors: dict[str, PredictorSurface]


def measure(subject: Subject, scores: CachedScores) -> SurfaceResult:
    tuned = subject.artifact("tune")
    valid = LossTable(**json.loads(tuned.text("tuning.json"))).ascending()
    states = {name: STATE_OF[name] for name in scores.names if name in MIXED}
    grid = Grid(valid.ks, valid.temperatures, valid.lambdas)
    log_probs = {state: scores.log_probs(state) for state in states.values()}
    _, test = tune_mixes(subject.test, subject.snapshot.store, log_probs, grid)
    predictors = {}
    for name, state in states.items():
        chosen = valid.best(state)
        best = test.best(state)
        agreement = compare_surfaces(np.array(valid.losses[state]), np.array(test.losses[state]))
        predictors[name] = PredictorSurface(
            **agreement.model_dump(),
            valid=SurfaceSlices.of(valid, state, chosen, chosen),
            test=SurfaceSlices.of(test, state, chosen, best),
            weights=_weights(subject, scores, tuned.facts, state, chosen),
        )
    return SurfaceResult(ks=valid.ks, temperatures=valid.temperatures, lambdas=valid.lambdas, predictors=predictors)


def _weights(
    subject: Subject, scores: CachedScores, tuned: Mapping[str, Any], state: str, chosen: Mix
) -> list[WeightVariant]:
    """One weight, and the ways to weigh kNN that were fitted beside it, on the test tokens."""
    mixes = {"one weight": chosen}
    losses = {}
    if "variants" in tuned:
        for variant, fitted in tuned["variants"][state].items():
            title = "one weight, another for first tokens" if variant == "one weight" else variant
            mixes[title] = Mix.of(fitted["mix"])
            losses[title] = float(np.exp(fitted["valid_loss"]))
    elif (mix := Mix.of(tuned["mix"][state])).weights:  # without a gate, buckets were not compared with one weight
        mixes["buckets"] = mix
    mixed = {title: scores.mixed(subject.test, subject.snapshot.store, state, mix) for title, mix in mixes.items()}
    return [
        WeightVariant(
            **subject.changed(mixed[title], subject.scores["base"]).model_dump(),
            variant=title,
            valid_ppl=losses.get(title),
            used=mix.as_dict() == tuned["mix"][state],
            against_one=subject.changed(mixed[title], mixed["one weight"]),
        )
        for title, mix in mixes.items()
    ]


def compare_surfaces(valid: Floats, test: Floats) -> SurfaceAgreement:
    """Compare the losses of the same combinations on valid and on test."""
    valid, test = valid.ravel(), test.ravel()
    chosen = test[valid.argmin()]
    best = np.argsort(valid, kind="stable")[: max(2, round(BEST * len(valid)))]
    return SurfaceAgreement(
        better=float((test < chosen).mean()),
        cost=float(np.expm1(chosen - test.min())),
        ranks=rank_correlation(valid, test),
        ranks_best=rank_correlation(valid[best], test[best]),
    )


def ranks_of(values: Floats) -> Floats:
    """The rank of each value, from 1; equal values share the mean of their ranks.

    >>> ranks_of(np.array([0.3, 0.1, 0.3])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: Floats = (last - (count - 1) / 2)[number]
    return ranks


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's: the correlation of ranks; 0 where all values of one side are equal.

    >>> rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([0.1, 0.3, 0.2]))
    0.5
    """
    x, y = ranks_of(a), ranks_of(b)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / size) if size else 0.0


def show(result: SurfaceResult) -> AnalysisSection:
    findings = [_finding(name, one) for name, one in result.predictors.items()]
    sentences = []
    for finding, (name, one) in zip(findings, result.predictors.items(), strict=True):
        sentences += [finding, _added(name, one.weights)]
    surface = Table.of(
        "surface",
        "What valid chose, on valid and on test",
        [
            line
            for name, one in result.predictors.items()
            for line in ((name, "valid", one.valid, None, None), (name, "test", one.test, one.cost, one.ranks))
        ],
        text("predictor", lambda line: LABELS[line[0]]),
        text("split", lambda line: line[1]),
        text("best on this split", lambda line: line[2].point),
        perplexity("its ppl", lambda line: line[2].best_ppl),
        perplexity("ppl of valid's choice", lambda line: line[2].ppl),
        perplexity("ppl without kNN", lambda line: line[2].without_knn),
        percent("valid's choice costs", lambda line: line[3], 2, sign=True),
        number("rank correlation", lambda line: line[4], 3),
    )
    weights = Table.of(
        "surface_weights",
        "What buckets or a gate add",
        [(name, place, row) for name, one in result.predictors.items() for place, row in enumerate(one.weights)],
        text("predictor", lambda line: LABELS[line[0]]),
        text("weight of kNN", lambda line: line[2].variant),
        text("used", lambda line: "yes" if line[2].used else ""),
        perplexity("valid ppl, cross-validated", lambda line: line[2].valid_ppl),
        perplexity("test ppl", lambda line: line[2].ppl),
        text("change against base, 95%", lambda line: line[2].words),
        text("change against one weight, 95%", lambda line: line[2].against_one.words if line[1] else ""),
    )
    return AnalysisSection(
        [
            f"Perplexity for {len(result.lambdas)} values of lambda, {len(result.temperatures)} of T and "
            f"{len(result.ks)} of k, with one weight for all positions. A cross marks what valid chose, a ring the "
            "lowest value of each panel. Colours end at the perplexity without kNN; hatched is worse than that, and "
            "larger weights that are worse throughout are not shown.",
            *sentences,
        ],
        [surface, weights],
        [_figure(result, name) for name in result.predictors],
        [findings[-1]],
    )


def _finding(name: str, one: PredictorSurface) -> str:
    return (
        f"{LABELS[name]}: what valid chose ({one.valid.point}) has perplexity {one.test.ppl:.2f} on test, "
        f"{100 * one.cost:.2f}% above test's own best ({one.test.point}: {one.test.best_ppl:.2f}); "
        f"{100 * one.better:.1f}% of the combinations are better there. The rank correlation of valid and test is "
        f"{one.ranks:.3f} over all combinations, and {one.ranks_best:.3f} over the tenth that is best on valid."
    )


def _added(name: str, weights: list[WeightVariant]) -> str:
    """What the ways to weigh kNN add on test to one weight."""
    if len(weights) == 1:
        return f"{LABELS[name]} uses one weight for all positions."
    rest = "; ".join(f"{row.variant} {row.against_one.words}" for row in weights[1:])
    used = next((row.variant for row in weights if row.used), weights[0].variant)
    return f"{LABELS[name]} on test against one weight for all positions: {rest}. The run uses: {used}."


def _shown_lambdas(one: PredictorSurface) -> int:
    """How many values of lambda to show: up to two beyond the last that is anywhere better than no kNN."""
    last: list[int] = []
    for split in (one.valid, one.test):
        for perplexities in (split.temperature_lambda, split.k_lambda):
            if split.without_knn is None:
                return len(perplexities[0])
            last += np.flatnonzero((np.array(perplexities) < split.without_knn).any(0)).tolist()
    return max(last, default=len(one.test.k_lambda[0])) + 3


def _figure(result: SurfaceResult, name: str) -> Figure:
    one = result.predictors[name]
    chosen = one.valid.chosen
    lambdas = [f"{value:g}" for value in result.lambdas][: _shown_lambdas(one)]
    weight = result.lambdas.index(chosen["weight"])
    temperatures = [f"{value:.3g}" for value in result.temperatures]
    ks = [str(value) for value in result.ks]
    t_place = (weight, result.temperatures.index(chosen["temperature"]))
    k_place = (weight, result.ks.index(chosen["k"]))
    figure, panels = panels_of(2, 2, height=6.0)
    for (by_t, by_k), split, slices in zip(panels, SPLITS, (one.valid, one.test), strict=True):
        by_t_shown = np.array(slices.temperature_lambda)[:, : len(lambdas)]
        heat_of(by_t, by_t_shown, lambdas, temperatures, t_place, slices.without_knn)
        by_t.set_title(f"{split}, k = {chosen['k']}", fontsize=10)
        by_t.set(xlabel="lambda", ylabel="T")
        heat_of(by_k, np.array(slices.k_lambda)[:, : len(lambdas)], lambdas, ks, k_place, slices.without_knn)
        by_k.set_title(f"{split}, T = {chosen['temperature']:.3g}", fontsize=10)
        by_k.set(xlabel="lambda", ylabel="k")
    words = (
        f"{LABELS[name]}: perplexity at {one.valid.point} is {one.valid.ppl:.2f} on valid and {one.test.ppl:.2f} on "
        "test."
    )
    return Figure(f"surface_{name}", f"Perplexity of {LABELS[name]} over lambda, T and k", words, figure)


PART = AnalysisPart(
    "surface",
    "Tuning surface",
    SurfaceResult,
    lambda m: measure(m.subject, m.scores("test")),
    show,
    lambda subject: subject.report.test_tokens / 300,
    stages=("tune", "eval"),
    after=("scored-test",),
)
