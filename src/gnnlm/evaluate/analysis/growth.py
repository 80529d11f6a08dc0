"""Growth: perplexity against the size of the store, and against the number of training steps.

Documents of the store are left out at random, so that smaller stores are parts of larger ones. Network and mix are
those of the run. Each size is searched anew, because the run's table holds only the nearest rows of the whole. All
sizes are searched exactly if the keys fit into memory: an approximate index finds more of the true neighbours in a
small store than in a large one, and the curve would show that too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from gnnlm.artifact import Draft
from gnnlm.datastore.store import mapped
from gnnlm.evaluate.analysis.curve import Curve, fit_curves
from gnnlm.evaluate.analysis.document_sample import Drawn, draw_documents
from gnnlm.evaluate.analysis.figure import axes_of, line_of
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, change_of, number, percent, perplexity, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.plots import COLOURS
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS
from gnnlm.predict.predictor import perplexity as perplexity_of
from gnnlm.predict.split_scoring import score_text
from gnnlm.retrieval.index import Allowed, Index, keys_of
from gnnlm.retrieval.open_index import open_exact
from gnnlm.retrieval.search import search_table

SHARES = (64, 32, 16, 8, 4, 2, 1)  # one part in so many
TOKENS = 6000  # test tokens that are scored with each store, at most
KEY_BYTES = 4 * 2**30  # an approximate index gives way to exact search up to this size of the keys
MORE = 10.0  # times the text, for the extrapolation
Rows = list[dict[str, Any]]


def measure(subject: Subject, draft: Draft) -> dict[str, Any]:
    """Sizes are kept as they are made."""
    stream, drawn = subject.parts.streams["train"], draw_documents(subject, TOKENS)
    tokens = np.diff(stream.starts) - 1
    order = np.random.default_rng(subject.seed).permutation(len(tokens))
    rows: Rows = draft.notes.setdefault("sizes", [])
    kind = subject.artifact("index").facts["kind"]
    index, exactly = _index(subject)
    for count in nested(tokens[order], SHARES)[len(rows) :]:
        kept = order[:count]
        size = {
            "tokens": int(tokens[kept].sum()),
            "documents": count,
            "share": float(tokens[kept].sum() / tokens.sum()),
        }
        known = count == len(tokens) and (kind == "exact" or not exactly)  # the report has these scores
        own = {name: scores[drawn.tokens_N] for name, scores in subject.scores.items()}
        scores = own if known else sized(subject, index, drawn, kept)
        rows.append(size | {"predictors": _changes(subject, drawn, scores)})
        draft.commit()
    names = subject.report.predictors
    return {
        "sizes": rows,
        "tokens": len(drawn.tokens_N),
        "documents": len(drawn.documents),
        "index": kind,
        "exact": exactly,
        "fits": {name: fit for name in names[1:] if (fit := fitted(rows, name)) is not None},
        "history": _history(subject),
    }


def nested(tokens: Ints, shares: Sequence[int]) -> list[int]:
    """How many documents, from the first on, come nearest to each share of the tokens; each number once.

    >>> nested(np.array([10, 10, 20, 40]), (64, 4, 2, 1))
    [1, 2, 3, 4]
    """
    sums = np.cumsum(tokens)
    return sorted({int(np.abs(sums - sums[-1] / part).argmin()) + 1 for part in shares})


def _index(subject: Subject) -> tuple[Index, bool]:
    """The index that all sizes are searched in, and whether it is exact."""
    made, encoded = subject.artifact("index"), subject.artifact("encode")
    if made.facts["kind"] == "exact":
        return subject.parts.index, True
    if 4 * made.facts["rows"] * keys_of(encoded, "train").shape[1] <= KEY_BYTES:
        device = str(subject.parts.predictor.head.device)
        return open_exact(encoded, subject.parts.streams["train"], made.facts["metric"], device), True
    return subject.parts.index, False


def _changes(subject: Subject, drawn: Drawn, scores: dict[str, Floats]) -> dict[str, dict[str, Any]]:
    """The loss of each predictor, its perplexity, and the change against base."""
    base = subject.scores["base"][drawn.tokens_N]
    return {
        name: {"loss": -float(values.mean()), **subject.changed(values, base, drawn.tokens_N)}
        for name, values in scores.items()
    }


def sized(subject: Subject, index: Index, drawn: Drawn, kept: Ints) -> dict[str, Floats]:
    """Log-probabilities of the drawn test tokens where only some documents of the store can be found."""
    predictor, config, starts = subject.parts.predictor, subject.config, subject.parts.streams["train"].starts
    open_P = torch.zeros(int(starts[-1]), dtype=torch.bool)
    for document in kept.tolist():
        open_P[int(starts[document]) : int(starts[document + 1])] = True
    keys = mapped(keys_of(subject.artifact("encode"), "test"))[drawn.positions_P]
    share = f"{100 * int(open_P.sum()) / len(open_P):.1f}% of the store"
    table = search_table(
        index,
        keys,
        predictor.neighbours_needed(predictor.names),
        config.search.shard_queries,
        f"search {share}",
        drawn.positions_P,
        Allowed(positions=open_P),
    )
    searched, names = replace(subject.test, table=table), predictor.names
    return score_text(predictor, searched, config.eval.block, f"score with {share}", names, drawn.positions_P)[0]


def fitted(rows: Rows, name: str) -> dict[str, Any] | None:
    """The curve through a predictor's losses, and what it says of more text; None with fewer than three sizes."""
    if len(rows) < 3:
        return None
    best, other = fit_curves([row["share"] for row in rows], [row["predictors"][name]["loss"] for row in rows])
    now = rows[-1]["predictors"][name]["loss"]
    return {
        "curve": asdict(best),
        "ten_times": perplexity_of(best.at(MORE)),
        "change": perplexity_of(best.at(MORE) - now) - 1,
        "other": None if other is None else {"curve": asdict(other), "ten_times": perplexity_of(other.at(MORE))},
    }


