"""Tuning surface: perplexity over lambda, T and k, on valid, where they are chosen, and on test.

The surface is that of one weight for all positions. What buckets or a gate add to it is in the second table.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.evaluate.analysis.figure import heat_of, panels_of
from gnnlm.evaluate.analysis.score_cache import ScoredSplit
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, change, number, percent, perplexity, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.tune import Grid, best_with_one_weight, tune_mixes
from gnnlm.predict.bootstrap import Floats
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import LABELS, MIXED, STATE_OF

BEST = 0.1  # the share of the combinations, best on valid, whose order is also compared
SPLITS = ("valid", "test")


def measure(subject: Subject, scored: ScoredSplit) -> dict[str, Any]:
    tuned = subject.artifact("tune")
    valid = ascending(json.loads(tuned.text("tuning.json")))
    names = [name for name in scored.names if name in MIXED]
    scores = {STATE_OF[name]: scored.log_probs(STATE_OF[name]) for name in names}
    grid = Grid(valid["ks"], valid["temperatures"], valid["lambdas"])
    _, test = tune_mixes(subject.test, subject.parts.store, scores, grid)
    found: dict[str, Any] = {key: valid[key] for key in ("ks", "temperatures", "lambdas")}
    found["predictors"] = {}
    for name in names:
        state = STATE_OF[name]
        chosen, best = best_with_one_weight(valid, state), best_with_one_weight(test, state)
        one = scored.mixed(subject, state, chosen)
        compared = compare_surfaces(np.array(valid["losses"][state]), np.array(test["losses"][state]))
        mixes = {"one weight": chosen} | _variants(tuned.facts, state)
        weights = [
            {
                "variant": variant,
                "valid_ppl": _valid_ppl(tuned.facts, state, variant),
                "used": mix.as_dict() == tuned.facts["mix"][state],
                **subject.changed(values := scored.mixed(subject, state, mix), subject.scores["base"]),
                "against_one": subject.changed(values, one),
            }
            for variant, mix in mixes.items()
        ]
        found["predictors"][name] = {
            **compared,
            "valid": _slices(valid, state, chosen) | {"chosen": chosen.as_dict()},
            "test": _slices(test, state, chosen) | {"chosen": best.as_dict()},
            "weights": weights,
        }
    return found


def ascending(table: dict[str, Any]) -> dict[str, Any]:
    """The table of losses with T and lambda in ascending order, as k is.

    >>> ascending({"ks": [8], "temperatures": [2.0, 1.0], "lambdas": [0.0], "losses": {"base": [[[0.2]], [[0.1]]]}})
    {'ks': [8], 'temperatures': [1.0, 2.0], 'lambdas': [0.0], 'losses': {'base': [[[0.1]], [[0.2]]]}}
    """
    t, weight = np.argsort(table["temperatures"]), np.argsort(table["lambdas"])
    return {
        "ks": table["ks"],
        "temperatures": [table["temperatures"][i] for i in t],
        "lambdas": [table["lambdas"][i] for i in weight],
        "losses": {name: np.array(losses)[t][:, :, weight].tolist() for name, losses in table["losses"].items()},
    }


def _variants(facts: dict[str, Any], state: str) -> dict[str, Mix]:
    """The ways to weigh kNN that were fitted beside the surface's one weight for all positions."""
    if "variants" not in facts:  # no gate: the buckets, if there are any, were not compared with one weight
        mix = Mix.of(facts["mix"][state])
        return {"buckets": mix} if mix.weights else {}
    return {_title(variant): Mix.of(fitted["mix"]) for variant, fitted in facts["variants"][state].items()}


def _title(variant: str) -> str:
    return "one weight, another for first tokens" if variant == "one weight" else variant


def _valid_ppl(facts: dict[str, Any], state: str, title: str) -> float | None:
    fitted = {_title(variant): found for variant, found in facts.get("variants", {}).get(state, {}).items()}
    return float(np.exp(fitted[title]["valid_loss"])) if title in fitted else None


def _slices(table: dict[str, Any], state: str, chosen: Mix) -> dict[str, Any]:
    """Perplexity over T and lambda at the chosen k, over k and lambda at the chosen T, and without kNN."""
    losses_TkL = np.array(table["losses"][state])
    t, k = table["temperatures"].index(chosen.temperature), table["ks"].index(chosen.k)
    weight = table["lambdas"].index(chosen.weight)
    none = losses_TkL[0, 0, table["lambdas"].index(0.0)] if 0.0 in table["lambdas"] else None
    return {
        "ppl": float(np.exp(losses_TkL[t, k, weight])),
        "best_ppl": float(np.exp(losses_TkL.min())),
        "without_knn": None if none is None else float(np.exp(none)),
        "temperature_lambda": np.exp(losses_TkL[:, k]).tolist(),
        "k_lambda": np.exp(losses_TkL[t]).tolist(),
    }


def compare_surfaces(valid: Floats, test: Floats) -> dict[str, float]:
    """How well valid's losses, of any shape, foretell test's.

    `better` is the share of the combinations that are better on test than the one that is best on valid, `cost` how
    much higher perplexity is there than at test's own best, `ranks` and `ranks_best` the rank correlation of all
    combinations and of those that are best on valid.
    """
    valid, test = valid.ravel(), test.ravel()
    chosen = test[valid.argmin()]
    best = np.argsort(valid, kind="stable")[: max(2, round(BEST * len(valid)))]
    return {
        "better": float((test < chosen).mean()),
        "cost": float(np.expm1(chosen - test.min())),
        "ranks": rank_correlation(valid, test),
        "ranks_best": rank_correlation(valid[best], test[best]),
    }


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


