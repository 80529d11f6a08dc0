"""A part of the analysis, and what it is measured with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gnnlm.artifact import Artifact, Draft, write_json
from gnnlm.evaluate.analysis.figure import png_of, svg_of
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.evaluate.analysis.section import AnalysisSection, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.analysis.variants import ForkTraining
from gnnlm.evaluate.compare import AlternativeRun
from gnnlm.progress import say

R = TypeVar("R", bound=PartResult)
RESULT = "result.json"


@dataclass(frozen=True)
class Measurement:
    """What a part is measured with: the run, the part's own draft, and the artifacts of preparations, by name.

    `forks` is there for a part with `trains`, `alternatives` for one with `compares`.
    """

    subject: Subject
    draft: Draft
    prepared: Mapping[str, Artifact]
    forks: ForkTraining | None = None
    alternatives: Sequence[AlternativeRun] = ()

    def scores(self, split: str) -> CachedScores:
        return CachedScores(self.prepared[f"scored-{split}"])


@dataclass(frozen=True)
class Preparation:
    """Something that several parts read, made once. `seconds` estimates how long that takes."""

    name: str
    build: Callable[[Draft, Subject], Artifact]
    seconds: Callable[[Subject], float]
    stages: tuple[str, ...] = ("tune", "eval")  # of the run, that are read
    version: int = 1


@dataclass(frozen=True)
class AnalysisPart(Generic[R]):
    """A part of the analysis: one measurement of a run, and its tables and figures.

    `measure` gives the result, `show` makes tables and figures of it. `seconds` estimates how long measuring takes.
    """

    name: str
    title: str
    result: type[R]
    measure: Callable[[Measurement], R]
    show: Callable[[R], AnalysisSection]
    seconds: Callable[[Subject], float]
    stages: tuple[str, ...] = ("eval",)  # of the run, that are read
    after: tuple[str, ...] = ()  # the preparations that are read
    gnn: bool = False  # whether a graph network is needed
    trains: bool = False  # whether forks of the run are trained, which is done only when asked for
    compares: bool = False  # whether the run is compared with others
    version: int = 1  # raised when what is measured changes

    def build(self, measurement: Measurement) -> Artifact:
        """Measure, and write the result with its tables and figures."""
        draft = measurement.draft
        began = time.monotonic()
        result = self.measure(measurement)
        write_json(draft.file(RESULT), result.as_json())
        section = self.section(result)
        for table in section.tables:
            draft.write_text(f"{table.name}.csv", table.csv())
        for figure in section.figures:
            draft.write_text(f"{figure.name}.svg", svg_of(figure.figure))
            draft.write_bytes(f"{figure.name}.png", png_of(figure.figure))
        artifact = draft.finish({"seconds": time.monotonic() - began})
        say(f"{self.name}: {section.summary[0] if section.summary else 'done'}")
        return artifact

    def read(self, artifact: Artifact) -> R:
        """Read the result back."""
        return self.result.model_validate(json.loads(artifact.text(RESULT)))

    def section(self, result: R) -> AnalysisSection:
        return replace(self.show(result), name=self.name, title=self.title)