def _history(subject: Subject) -> Rows:
    """Perplexity on valid by training step; empty without a network."""
    if subject.parts.gnn is None:
        return []
    history = json.loads(subject.artifact("train").text("history.json"))
    return [
        {
            "step": entry["step"],
            "ppl": perplexity_of(entry["valid_gnn"]),
            "base": perplexity_of(entry["valid_base"]),
            "change": perplexity_of(entry["valid_gnn"] - entry["valid_base"]) - 1,
            "change_low": entry.get("valid_change_low"),  # not known of a single document
            "change_high": entry.get("valid_change_high"),
        }
        for entry in history
    ]


def show(found: dict[str, Any]) -> Section:
    sizes, history = found["sizes"], found["history"]
    names = list(sizes[0]["predictors"])
    columns = [number("store tokens", 0), number("documents", 0), text("share"), perplexity("base")]
    for name in names[1:]:
        columns += [perplexity(LABELS[name]), text(f"{LABELS[name]}: change, 95%")]
    rows: list[list[Cell]] = []
    for size in sizes:
        each = size["predictors"]
        rows.append([size["tokens"], size["documents"], f"{100 * size['share']:.1f}%", each["base"]["ppl"]])
        for name in names[1:]:
            rows[-1] += [each[name]["ppl"], change_of(each[name])]
    tables = [Table("growth", "Perplexity by size of the store", columns, rows)]
    figures, said = [], _said(found, names)
    if len(sizes) > 1:
        figures.append(_size_figure(found, names))
    if found["fits"]:
        tables.append(_fit_table(found, names))
    if history:
        steps: list[list[Cell]] = [[entry["step"], entry["ppl"], change_of(entry)] for entry in history]
        shown = [number("step", 0), perplexity("+GNN on valid"), text("change, 95%")]
        tables.append(Table("growth_steps", "Perplexity on valid by training step", shown, steps))
        figures.append(_step_figure(history))
    return Section(
        "growth",
        "Growth",
        [
            "Documents of the store are left out at random, so that each smaller store is part of the larger ones; "
            f"network and mix are the run's. All sizes are scored on the same {found['tokens']:,} tokens of "
            f"{found['documents']} whole test documents." + _searched(found),
            *said,
        ],
        tables,
        figures,
        said[:1],
    )


def _searched(found: dict[str, Any]) -> str:
    """How the sizes were searched, where the run's index is not exact."""
    if found["index"] == "exact":
        return ""
    if found["exact"]:
        return (
            f" All sizes are searched exactly, so that the run's index ({found['index']}) does not blur them; the "
            "whole store's perplexity is therefore not quite the report's."
        )
    return f" All sizes are searched by the run's approximate index ({found['index']})."


def _said(found: dict[str, Any], names: list[str]) -> list[str]:
    sizes, fits, history = found["sizes"], found["fits"], found["history"]
    best, last, said = names[-1], sizes[-1], []
    if len(sizes) > 1:
        first, before = sizes[0], sizes[-2]
        ppls = [size["predictors"][best]["ppl"] for size in (first, before, last)]
        said.append(
            f"From {first['tokens']:,} to {last['tokens']:,} tokens in the store, perplexity of {LABELS[best]} goes "
            f"from {ppls[0]:.2f} to {ppls[2]:.2f} (base {last['predictors']['base']['ppl']:.2f}); the last step, "
            f"{last['tokens'] / before['tokens']:.1f} times the text, changed it by "
            f"{100 * (ppls[2] / ppls[1] - 1):+.1f}%."
        )
    else:
        said.append("The store is a single document, so nothing can be left out of it.")
    if best in fits:
        said.append(_outlook(fits[best], best))
    if history:
        reached = min(history, key=lambda entry: entry["ppl"])
        said.append(
            f"Over {history[-1]['step']:,} training steps, perplexity of +GNN on valid goes from "
            f"{history[0]['ppl']:.2f} to {history[-1]['ppl']:.2f}; it is lowest ({reached['ppl']:.2f}) at step "
            f"{reached['step']:,}{', the last' if reached is history[-1] else ''}."
        )
    return said


