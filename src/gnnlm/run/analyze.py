"""The analysis of a run: every part an artifact of its own under RUN/analysis, and a page of all of them.

A part is done while the artifacts that it reads are the same. It is made anew when they have changed, and an
interrupted part is resumed.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact, Draft, State, disk, plain, read_manifest, state_of, write_json, write_whole
from gnnlm.artifact.ownership import settle
from gnnlm.config import load_config
from gnnlm.errors import ArtifactError, ConfigError, GnnlmError
from gnnlm.evaluate.analysis.analysis_page import MissingPart, page_of
from gnnlm.evaluate.analysis.analysis_parts import PARTS, PREPARATIONS
from gnnlm.evaluate.analysis.markdown import markdown_of
from gnnlm.evaluate.analysis.part import AnalysisPart, Measurement, Preparation
from gnnlm.evaluate.analysis.section import PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.analysis.variants import BASELINE, ForkTraining, Variant, select_variants
from gnnlm.progress import say, warn
from gnnlm.run.forks import Forks, alternative_of
from gnnlm.run.lock import is_locked
from gnnlm.run.run import Run

FOLDER, FORKS = "analysis", "forks"
PAGE, MARKDOWN, RESULTS = "index.html", "analysis.md", "analysis.json"
Work = AnalysisPart[Any] | Preparation


@dataclass(frozen=True)
class Obstacle:
    """Why a step cannot be made, and the command that changes this (empty if none does)."""

    why: str
    command: str = ""


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of an analysis: whether to train forks, for how many steps, of which components; runs to compare with."""

    train: bool = False
    steps: int | None = None
    components: tuple[str, ...] = ()
    others: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not self.train and (self.steps is not None or self.components):
            raise ConfigError("--steps and --component say what is trained; add --train")


@dataclass(frozen=True)
class AnalysisStep:
    """A part or a preparation to make: its state, why it cannot be made (if so), and the seconds that it will take."""

    name: str
    work: Work
    state: State
    obstacle: Obstacle | None = None
    seconds: float = 0.0
    forks: tuple[tuple[str, float], ...] = ()  # those to be trained, and the seconds that each takes

    @property
    def words(self) -> str:
        """What will be done with the step."""
        if self.obstacle is not None:
            return f"cannot be made: {self.obstacle.why}"
        return {"done": "done", "missing": "to do", "half-done": "resumes"}.get(self.state, "made anew")