def show(found: dict[str, Any]) -> Section:
    said, rows = [], []
    for name, one in found["predictors"].items():
        valid, test = one["valid"], one["test"]
        said.append(
            f"{LABELS[name]}: what valid chose ({_point(valid['chosen'])}) has perplexity {test['ppl']:.2f} on test, "
            f"{100 * one['cost']:.2f}% above test's own best ({_point(test['chosen'])}: {test['best_ppl']:.2f}); "
            f"{100 * one['better']:.1f}% of the combinations are better there. The rank correlation of valid and test "
            f"is {one['ranks']:.3f} over all combinations, and {one['ranks_best']:.3f} over the tenth that is best on "
            "valid."
        )
        rows += [
            [
                LABELS[name],
                split,
                _point(here["chosen"]),
                *_figures(here),
                cost,
                one["ranks"] if split == "test" else None,
            ]
            for split, here, cost in (("valid", valid, None), ("test", test, one["cost"]))
        ]
        said.append(_added(name, one["weights"]))
    columns = [
        text("predictor"),
        text("split"),
        text("best on this split"),
        perplexity("its ppl"),
        perplexity("ppl of valid's choice"),
        perplexity("ppl without kNN"),
        percent("valid's choice costs", 2, sign=True),
        number("rank correlation", 3),
    ]
    return Section(
        "surface",
        "Tuning surface",
        [
            f"Perplexity for {len(found['lambdas'])} values of lambda, {len(found['temperatures'])} of T and "
            f"{len(found['ks'])} of k, with one weight for all positions. A cross marks what valid chose, a ring the "
            "lowest value of each panel. Colours end at the perplexity without kNN; hatched is worse than that, and "
            "larger weights that are worse throughout are not shown.",
            *said,
        ],
        [Table("surface", "What valid chose, on valid and on test", columns, rows), _weights_table(found)],
        [_figure(found, name) for name in found["predictors"]],
        [said[-2]],
    )


def _point(mix: dict[str, Any]) -> str:
    return f"k = {mix['k']}, T = {mix['temperature']:.3g}, lambda = {mix['weight']:g}"


def _figures(here: dict[str, Any]) -> list[Cell]:
    return [here["best_ppl"], here["ppl"], here["without_knn"]]


def _words(row: dict[str, Any]) -> str:
    return change(row["change"], row["change_low"], row["change_high"])


def _added(name: str, weights: list[dict[str, Any]]) -> str:
    """What the ways to weigh kNN make of the test tokens, against one weight."""
    if len(weights) == 1:
        return f"{LABELS[name]} uses one weight for all positions."
    rest = "; ".join(f"{row['variant']} {_words(row['against_one'])}" for row in weights[1:])
    used = next((row["variant"] for row in weights if row["used"]), weights[0]["variant"])
    return f"{LABELS[name]} on test against one weight for all positions: {rest}. The run uses: {used}."


def _weights_table(found: dict[str, Any]) -> Table:
    columns = [
        text("predictor"),
        text("weight of kNN"),
        text("used"),
        perplexity("valid ppl, cross-validated"),
        perplexity("test ppl"),
        text("change against base, 95%"),
        text("change against one weight, 95%"),
    ]
    rows: list[list[Cell]] = [
        [LABELS[name], row["variant"], "yes" if row["used"] else "", row["valid_ppl"], row["ppl"], _words(row),
         _words(row["against_one"]) if number else ""]
        for name, one in found["predictors"].items()
        for number, row in enumerate(one["weights"])
    ]  # fmt: skip
    return Table("surface_weights", "What buckets or a gate add", columns, rows)


def _shown_lambdas(one: dict[str, Any]) -> int:
    """How many values of lambda to show: up to two beyond the last that is anywhere better than no kNN."""
    tables = [(np.array(one[split][key]), one[split]["without_knn"]) for split in SPLITS
              for key in ("temperature_lambda", "k_lambda")]  # fmt: skip
    last = [np.flatnonzero((table < without).any(0)) for table, without in tables if without is not None]
    return max([int(found.max()) for found in last if len(found)], default=tables[0][0].shape[1]) + 3


def _figure(found: dict[str, Any], name: str) -> Figure:
    one = found["predictors"][name]
    figure, panels = panels_of(2, 2, height=6.0)
    chosen = one["valid"]["chosen"]
    lambdas = [f"{value:g}" for value in found["lambdas"]][: _shown_lambdas(one)]
    weight = found["lambdas"].index(chosen["weight"])
    for row, split in enumerate(SPLITS):
        here = one[split]
        for panel, key, values, value, label in (
            (panels[row][0], "temperature_lambda", found["temperatures"], chosen["temperature"], "T"),
            (panels[row][1], "k_lambda", found["ks"], chosen["k"], "k"),
        ):
            shown: npt.NDArray[np.float64] = np.array(here[key])[:, : len(lambdas)]
            place = (weight, values.index(value))
            heat_of(
                panel,
                shown,
                lambdas,
                [f"{v:.3g}" if label == "T" else str(v) for v in values],
                place,
                here["without_knn"],
            )
            other = f"k = {chosen['k']}" if label == "T" else f"T = {chosen['temperature']:.3g}"
            panel.set_title(f"{split}, {other}", fontsize=10)
            panel.set_xlabel("lambda")
            panel.set_ylabel(label)
    words = f"{LABELS[name]}: perplexity at {_point(chosen)} is {one['valid']['ppl']:.2f} on valid and " \
            f"{one['test']['ppl']:.2f} on test."  # fmt: skip
    return Figure(f"surface_{name}", f"Perplexity of {LABELS[name]} over lambda, T and k", words, figure)