def _outlook(fit: dict[str, Any], name: str) -> str:
    other = fit["other"]
    doubt = (
        "" if other is None else f" The other curve ({formula(Curve(**other['curve']))}) says {other['ten_times']:.2f}."
    )
    return (
        f"If the fitted curve ({formula(Curve(**fit['curve']))}) goes on, ten times the text would bring "
        f"{LABELS[name]} to about {fit['ten_times']:.2f} ({100 * fit['change']:+.1f}%).{doubt} That is ten times "
        "beyond anything measured here. It takes for granted that the new text is of the same kind, and it leaves out "
        "what training and tuning with the larger store would add. Take it as a direction."
    )


def formula(curve: Curve) -> str:
    """The curve in words of numbers, x being the size relative to the whole store.

    >>> formula(Curve("log", 3.0, -0.05, 0.0, 0.0)), formula(Curve("power", 2.5, 0.1, 0.5, 0.0))
    ('loss = 3.000 - 0.050 ln x', 'loss = 2.500 + 0.100 / x^0.50')
    """
    sign = "-" if curve.b < 0 else "+"
    term = "ln x" if curve.kind == "log" else f"/ x^{curve.c:.2f}"
    return f"loss = {curve.a:.3f} {sign} {abs(curve.b):.3f} {term}"


def _fit_table(found: dict[str, Any], names: list[str]) -> Table:
    columns = [text("predictor"), text("curve, x: share of the store"), number("residual (nats)", 4),
               perplexity("now"), perplexity("ten times the text"), percent("change", sign=True),
               perplexity("by the other curve")]  # fmt: skip
    rows: list[list[Cell]] = []
    for name in (name for name in names if name in found["fits"]):
        fit, now = found["fits"][name], found["sizes"][-1]["predictors"][name]["ppl"]
        curve, other = Curve(**fit["curve"]), fit["other"]
        rows.append([LABELS[name], formula(curve), curve.error, now, fit["ten_times"], fit["change"],
                     None if other is None else other["ten_times"]])  # fmt: skip
    return Table("growth_fit", "Fitted curves and where they lead (an extrapolation)", columns, rows)


def _size_figure(found: dict[str, Any], names: list[str]) -> Figure:
    figure, (axes,) = axes_of(1, height=3.6)
    sizes, whole = found["sizes"], found["sizes"][-1]["tokens"]
    tokens = [size["tokens"] for size in sizes]
    reach = np.geomspace(sizes[0]["share"], MORE, 60)
    for name in names:
        line_of(axes, name, tokens, [size["predictors"][name]["ppl"] for size in sizes])
        if name in found["fits"]:
            curve = Curve(**found["fits"][name]["curve"])
            ppls = [perplexity_of(curve.at(float(x))) for x in reach]
            axes.plot(reach * whole, ppls, color=COLOURS[name], lw=0.9, ls=(0, (1, 2)))
    if found["fits"]:
        axes.axvspan(whole, MORE * whole, color="#eeeeee", zorder=0)
        axes.annotate("extrapolated", (whole, 1), (4, -4), textcoords="offset points", va="top", fontsize=8,
                      xycoords=("data", "axes fraction"))  # fmt: skip
    axes.set_xscale("log", base=10)
    axes.set_xlabel("tokens in the store (thin dotted lines: fitted curves)")
    axes.set_ylabel("test perplexity")
    axes.legend(frameon=False, fontsize=9)
    ends = "; ".join(
        f"{LABELS[name]} {sizes[0]['predictors'][name]['ppl']:.2f} to {sizes[-1]['predictors'][name]['ppl']:.2f}"
        for name in names
    )
    words = f"Perplexity from {tokens[0]:,} to {tokens[-1]:,} tokens: {ends}."
    return Figure("growth", "Perplexity by size of the store", words, figure)


def _step_figure(history: Rows) -> Figure:
    figure, (axes,) = axes_of(1)
    steps = [entry["step"] for entry in history]
    line_of(axes, "gnn", steps, [entry["ppl"] for entry in history])
    axes.axhline(history[0]["base"], color="#666666", ls="--", label="base")
    axes.set_xlabel("training step")
    axes.set_ylabel("perplexity on valid")
    axes.legend(frameon=False, fontsize=9)
    words = f"From {history[0]['ppl']:.2f} at step 0 to {history[-1]['ppl']:.2f} at step {steps[-1]:,}."
    return Figure("growth_steps", "Perplexity on valid by training step", words, figure)