class Analysis:
    """The analysis of one run."""

    def __init__(self, run: Run, options: AnalysisOptions | None = None) -> None:
        self.run = run
        self.root = run.root / FOLDER
        self.options = options or AnalysisOptions()
        if is_locked(run.root):
            raise ArtifactError(f"another gnnlm process is building in {run.root}; analyse it when that has finished")
        if self.root.exists() and not self.root.is_dir():
            raise ArtifactError(f"{self.root} is a file, where the analysis keeps its folder; move it elsewhere")
        done = [name for name in run.stages if _opens(run, name)]
        self.subject = Subject(str(run.root), run.config, run.snapshot, run.artifact, done)
        self._made: dict[str, Artifact] = {}
        self._failed: dict[str, GnnlmError] = {}

    # -- plan ----------------------------------------------------------------------------------------------

    def plan(self, names: Sequence[str]) -> list[AnalysisStep]:
        """The steps for some parts or preparations, in order, each after the preparations that it reads."""
        wanted: dict[str, Work] = {}
        for name in names:
            if name not in PARTS and name not in PREPARATIONS:
                near = difflib.get_close_matches(name, [*PARTS, *PREPARATIONS], n=1)
                words = f"did you mean {near[0]}?" if near else f"the analysis has {', '.join(PARTS)}"
                raise ConfigError(f"no part named {name!r}; {words}")
            self._add(name, wanted)
        return [self._step(name, work) for name, work in wanted.items()]

    def _add(self, name: str, wanted: dict[str, Work]) -> None:
        work = _work(name)
        if self._obstacle(work) is None:  # else nothing is prepared for it
            for before in _before(work):
                self._add(before, wanted)
        wanted.setdefault(name, work)

    def _step(self, name: str, work: Work) -> AnalysisStep:
        obstacle = self._obstacle(work)
        if obstacle is not None:
            return AnalysisStep(name, work, "missing", obstacle)
        state = state_of(self.root / name, self._inputs(work))
        if state == "done":
            return AnalysisStep(name, work, state)
        forks: tuple[tuple[str, float], ...] = ()
        if isinstance(work, AnalysisPart) and work.trains:
            forks = tuple((fork.name, self._forks.seconds(fork)) for fork in self._forks.untrained(self._variants))
        return AnalysisStep(
            name, work, state, None, work.seconds(self.subject) + sum(seconds for _, seconds in forks), forks
        )

    def _obstacle(self, work: Work) -> Obstacle | None:
        """Why a step cannot be made with this run; None if it can."""
        if isinstance(work, AnalysisPart) and work.gnn and "train" not in self.run.stages:
            return Obstacle("needs a graph network, and this run has none (gnn.layers: 0)")
        without = [stage for stage in work.stages if stage in self.run.stages and stage not in self.subject.stages]
        if without:
            states = {stage: self.run.state(self.run.stages[stage]) for stage in without}
            words = ", ".join(f"{stage} ({state})" for stage, state in states.items())
            again = " --rebuild" if {"stale", "damaged"} & set(states.values()) else ""
            several = "the stages" if len(without) > 1 else "the stage"
            return Obstacle(f"needs {several} {words}", f"gnnlm run {self._path}{again}")
        if isinstance(work, AnalysisPart) and work.trains and not self._variants:
            command = f"gnnlm analyze {self._path} --part {work.name} --train"
            return Obstacle("trains forks of the run, which is done only when asked for (--train)", command)
        return next((found for before in _before(work) if (found := self._obstacle(_work(before)))), None)

    @property
    def _path(self) -> str:
        """The run directory as a shell reads it."""
        return shlex.quote(str(self.run.root))

    def _inputs(self, work: Work) -> dict[str, Any]:
        inputs: dict[str, Any] = {"version": work.version}
        for stage in work.stages:
            if stage in self.run.stages:
                inputs[f"artifact {stage}"] = self.run.artifact(stage).fingerprint
        for before in _before(work):
            inputs[f"inputs of {before}"] = self._inputs(_work(before))
        if isinstance(work, AnalysisPart) and work.trains:
            inputs |= {"steps": self._forks.steps, "forks": [variant.name for variant in self._variants]}
        if isinstance(work, AnalysisPart) and work.compares:
            inputs["others"] = {path: run.artifact("eval").fingerprint for path, run in self._others.items()}
        return dict(plain(inputs))

    # -- forks and other runs: those asked for, else those of the last time -----------------------------------

    def _recorded(self, name: str) -> dict[str, Any]:
        """What a part that is there was made from."""
        try:
            inputs: dict[str, Any] = read_manifest(self.root / name).inputs
        except ArtifactError:
            return {}
        return inputs

    @cached_property
    def _forks(self) -> Forks:
        usual = max(1, sum(phase.steps for phase in self.run.config.train.curriculum) // 3)
        last = None if self.options.train else self._recorded("components").get("steps")
        return Forks(self.run, self.root / FORKS, self.options.steps or last or usual)

    @cached_property
    def _variants(self) -> list[Variant]:
        """The changes that the part components shows: those asked for, and those that are trained already."""
        forks, recorded = self._forks, self._recorded("components")
        asked = select_variants(forks.variants, self.options.components) if self.options.train else []
        as_it_was = {"version": PARTS["components"].version, "artifact eval": self.run.artifact("eval").fingerprint}
        current = as_it_was.items() <= recorded.items() and state_of(self.root / "components", recorded) == "done"
        if not asked and current:  # shown even where its forks were removed
            return [variant for variant in forks.variants if variant.name in recorded["forks"]]
        if not asked and not forks.is_done(BASELINE):
            return []
        as_run = [variant for variant in forks.variants if variant.is_run(self.run.config)]
        made = [v for v in forks.variants if v in asked or (v not in as_run and forks.is_done(v))]
        groups = {variant.group for variant in made}  # each with the value that the run itself has
        return [v for v in forks.variants if v in made or (v in as_run and v.group in groups)]

    @cached_property
    def _others(self) -> dict[str, Run]:
        """Other finished runs, by path."""
        if self.options.others:
            runs = {str(path.resolve()): Run(load_config(path), reading=True) for path in self.options.others}
            for other in runs.values():
                other.artifact("eval")  # says what is wrong with it, if anything is
            return runs
        found = {}
        for path in self._recorded("alternatives").get("others", {}):
            with suppress(GnnlmError):
                other = Run(load_config(Path(path)), reading=True)
                other.artifact("eval")
                found[path] = other
        return found

    def _measurement(self, part: AnalysisPart[Any], draft: Draft) -> Measurement:
        forks = ForkTraining(self._variants, self._forks.steps, self._forks.train) if part.trains else None
        runs = {self.subject.name: self.run, **self._others} if part.compares else {}
        alternatives = [alternative_of(run, name) for name, run in runs.items()]
        return Measurement(self.subject, draft, self._made, forks, alternatives)

    # -- build ---------------------------------------------------------------------------------------------

    def build(self, steps: Sequence[AnalysisStep], rebuild: bool = False) -> dict[str, dict[str, Any]]:
        """Make the steps that can be made and are not done, then the page; the results by part.

        A part that fails does not keep the others from being made; its error is raised at the end.
        """
        with self.run.building():
            for step in steps:
                if step.obstacle is None and not any(before in self._failed for before in _before(step.work)):
                    try:
                        self._made[step.name] = self._build(step.name, step.work, rebuild)
                    except GnnlmError as error:
                        warn(f"{step.name} could not be made: {error}")
                        self._failed[step.name] = error
            results = self._write_page()
        if self._failed:
            name, first = next(iter(self._failed.items()))
            more = f" (and {len(self._failed) - 1} more)" if len(self._failed) > 1 else ""
            raise type(first)(f"the part {name}{more} could not be made, all others are in {self.page}: {first}")
        return results

    def _build(self, name: str, work: Work, rebuild: bool) -> Artifact:
        path, inputs = self.root / name, self._inputs(work)
        settle(path)
        if not rebuild and state_of(path, inputs) == "done":
            say(f"{name}: already done")
            return Artifact.open(path)
        with Draft(path, f"analysis {name}", inputs, rebuild=True) as draft:
            if draft.resumed:
                say(f"{name}: resuming where it was interrupted")
            if isinstance(work, Preparation):
                return work.build(draft, self.subject)
            return work.build(self._measurement(work, draft))

    def _write_page(self) -> dict[str, dict[str, Any]]:
        """The page of all parts that are done and current, whichever were asked for; returns their results."""
        results = {name: result for name, part in PARTS.items() if (result := self._result(name, part)) is not None}
        sections = [PARTS[name].section(result) for name, result in results.items()]
        absent = [self._absent(name, part) for name, part in PARTS.items() if name not in results]
        report = self.subject.report if "eval" in self.subject.stages else None
        disk.make_directories(self.root)
        write_whole(self.page, page_of(self.subject.name, report, sections, absent))
        write_whole(self.root / MARKDOWN, markdown_of(self.subject.name, report, sections, absent))
        values = {name: result.as_json() for name, result in results.items()}
        write_json(self.root / RESULTS, values)
        return values

    def _absent(self, name: str, part: AnalysisPart[Any]) -> MissingPart:
        """Why a part is not on the page, and the command that makes it."""
        obstacle = self._obstacle(part)
        if obstacle is not None:
            return MissingPart(name, part.title, obstacle.why, obstacle.command)
        why = next((str(self._failed[step]) for step in (name, *part.after) if step in self._failed), "not made yet")
        return MissingPart(name, part.title, why, f"gnnlm analyze {self._path} --part {name}")

    def _result(self, name: str, part: AnalysisPart[Any]) -> PartResult | None:
        if self._obstacle(part) is not None or state_of(self.root / name, self._inputs(part)) != "done":
            return None
        result: PartResult = part.read(self._made.get(name) or Artifact.open(self.root / name))
        return result

    @property
    def page(self) -> Path:
        return self.root / PAGE


def _work(name: str) -> Work:
    return PARTS.get(name) or PREPARATIONS[name]


def _before(work: Work) -> tuple[str, ...]:
    return work.after if isinstance(work, AnalysisPart) else ()


def _opens(run: Run, name: str) -> bool:
    try:
        run.artifact(name)
    except ArtifactError:
        return False
    return True


def asked_parts(named: Sequence[str] | None, asked: AnalysisOptions) -> list[str]:
    """The parts to make: those named, or all."""
    for name in named or ():
        if name in PARTS and PARTS[name].trains and not asked.train:
            raise ConfigError(f"the part {name} trains forks of the run; add --train (a plan of its cost is printed)")
    return list(dict.fromkeys(named)) if named else list(PARTS)
