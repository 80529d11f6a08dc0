"""Components: the run's network with one thing changed at a time, each trained with the same budget.

All are compared with a baseline fork: the unchanged run, trained with that budget too. The changes are listed in
`variants.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnnlm.config import Config
from gnnlm.errors import ConfigError, TrainingError
from gnnlm.evaluate.analysis.figure import axes_of, changes_of
from gnnlm.evaluate.analysis.part import AnalysisPart, Measurement
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.variants import BASELINE, GROUPS, UNFAIR, ForkResult, ForkTraining, Variant
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.compare import SharedTokens, change_of
from gnnlm.evaluate.table import Cell, Column, Table, number, perplexity, text
from gnnlm.predict.predictor import LABELS
from gnnlm.progress import say, warn

SMALL = 0.0005  # a change that is shown as 0
LARGE = 0.5  # a change beyond this would press the others together on a linear axis
NETWORKS = ("gnn", "gnn_knn")


class ForkFigures(PartResult):
    """The perplexity of a fork's whole test text, and its change on the documents that it shares with the baseline.

    The perplexity is None if it is infinite, the change if the fork is the baseline or a score is infinite.
    """

    ppl: float | None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None

    @classmethod
    def of(cls, fork: ForkResult, baseline: ForkResult, name: str) -> ForkFigures:
        ppl = fork.run.ppl(name)
        if fork is baseline:
            return cls(ppl=ppl)
        found = change_of(fork.run, baseline.run, name, SharedTokens.between(fork.run, baseline.run))
        return cls(ppl=ppl, **({} if found is None else found.model_dump(exclude={"ppl"})))

    @property
    def known(self) -> PerplexityChange | None:
        """The change, if it is known."""
        if self.ppl is None or self.change is None:
            return None
        return PerplexityChange(**self.model_dump())


class ComponentRow(PartResult):
    """A variant and its figures; `why` says why it could not be trained, if so."""

    name: str
    group: str
    words: str
    why: str | None = None
    is_run: bool = False
    parameters: int | None = None
    seconds: float | None = None
    gnn: ForkFigures | None = None
    gnn_knn: ForkFigures | None = None

    @classmethod
    def of(cls, variant: Variant, fork: ForkResult, baseline: ForkResult) -> ComponentRow:
        return cls(
            name=variant.name,
            group=variant.group,
            words=variant.words,
            is_run=fork is baseline,
            parameters=fork.parameters,
            seconds=fork.seconds,
            gnn=ForkFigures.of(fork, baseline, "gnn"),
            gnn_knn=ForkFigures.of(fork, baseline, "gnn_knn"),
        )

    def change(self, name: str) -> PerplexityChange | None:
        """The change of +GNN or +GNN+kNN, if it is known."""
        figures: ForkFigures | None = getattr(self, name)
        return None if figures is None else figures.known

    @property
    def title(self) -> str:
        words = f"{GROUPS[self.group]} {self.words}"
        return words[0].upper() + words[1:]


class ComponentsResult(PartResult):
    """The baseline and every variant; changes of perplexity are against the baseline."""

    steps: int
    run_steps: int
    rows: list[ComponentRow]


def measure(config: Config, forks: ForkTraining) -> ComponentsResult:
    """Train the baseline and every variant, or find them trained."""
    baseline = forks.train(BASELINE)
    rows = [ComponentRow.of(BASELINE, baseline, baseline)]
    for place, variant in enumerate(forks.variants, 1):
        if variant.is_run(config):
            rows.append(ComponentRow.of(variant, baseline, baseline))
            continue
        say(f"components: {GROUPS[variant.group]} {variant.words} ({place} of {len(forks.variants)})")
        try:
            rows.append(ComponentRow.of(variant, forks.train(variant), baseline))
        except (ConfigError, TrainingError) as error:  # a finding of its own
            warn(f"components: {variant.name}: {error}")
            rows.append(ComponentRow(name=variant.name, group=variant.group, words=variant.words, why=str(error)))
    run_steps = sum(phase.steps for phase in config.train.curriculum)
    return ComponentsResult(steps=forks.steps, run_steps=run_steps, rows=rows)


def _measure(measurement: Measurement) -> ComponentsResult:
    assert measurement.forks is not None
    return measure(measurement.subject.config, measurement.forks)


def show(result: ComponentsResult) -> AnalysisSection:
    _, *others = result.rows
    trained = [row for row in others if row.why is None]
    findings = _findings(trained)
    sentences = [
        f"Each row is the run with one thing changed, trained for {result.steps:,} steps (the run itself: "
        f"{result.run_steps:,}) and tuned on valid. Changes are against the baseline, the unchanged run with the same "
        "budget, on the test documents that both have; a smaller budget than the run's favours what learns fast.",
        *findings,
        *(f"{row.title} could not be trained: {row.why}" for row in others if row.why is not None),
    ]
    table = Table.of(
        "components",
        "One component changed at a time",
        result.rows,
        text("component", lambda row: GROUPS.get(row.group, "baseline")),
        text("value", lambda row: row.words),
        *_columns("gnn"),
        *_columns("gnn_knn"),
        number("parameters", lambda row: row.parameters, 0),
        number("training (s)", lambda row: row.seconds, 0),
    )
    changed = [row for row in trained if row.change("gnn") is not None]
    return AnalysisSection(sentences, [table], [_figure(changed)] if changed else [], findings[:1])


def _columns(name: str) -> list[Column]:
    def ppl(row: ComponentRow) -> Cell:
        figures: ForkFigures | None = getattr(row, name)
        if figures is None:
            return None
        return "inf" if figures.ppl is None else figures.ppl

    def words(row: ComponentRow) -> Cell:
        if row.why is not None:
            return "could not be trained" if name == "gnn" else ""
        if row.is_run:
            return "the baseline" if row.group else ""
        change = row.change(name)
        return "inf" if change is None else change.words

    label = LABELS[name]
    return [perplexity(label, ppl), text(f"{label}: change against the baseline, 95%", words)]


def _findings(rows: Sequence[ComponentRow]) -> list[str]:
    """The significant change that helps most, the one that hurts most, and what the leakage rule prevents."""
    known = [(row, change) for row in rows if (change := row.change("gnn")) is not None]
    fair = [(row, change) for row, change in known if row.name != UNFAIR]
    significant = [(row, change) for row, change in fair if change.is_significant]
    said = []
    if significant:
        best, low = min(significant, key=lambda each: each[1].change)
        worst, high = max(significant, key=lambda each: each[1].change)
        if low.change < -SMALL:
            said.append(f"{best.title} helps most of {len(fair)} changes: {low.words} in perplexity of +GNN.")
        if high.change > SMALL:
            said.append(f"{worst.title} hurts most of {len(fair)} changes: {high.words} in perplexity of +GNN.")
    if len(significant) < len(fair):
        said.append(f"{len(fair) - len(significant)} of {len(fair)} changes are not significant.")
    said += [
        "Without the leakage rule a train position retrieves itself and with it its own answer, and the network "
        f"learns to copy what new text does not have: {change.words} in perplexity of +GNN on test."
        for row, change in known
        if row.name == UNFAIR
    ]
    return said


def _figure(rows: Sequence[ComponentRow]) -> Figure:
    figure, (axes,) = axes_of(height=1.2 + 0.26 * len(rows), width=7.0)
    changes = {name: [row.change(name) for row in rows] for name in NETWORKS}
    changes_of(axes, [row.title for row in rows], changes, against="the baseline")
    if max(abs(change.change) for each in changes.values() for change in each if change is not None) > LARGE:
        axes.set_xscale("symlog", linthresh=100 * LARGE)
        axes.xaxis.set_major_formatter("{x:g}")
    words = "; ".join(f"{row.title} {change.words}" for row in rows if (change := row.change("gnn")) is not None)
    caption = "What each change does to perplexity"
    return Figure("components", caption, f"Change of +GNN against the baseline: {words}.", figure)


PART = AnalysisPart(
    "components",
    "Components",
    ComponentsResult,
    _measure,
    show,
    lambda subject: 0.0,  # the seconds of each fork are estimated one by one
    gnn=True,
    trains=True,
)
