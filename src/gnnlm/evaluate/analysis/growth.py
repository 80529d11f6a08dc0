"""Growth: perplexity against the size of the store, and against the number of training steps.

Documents of the store are left out at random, so that smaller stores are parts of larger ones. Network and mix are
those of the run. Each size is searched anew, because the run's table holds only the nearest rows of the whole. All
sizes are searched exactly if the keys fit into memory: an approximate index finds more of the true neighbours in a
small store than in a large one, and the curve would show that too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gnnlm.artifact import Draft
from gnnlm.evaluate.analysis.curve import Curve, fit_curves
from gnnlm.evaluate.analysis.figure import axes_of, base_line, legend_of, line_of
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import DocumentSample, Subject
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.plots import COLOURS
from gnnlm.evaluate.table import Column, Table, change_columns, number, percent, perplexity, text
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.predictor import LABELS
from gnnlm.predict.predictor import perplexity as perplexity_of
from gnnlm.predict.split_scoring import score_text
from gnnlm.retrieval.index import Allowed, Index
from gnnlm.retrieval.search import search_table

SHARES = (64, 32, 16, 8, 4, 2, 1)  # one part in so many
TOKENS = 6000  # test tokens that are scored with each store, at most
KEY_BYTES = 4 * 2**30  # an approximate index gives way to exact search up to this size of the keys
MORE = 10.0  # times the text, for the extrapolation


class SizeChange(PerplexityChange):
    loss: float


class StoreSize(PartResult):
    """A part of the store, and the figures of every predictor with it."""

    tokens: int
    documents: int
    share: float
    predictors: dict[str, SizeChange]


class OtherFit(PartResult):
    curve: Curve
    ten_times: float


class GrowthFit(PartResult):
    """The curve through a predictor's losses and what it says of ten times the text; the other curve, if fitted."""

    curve: Curve
    ten_times: float
    change: float
    other: OtherFit | None


class TrainingStep(PerplexityChange):
    """Perplexity on valid after a step of training; `base` is the base model's."""

    step: int
    base: float


class GrowthResult(PartResult):
    """`exact`: all sizes were searched exactly, whatever the run's index."""

    sizes: list[StoreSize]
    tokens: int
    documents: int
    index: str
    exact: bool
    fits: dict[str, GrowthFit]
    history: list[TrainingStep]


def measure(subject: Subject, draft: Draft) -> GrowthResult:
    """Measure each size; finished sizes are kept in the draft."""
    starts = subject.snapshot.streams["train"].starts
    tokens = np.diff(starts) - 1
    order = np.random.default_rng(subject.seed).permutation(len(tokens))
    sample = subject.sample_documents(TOKENS)
    notes = draft.notes.setdefault("sizes", [])
    kind = subject.artifact("index").facts["kind"]
    index, exactly = _index(subject)
    base = subject.scores["base"][sample.tokens_N]
    for count in nested(tokens[order], SHARES)[len(notes) :]:
        kept = order[:count]
        if count == len(tokens) and (kind == "exact" or not exactly):  # the report has these scores
            scores = {name: values[sample.tokens_N] for name, values in subject.scores.items()}
        else:
            scores = sized(subject, index, sample, kept)
        predictors = {}
        for name, values in scores.items():
            change = subject.changed(values, base, sample.tokens_N)
            predictors[name] = SizeChange(**change.model_dump(), loss=-float(values.mean()))
        size = StoreSize(
            tokens=int(tokens[kept].sum()),
            documents=count,
            share=float(tokens[kept].sum() / tokens.sum()),
            predictors=predictors,
        )
        notes.append(size.as_json())
        draft.commit()
    sizes = [StoreSize.model_validate(size) for size in notes]
    fits = {name: fitted(sizes, name) for name in subject.report.predictors[1:]}
    return GrowthResult(
        sizes=sizes,
        tokens=len(sample.tokens_N),
        documents=len(sample.documents),
        index=kind,
        exact=exactly,
        fits={name: fit for name, fit in fits.items() if fit is not None},
        history=_history(subject),
    )


def nested(tokens: Ints, shares: Sequence[int]) -> list[int]:
    """How many documents, from the first on, come nearest to each share of the tokens; each number once.

    >>> nested(np.array([10, 10, 20, 40]), (64, 4, 2, 1))
    [1, 2, 3, 4]
    """
    sums = np.cumsum(tokens)
    return sorted({int(np.abs(sums - sums[-1] / part).argmin()) + 1 for part in shares})


def _index(subject: Subject) -> tuple[Index, bool]:
    """The index that all sizes are searched in, and whether it is exact."""
    facts = subject.artifact("index").facts
    if facts["kind"] == "exact":
        return subject.snapshot.index, True
    if 4 * facts["rows"] * subject.keys("test").shape[1] <= KEY_BYTES:
        return subject.exact_index(), True
    return subject.snapshot.index, False


