"""The parts of the analysis: what each needs of a run, how it is measured and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.evaluate.analysis import (
    alternatives,
    calibration,
    complexity,
    components,
    gain_by_kind,
    gain_examples,
    growth,
    neighbour_counts,
    representation,
    search_quality,
    target_recall,
    tuning_surface,
    word_gains,
)
from gnnlm.evaluate.analysis.alternatives import Candidate
from gnnlm.evaluate.analysis.components import Trained, Variant
from gnnlm.evaluate.analysis.gnn_store import build_gnn_store
from gnnlm.evaluate.analysis.score_cache import ScoredSplit, score_split
from gnnlm.evaluate.analysis.section import Section
from gnnlm.evaluate.analysis.subject import Subject


@dataclass(frozen=True)
class Training:
    """What is to be trained: changes of the run, with how many steps, and what trains one (or finds it trained)."""

    variants: Sequence[Variant]
    steps: int
    train: Callable[[Variant], Trained]


@dataclass(frozen=True)
class Measurement:
    """What a part has at hand: the run, its own draft to keep rows in, and what earlier parts left, by name.

    Parts with `trains` also have forks of the run to train, parts with `compares` the run and others that were named.
    """

    subject: Subject
    draft: Draft
    made: Mapping[str, Artifact]
    training: Training | None = None
    candidates: Sequence[Candidate] = ()

    def scored(self, split: str) -> ScoredSplit:
        return ScoredSplit(self.made[f"scored-{split}"])


@dataclass(frozen=True)
class Part:
    """A part of the analysis.

    `stages` are the stages of the run that it reads, `after` the parts (or preparations) that it reads. `measure`
    gives plain values, kept as `result.json`; `show` turns them into tables and figures. `seconds` estimates how long
    it takes.
    """

    name: str
    title: str
    stages: tuple[str, ...]
    measure: Callable[[Measurement], dict[str, Any]]
    show: Callable[[dict[str, Any]], Section]
    seconds: Callable[[Subject], float]
    after: tuple[str, ...] = ()
    gnn: bool = False  # whether it needs a graph network
    trains: bool = False  # whether it trains forks of the run, and so is made only when asked for
    compares: bool = False  # whether it compares the run with others
    version: int = 1  # raised when what it measures changes


@dataclass(frozen=True)
class Preparation:
    """Something that several parts read, made once."""

    name: str
    stages: tuple[str, ...]
    build: Callable[[Draft, Subject], Artifact]
    seconds: Callable[[Subject], float]


def _components(m: Measurement) -> dict[str, Any]:
    assert m.training is not None
    return components.measure(m.subject.config, m.training.variants, m.training.steps, m.training.train)


def _scoring(subject: Subject, split: str = "test") -> float:
    """The seconds that all predictors take over a split, encoding and search left out."""
    seconds, tokens = subject.report.seconds, subject.report.test_tokens
    return (2 * seconds["head"] + seconds["gnn"] + 4 * seconds["knn"]) * len(subject.parts.streams[split]) / tokens


def _network(subject: Subject, split: str) -> float:
    """The seconds that the graph network takes over a split."""
    return subject.report.seconds["gnn"] * len(subject.parts.streams[split]) / subject.report.test_tokens


def _searching(subject: Subject, positions: int) -> float:
    """The seconds of so many searches, at the speed of the run's index."""
    return subject.report.seconds["search"] * positions / subject.report.test_tokens


def _sample(subject: Subject, tokens: int) -> float:
    """The seconds to search and score so many test tokens, or all of them."""
    tokens = min(tokens, subject.report.test_tokens)
    return _searching(subject, tokens) + _scoring(subject) * tokens / subject.report.test_tokens


PREPARATIONS: dict[str, Preparation] = {
    f"scored-{split}": Preparation(
        f"scored-{split}",
        ("tune", "eval"),
        lambda draft, subject, split=split: score_split(draft, subject, split),  # type: ignore[misc]
        lambda subject, split=split: 2 * _scoring(subject, split),  # type: ignore[misc]
    )
    for split in ("valid", "test")
}
PREPARATIONS["gnn-store"] = Preparation(
    "gnn-store", ("tune", "eval"), build_gnn_store, lambda subject: 2 * _network(subject, "train")
)

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            "neighbours",
            "Number of neighbours",
            ("tune", "eval"),
            lambda m: neighbour_counts.measure(m.subject, m.draft, m.scored("test")),
            neighbour_counts.show,
            lambda subject: 5 * _scoring(subject),
            after=("scored-test",),
        ),
        Part(
            "recall",
            "Neighbour quality",
            ("eval",),
            lambda m: target_recall.measure(m.subject),
            target_recall.show,
            lambda subject: subject.report.test_tokens / 5e3,
            version=2,
        ),
        Part(
            "representation",
            "Representation in kNN",
            ("tune", "eval"),
            lambda m: representation.measure(
                m.subject, m.draft, m.scored("valid"), m.scored("test"), m.made["gnn-store"]
            ),
            representation.show,
            lambda subject: 4 * sum(_searching(subject, len(subject.parts.streams[s])) for s in ("valid", "test")),
            after=("scored-valid", "scored-test", "gnn-store"),
            gnn=True,
        ),
        Part(
            "components",
            "Components",
            ("eval",),
            _components,
            components.show,
            lambda subject: 0.0,  # its forks are planned one by one
            gnn=True,
            trains=True,
        ),
        Part(
            "surface",
            "Tuning surface",
            ("tune", "eval"),
            lambda m: tuning_surface.measure(m.subject, m.scored("test")),
            tuning_surface.show,
            lambda subject: subject.report.test_tokens / 300,
            after=("scored-test",),
        ),
        Part(
            "where",
            "Where it helps",
            ("eval",),
            lambda m: gain_by_kind.measure(m.subject, m.scored("test")),
            gain_by_kind.show,
            lambda subject: 5 + subject.report.test_tokens / 5e3,
            after=("scored-test",),
        ),
        Part(
            "calibration",
            "Calibration",
            ("eval",),
            lambda m: calibration.measure(m.subject, m.scored("test")),
            calibration.show,
            lambda subject: 1 + subject.report.test_tokens / 1e5,
            after=("scored-test",),
        ),
        Part(
            "words",
            "Words helped and hurt",
            ("eval",),
            lambda m: word_gains.measure(m.subject),
            word_gains.show,
            lambda subject: 1 + subject.report.test_tokens / 5e4,
        ),
        Part(
            "examples",
            "Examples",
            ("eval",),
            lambda m: gain_examples.measure(m.subject),
            gain_examples.show,
            lambda subject: 1 + subject.report.test_tokens / 5e4,
        ),
        Part(
            "complexity",
            "Complexity",
            ("tune", "eval"),
            lambda m: complexity.measure(m.subject),
            complexity.show,
            lambda subject: 10.0,
            gnn=True,
        ),
        Part(
            "search",
            "Search quality",
            ("tune", "eval"),
            lambda m: search_quality.measure(m.subject),
            search_quality.show,
            lambda subject: 2 * _sample(subject, search_quality.TOKENS),
        ),
        Part(
            "alternatives",
            "The alternatives",
            ("eval",),
            lambda m: alternatives.measure(m.candidates, m.subject.config.eval.bootstrap, m.subject.seed),
            alternatives.show,
            lambda subject: 1 + subject.report.test_tokens / 1e5,
            compares=True,
        ),
        Part(
            "growth",
            "Growth",
            ("tune", "eval"),
            lambda m: growth.measure(m.subject, m.draft),
            growth.show,
            lambda subject: len(growth.SHARES) * _sample(subject, growth.TOKENS),
        ),
    )
}
