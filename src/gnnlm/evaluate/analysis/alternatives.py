"""The alternatives: frozen, with passages in the context, fine-tuned, each without and with the book.

All are measured on the test tokens that the runs share (and that were read with passages, where some were), so that
their perplexities can stand beside each other. What each costs is as the runs recorded it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from gnnlm.errors import ConfigError
from gnnlm.evaluate.analysis.figure import MARKS, axes_of, spread_of
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, change, number, perplexity, text
from gnnlm.evaluate.compare import Finished, shared_places
from gnnlm.evaluate.plots import COLOURS, DARK
from gnnlm.predict import predictor as predictors
from gnnlm.predict.bootstrap import Floats, change_interval

KINDS = {"frozen": "frozen", "scratch": "trained", "full": "fine-tuned", "lora": "fine-tuned (LoRA)"}
PASSAGES = "passages"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A finished run: its figures, the log-probabilities of its rows with passages, and the seconds of its stages.

    `seconds` has those that the run recorded: lm, encode, search train, search valid, train.
    """

    finished: Finished
    with_passages: Mapping[str, Floats]
    seconds: Mapping[str, float]

    @property
    def kind(self) -> str:
        kind = self.finished.report.lm.kind
        return KINDS.get(kind, f"fine-tuned ({kind})")

    def preparation(self, row: str) -> float:
        """The seconds before the first token can be predicted, as far as they were recorded."""
        needed = {
            "base": ("lm",),
            "knn": ("lm", "encode", "search valid"),
            "gnn": ("lm", "encode", "search train", "search valid", "train"),
        }
        return sum(self.seconds.get(stage, 0.0) for stage in needed["gnn" if row == "gnn_knn" else row])


def measure(candidates: Sequence[Candidate], samples: int, seed: int) -> dict[str, Any]:
    """A row for each alternative; changes are against the base model of the first run."""
    places, document = shared_places([candidate.finished for candidate in candidates])
    for candidate, at in zip(candidates[1:], places[1:], strict=True):
        if not len(at):
            names = candidate.finished.name, candidates[0].finished.name
            raise ConfigError(f"{names[0]} and {names[1]} share no test document; compare runs of the same text")
    read = np.full(len(document), True)
    for candidate, at in zip(candidates, places, strict=True):
        if candidate.with_passages:
            read &= at < min(len(scores) for scores in candidate.with_passages.values())
    document = np.unique(document[read], return_inverse=True)[1]
    base = candidates[0].finished.scores["base"][places[0][read]]
    rows: list[dict[str, Any]] = []
    for candidate, at in zip(candidates, places, strict=True):
        report, here = candidate.finished.report, at[read]
        for name, scores in {**candidate.finished.scores, **candidate.with_passages}.items():
            gain = scores[here] - base
            low, high = change_interval(gain, document, samples, seed) or (None, None)
            passages = name in candidate.with_passages
            plain = _without_passages(name) if passages else name
            speeds = report.passages.rows if passages and report.passages is not None else report.rows
            rows.append(
                {
                    "run": candidate.finished.name,
                    "kind": candidate.kind,
                    "passages": passages,
                    "row": plain,
                    "ppl": predictors.perplexity(-float(scores[here].mean())),
                    "change": predictors.perplexity(-float(gain.mean())) - 1,
                    "change_low": low,
                    "change_high": high,
                    "seconds_per_token": 1 / speeds[name].tokens_per_second,
                    "preparation_minutes": candidate.preparation(plain) / 60,
                }
            )
    for cost in ("seconds_per_token", "preparation_minutes"):
        best = frontier([(row[cost], row["ppl"]) for row in rows])
        for row, is_best in zip(rows, best, strict=True):
            row[f"best_by_{cost}"] = is_best
    return {"tokens": len(base), "documents": int(document.max()) + 1, "runs": len(candidates), "rows": rows}


def _without_passages(name: str) -> str:
    """
    >>> _without_passages("passages"), _without_passages("passages_gnn")
    ('base', 'gnn')
    """
    return name.removeprefix(PASSAGES).removeprefix("_") or "base"


def frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other point beats: at least as good in both values, and better in one.

    >>> frontier([(1, 5), (2, 3), (2, 4), (3, 3)])
    [True, True, False, False]
    """
    return [not any(all(a <= b for a, b in zip(q, p, strict=True)) and q != p for q in points) for p in points]


def label(row: Mapping[str, Any], with_run: bool) -> str:
    """
    >>> label({"kind": "frozen", "passages": True, "row": "gnn_knn", "run": "r"}, False)
    'frozen, passages, +GNN+kNN'
    """
    words = [row["kind"], *(["passages"] if row["passages"] else [])]
    words += [] if row["row"] == "base" else [predictors.LABELS[row["row"]]]
    return ", ".join(words) + (f" ({row['run']})" if with_run else "")


def show(found: dict[str, Any]) -> Section:
    rows, with_run = _briefly_named(found["rows"]), found["runs"] > 1
    names = [label(row, with_run) for row in rows]
    columns = [
        number("no.", 0),
        text("alternative"),
        perplexity(),
        text("change, 95%"),
        number("ms per token", 2),
        number("preparation (minutes)", 1),
        text("unbeaten in"),
    ]
    cells: list[list[Cell]] = [
        [
            place,
            name,
            row["ppl"],
            "" if place == 1 else change(row["change"], row["change_low"], row["change_high"]),
            1e3 * row["seconds_per_token"],
            row["preparation_minutes"],
            _best(row),
        ]
        for place, (name, row) in enumerate(zip(names, rows, strict=True), 1)
    ]
    lowest = min(range(len(rows)), key=lambda at: rows[at]["ppl"])
    row = rows[lowest]
    said = (
        f"Of {len(rows)} alternatives, {names[lowest]} has the lowest perplexity, {row['ppl']:.2f}, at "
        f"{1e3 * row['seconds_per_token']:.2f} ms per token and {row['preparation_minutes']:.1f} minutes of "
        f"preparation; {names[0]} has {rows[0]['ppl']:.2f} at {1e3 * rows[0]['seconds_per_token']:.2f} ms."
    )
    unbeaten = [name for name, row in zip(names, rows, strict=True) if row["best_by_seconds_per_token"]]
    absent = [word for word, there in (("passages in the context", any(row["passages"] for row in rows)),
                                       ("fine-tuned", any(row["kind"].startswith("fine") for row in rows)))
              if not there]  # fmt: skip
    more = (
        f"Not here: {', '.join(absent)} (eval.context_retrieval, or runs named with --with)."
        if absent
        else "Frozen, passages and fine-tuned are all here."
    )
    return Section(
        "alternatives",
        "The alternatives",
        [
            f"All on the same {found['tokens']:,} test tokens of {found['documents']} documents"
            + (f", which the {found['runs']} runs share" if with_run else "")
            + f"; changes are against {names[0]}. Time per token counts reading, search and prediction. Preparation "
            "is what the runs recorded: training of the base model, encoding, search, training of the network; index, "
            "codec, cache, tuning and BM25 are not recorded.",
            said,
            f"By time per token, none beats {_listed(unbeaten)}.",
            more,
        ],
        [Table("alternatives", "What each alternative brings and costs", columns, cells)],
        [_figure(rows, names)],
        [said],
    )


def _briefly_named(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs by the last part of their path, where that tells them apart."""
    brief = {row["run"]: PurePath(row["run"]).name for row in rows}
    return [{**row, "run": brief[row["run"]]} for row in rows] if len({*brief.values()}) == len(brief) else [*rows]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{'; '.join(names[:-1])} and {names[-1]}"


def _best(row: Mapping[str, Any]) -> str:
    words = [("seconds_per_token", "time"), ("preparation_minutes", "preparation")]
    return ", ".join(word for cost, word in words if row[f"best_by_{cost}"])


def _figure(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    figure, panels = axes_of(2, height=3.8, width=7.2)
    costs = (("seconds_per_token", 1e3, "ms per token"), ("preparation_minutes", 1.0, "minutes of preparation"))
    for axes, (cost, unit, title) in zip(panels, costs, strict=True):
        best = sorted((unit * row[cost], row["ppl"]) for row in rows if row[f"best_by_{cost}"])
        axes.plot(*zip(*best, strict=True), color=DARK, lw=1, ls="--", drawstyle="steps-post", zorder=1)
        for place, (name, row) in enumerate(zip(names, rows, strict=True), 1):
            colour, point = COLOURS.get(row["row"], DARK), (unit * row[cost], row["ppl"])
            face = colour if row["kind"] == rows[0]["kind"] else "white"
            if row["passages"]:
                axes.plot(*point, "o", ms=14, mfc="none", mec="#999999", mew=0.8)
            look = {"ms": 7, "mfc": face, "mec": colour, "mew": 1.4, "ls": "none"}
            axes.plot(*point, marker=MARKS.get(row["row"], "v"), label=f"{place} {name}", **look)
            axes.annotate(str(place), point, (6, 4), textcoords="offset points", fontsize=9)
        axes.set_xlabel(title)
        spread_of(axes, "y", [row["ppl"] for row in rows])
        spread_of(axes, "x", [unit * row[cost] for row in rows])
    panels[0].set_ylabel("perplexity")
    panels[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    points = "; ".join(f"{at} {name}: {row['ppl']:.2f} at {1e3 * row['seconds_per_token']:.2f} ms, "
                       f"{row['preparation_minutes']:.1f} min" for at, (name, row) in
                       enumerate(zip(names, rows, strict=True), 1))  # fmt: skip
    caption = (
        "Perplexity against time per token and against preparation (dashed: not beaten by "
        "another; ringed: with passages; hollow: another base model)"
    )
    return Figure("alternatives", caption, f"{points}.", figure)