def sized(subject: Subject, index: Index, sample: DocumentSample, kept: Ints) -> dict[str, Floats]:
    """Log-probabilities of the sampled test tokens where only some documents of the store can be found."""
    predictor, config = subject.snapshot.predictor, subject.config
    starts = subject.snapshot.streams["train"].starts
    open_P = torch.zeros(int(starts[-1]), dtype=torch.bool)
    for document in kept.tolist():
        open_P[int(starts[document]) : int(starts[document + 1])] = True
    share = f"{100 * int(open_P.sum()) / len(open_P):.1f}% of the store"
    names = predictor.names
    table = search_table(
        index,
        subject.keys("test")[sample.positions_P],
        predictor.neighbours_needed(names),
        config.search.shard_queries,
        f"search {share}",
        sample.positions_P,
        Allowed(positions=open_P),
    )
    searched = replace(subject.test, table=table)
    return score_text(predictor, searched, config.eval.block, f"score with {share}", names, sample.positions_P)[0]


def fitted(sizes: Sequence[StoreSize], name: str) -> GrowthFit | None:
    """Fit a curve to a predictor's losses; None with fewer than three sizes."""
    if len(sizes) < 3:
        return None
    losses = [size.predictors[name].loss for size in sizes]
    best, other = fit_curves([size.share for size in sizes], losses)
    return GrowthFit(
        curve=best,
        ten_times=perplexity_of(best.at(MORE)),
        change=perplexity_of(best.at(MORE) - losses[-1]) - 1,
        other=None if other is None else OtherFit(curve=other, ten_times=perplexity_of(other.at(MORE))),
    )


def _history(subject: Subject) -> list[TrainingStep]:
    """Perplexity on valid by training step; empty without a network."""
    if subject.snapshot.gnn is None:
        return []
    return [
        TrainingStep(
            step=entry["step"],
            ppl=perplexity_of(entry["valid_gnn"]),
            base=perplexity_of(entry["valid_base"]),
            change=perplexity_of(entry["valid_gnn"] - entry["valid_base"]) - 1,
            change_low=entry.get("valid_change_low"),  # a single document has no interval
            change_high=entry.get("valid_change_high"),
        )
        for entry in json.loads(subject.artifact("train").text("history.json"))
    ]


def show(result: GrowthResult) -> AnalysisSection:
    names = list(result.sizes[0].predictors)
    tables = [
        Table.of(
            "growth",
            "Perplexity by size of the store",
            result.sizes,
            number("store tokens", lambda size: size.tokens, 0),
            number("documents", lambda size: size.documents, 0),
            text("share", lambda size: f"{100 * size.share:.1f}%"),
            perplexity("base", lambda size: size.predictors["base"].ppl),
            *itertools.chain.from_iterable(map(_size_columns, names[1:])),
        )
    ]
    figures = []
    findings = _findings(result, names)
    if len(result.sizes) > 1:
        figures.append(_size_figure(result, names))
    if result.fits:
        tables.append(_fit_table(result))
    if result.history:
        tables.append(
            Table.of(
                "growth_steps",
                "Perplexity on valid by training step",
                result.history,
                number("step", lambda entry: entry.step, 0),
                *change_columns("+GNN on valid", lambda entry: entry),
            )
        )
        figures.append(_step_figure(result.history))
    return AnalysisSection(
        [
            "Documents of the store are left out at random, so that each smaller store is part of the larger ones; "
            f"network and mix are the run's. All sizes are scored on the same {result.tokens:,} tokens of "
            f"{result.documents} whole test documents." + _searched(result),
            *findings,
        ],
        tables,
        figures,
        findings[:1],
    )


def _size_columns(name: str) -> list[Column]:
    return change_columns(LABELS[name], lambda size: size.predictors[name], f"{LABELS[name]}: change, 95%")


def _searched(result: GrowthResult) -> str:
    """How the sizes were searched, where the run's index is not exact."""
    if result.index == "exact":
        return ""
    if result.exact:
        return (
            f" All sizes are searched exactly, so that the run's index ({result.index}) does not blur them; the "
            "whole store's perplexity is therefore not quite the report's."
        )
    return f" All sizes are searched by the run's approximate index ({result.index})."


def _findings(result: GrowthResult, names: list[str]) -> list[str]:
    sizes, history = result.sizes, result.history
    best = names[-1]
    findings = ["The store is a single document, so nothing can be left out of it."]
    if len(sizes) > 1:
        first, before, last = sizes[0], sizes[-2], sizes[-1]
        start, middle, end = (size.predictors[best].ppl for size in (first, before, last))
        findings = [
            f"From {first.tokens:,} to {last.tokens:,} tokens in the store, perplexity of {LABELS[best]} goes "
            f"from {start:.2f} to {end:.2f} (base {last.predictors['base'].ppl:.2f}); the last step, "
            f"{last.tokens / before.tokens:.1f} times the text, changed it by {100 * (end / middle - 1):+.1f}%."
        ]
    if best in result.fits:
        findings.append(_outlook(result.fits[best], best))
    if history:
        reached = min(history, key=lambda entry: entry.ppl)
        findings.append(
            f"Over {history[-1].step:,} training steps, perplexity of +GNN on valid goes from "
            f"{history[0].ppl:.2f} to {history[-1].ppl:.2f}; it is lowest ({reached.ppl:.2f}) at step "
            f"{reached.step:,}{', the last' if reached is history[-1] else ''}."
        )
    return findings


