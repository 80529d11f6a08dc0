"""Words most helped and most hurt, with their neighbours.

The best and the worst are shown beside some drawn at random from each bucket of gain, so that nobody takes the best for
the usual. A word is a test token with a letter in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gnnlm.evaluate.analysis.example_tables import example_table, token_example
from gnnlm.evaluate.analysis.figure import axes_of
from gnnlm.evaluate.analysis.gain_by_kind import by_edges
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, number, percent, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.analysis.token_kinds import BEGINS, CONTINUES, kinds_of
from gnnlm.evaluate.examples import flat
from gnnlm.evaluate.plots import COLOURS
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS

GAINS = (-1.0, -0.1, 0.1, 1.0)  # nats
NAMES = ("lost 1 or more", "lost 0.1 to 1", "within 0.1", "gained 0.1 to 1", "gained 1 or more")
DRAWN = 3  # from each bucket
ENDS = 10  # best and worst


def measure(subject: Subject) -> dict[str, Any]:
    best = subject.best
    gain_N = subject.scores[best] - subject.scores["base"]
    kinds = np.array(kinds_of(subject.parts.streams["test"]))
    words = np.flatnonzero((kinds == BEGINS) | (kinds == CONTINUES))
    order = words[np.argsort(gain_N[words], kind="stable")]
    ends = min(ENDS, len(words) // 2)
    return {
        "predictor": best,
        "words": len(words),
        "tokens": len(gain_N),
        "buckets": [
            _bucket(subject, name, words[here], gain_N) for name, here in by_edges(gain_N[words], GAINS, NAMES)
        ],
        "best": [_example(subject, token, gain_N) for token in order[::-1][:ends]],
        "worst": [_example(subject, token, gain_N) for token in order[:ends]],
        "types": _types(subject, words, gain_N),
    }


def _bucket(subject: Subject, name: str, here: Ints, gain_N: Floats) -> dict[str, Any]:
    drawn = np.random.default_rng(subject.seed).permutation(here)[:DRAWN]
    return {
        "name": name,
        "words": len(here),
        "nats": float(gain_N[here].sum()),
        "drawn": [_example(subject, int(token), gain_N) for token in drawn],
    }


def _example(subject: Subject, token: int, gain_N: Floats) -> dict[str, Any]:
    return {**token_example(subject, int(token)).as_dict(), "gain": float(gain_N[token])}


def _types(subject: Subject, words: Ints, gain_N: Floats) -> dict[str, list[dict[str, Any]]]:
    """The tokens of the vocabulary that gained most and lost most, all their occurrences in test taken together."""
    tokens = subject.targets_N.numpy()[words]
    found, first, number_N, count = np.unique(tokens, return_index=True, return_inverse=True, return_counts=True)
    total = np.bincount(number_N, weights=gain_N[words], minlength=len(found))
    order, stream = np.argsort(total, kind="stable"), subject.parts.streams["test"]

    def row(place: int) -> dict[str, Any]:
        position = int(subject.positions_N[words[first[place]]])
        nats, times = float(total[place]), int(count[place])
        word = flat(stream.text_between(position, position + 1))
        return {"word": word, "times": times, "nats": nats, "mean": nats / times}

    return {
        "helped": [row(place) for place in order[::-1][:ENDS] if total[place] > 0],
        "hurt": [row(place) for place in order[:ENDS] if total[place] < 0],
    }


def show(found: dict[str, Any]) -> Section:
    label, buckets = LABELS[found["predictor"]], found["buckets"]
    gained = sum(bucket["nats"] for bucket in buckets[3:])
    lost = -sum(bucket["nats"] for bucket in buckets[:2])
    high, low = buckets[-1], buckets[0]
    said = (
        f"{high['words']:,} of {found['words']:,} test words gain a nat or more with {label}, {low['words']:,} lose as "
        f"much; gains above 0.1 nats add up to {gained:,.0f} nats, losses to {lost:,.0f}."
    )
    rows: list[list[Cell]] = [
        [b["name"], b["words"], b["words"] / max(1, found["words"]), b["nats"], b["nats"] / max(1, b["words"])]
        for b in buckets
    ]
    columns = [text("gain in nats"), number("words", 0), percent("share"), number("nats in all", 1), number("mean", 3)]
    tables = [Table("words_buckets", f"Words by their gain with {label}", columns, rows)]
    tables += [_types_table(name, found["types"][name]) for name in ("helped", "hurt") if found["types"][name]]
    drawn = [{**e, "note": f"{b['name']}: {_nats(e)}"} for b in buckets for e in b["drawn"]]
    for name, caption, examples in (
        ("words_drawn", f"Drawn at random, {DRAWN} from each bucket of gain", drawn),
        ("words_worst", "The words most hurt", [{**e, "note": _nats(e)} for e in found["worst"]]),
        ("words_best", "The words most helped", [{**e, "note": _nats(e)} for e in found["best"]]),
    ):
        if examples:
            tables.append(example_table(name, caption, examples))
    return Section(
        "words",
        "Words helped and hurt",
        [
            f"Words are the {found['words']:,} of {found['tokens']:,} test tokens that have a letter in them; their "
            f"gain is the log-probability under {label} minus that under base. The best and the worst are extremes; "
            "those drawn at random show what is usual.",
            said,
        ],
        tables,
        [_figure(found)],
        [said],
    )


def _nats(example: dict[str, Any]) -> str:
    return f"{example['gain']:+.2f} nats"


def _types_table(name: str, rows: list[dict[str, Any]]) -> Table:
    columns = [text("token"), number("times in test", 0), number("nats in all", 2), number("mean", 3)]
    cells: list[list[Cell]] = [[f'"{row["word"]}"', row["times"], row["nats"], row["mean"]] for row in rows]
    caption = f"Tokens of the vocabulary most {name}, all their occurrences in test together"
    return Table(f"words_types_{name}", caption, columns, cells)


def _figure(found: dict[str, Any]) -> Figure:
    """How many words each bucket has, and how many nats they bring."""
    figure, panels = axes_of(2, height=2.8)
    names, buckets = [bucket["name"] for bucket in found["buckets"]], found["buckets"]
    colour = COLOURS[found["predictor"]]
    values = ([100 * bucket["words"] / max(1, found["words"]) for bucket in buckets], [b["nats"] for b in buckets])
    for axes, heights, title, digits in zip(panels, values, ("% of the words", "nats in all"), (1, 0), strict=True):
        bars = axes.barh(range(len(names)), heights, color=colour, edgecolor="black", lw=0.6)
        axes.bar_label(bars, [f"{height:,.{digits}f}" for height in heights], fontsize=8, padding=2)
        axes.axvline(0, color="black", lw=0.8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.2)
    panels[0].set_yticks(range(len(names)), names)
    panels[1].set_yticks([])
    words = "; ".join(f"{b['name']}: {b['words']:,} words, {b['nats']:+,.0f} nats" for b in buckets)
    return Figure("words", f"Words by their gain with {LABELS[found['predictor']]}", f"{words}.", figure)