def _outlook(fit: GrowthFit, name: str) -> str:
    doubt = ""
    if fit.other is not None:
        doubt = f" The other curve ({formula(fit.other.curve)}) says {fit.other.ten_times:.2f}."
    return (
        f"If the fitted curve ({formula(fit.curve)}) goes on, ten times the text would bring {LABELS[name]} to about "
        f"{fit.ten_times:.2f} ({100 * fit.change:+.1f}%).{doubt} That is ten times beyond anything measured here. It "
        "takes for granted that the new text is of the same kind, and it leaves out what training and tuning with the "
        "larger store would add. Take it as a direction."
    )


def formula(curve: Curve) -> str:
    """The curve in words of numbers, x being the size relative to the whole store.

    >>> formula(Curve("log", 3.0, -0.05, 0.0, 0.0)), formula(Curve("power", 2.5, 0.1, 0.5, 0.0))
    ('loss = 3.000 - 0.050 ln x', 'loss = 2.500 + 0.100 / x^0.50')
    """
    sign = "-" if curve.b < 0 else "+"
    term = "ln x" if curve.kind == "log" else f"/ x^{curve.c:.2f}"
    return f"loss = {curve.a:.3f} {sign} {abs(curve.b):.3f} {term}"


def _fit_table(result: GrowthResult) -> Table:
    whole = result.sizes[-1].predictors
    return Table.of(
        "growth_fit",
        "Fitted curves and where they lead (an extrapolation)",
        result.fits.items(),
        text("predictor", lambda line: LABELS[line[0]]),
        text("curve, x: share of the store", lambda line: formula(line[1].curve)),
        number("residual (nats)", lambda line: line[1].curve.error, 4),
        perplexity("now", lambda line: whole[line[0]].ppl),
        perplexity("ten times the text", lambda line: line[1].ten_times),
        percent("change", lambda line: line[1].change, sign=True),
        perplexity("by the other curve", lambda line: None if line[1].other is None else line[1].other.ten_times),
    )


def _size_figure(result: GrowthResult, names: list[str]) -> Figure:
    figure, (axes,) = axes_of(height=3.6)
    sizes = result.sizes
    whole = sizes[-1].tokens
    tokens = [size.tokens for size in sizes]
    reach = np.geomspace(sizes[0].share, MORE, 60)
    for name in names:
        line_of(axes, name, tokens, [size.predictors[name].ppl for size in sizes])
        if name in result.fits:
            ppls = [perplexity_of(result.fits[name].curve.at(float(x))) for x in reach]
            axes.plot(reach * whole, ppls, color=COLOURS[name], lw=0.9, ls=(0, (1, 2)))
    if result.fits:
        axes.axvspan(whole, MORE * whole, color="#eeeeee", zorder=0)
        place = {"xytext": (4, -4), "textcoords": "offset points", "xycoords": ("data", "axes fraction")}
        axes.annotate("extrapolated", (whole, 1), va="top", fontsize=8, **place)
    axes.set_xscale("log", base=10)
    axes.set(xlabel="tokens in the store (thin dotted lines: fitted curves)", ylabel="test perplexity")
    legend_of(axes)
    ends = "; ".join(
        f"{LABELS[name]} {sizes[0].predictors[name].ppl:.2f} to {sizes[-1].predictors[name].ppl:.2f}" for name in names
    )
    words = f"Perplexity from {tokens[0]:,} to {tokens[-1]:,} tokens: {ends}."
    return Figure("growth", "Perplexity by size of the store", words, figure)


def _step_figure(history: Sequence[TrainingStep]) -> Figure:
    figure, (axes,) = axes_of()
    line_of(axes, "gnn", [entry.step for entry in history], [entry.ppl for entry in history])
    base_line(axes, history[0].base)
    axes.set(xlabel="training step", ylabel="perplexity on valid")
    legend_of(axes)
    words = f"From {history[0].ppl:.2f} at step 0 to {history[-1].ppl:.2f} at step {history[-1].step:,}."
    return Figure("growth_steps", "Perplexity on valid by training step", words, figure)


PART = AnalysisPart(
    "growth",
    "Growth",
    GrowthResult,
    lambda m: measure(m.subject, m.draft),
    show,
    lambda subject: len(SHARES) * subject.seconds_of_sample(TOKENS),
    stages=("tune", "eval"),
)
