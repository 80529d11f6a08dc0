"""Forks of a run for the analysis: one thing changed, trained with a budget, kept under RUN/analysis/forks.

A fork is a run of its own: stages that the change leaves valid are linked, the others are built, and resumed after an
interruption. A fork of artifacts that the run no longer has is made anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gnnlm.artifact import disk, plain, write_json
from gnnlm.config import Config, changed, load_config
from gnnlm.config.network_config import TrainConfig
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.evaluate.analysis.variants import BASELINE, ForkResult, Variant, variants_of
from gnnlm.evaluate.compare import AlternativeRun, ComparableRun
from gnnlm.evaluate.report import read_report
from gnnlm.plan.needs import PlanFacts, plan
from gnnlm.plan.rates import Rates, measured_rates, rates_of_fork
from gnnlm.plan.sizes import ModelSizes, network_parameters
from gnnlm.progress import say
from gnnlm.run.planning import sizes_of_text, stored_sizes
from gnnlm.run.run import Run

RECORD = "forked-from.json"  # what a fork was made from


class Forks:
    """The forks of a run with one budget of training steps."""

    def __init__(self, run: Run, folder: Path, steps: int) -> None:
        self.run = run
        self.folder = folder
        self.steps = steps
        self._records: dict[str, dict[str, Any]] = {}

    @cached_property
    def variants(self) -> list[Variant]:
        return variants_of(self.run.config, int(self.run.artifact("encode").facts["width"]))

    def path(self, variant: Variant) -> Path:
        return self.folder / f"{variant.name}-{self.steps}"

    def config(self, variant: Variant, path: Path | None = None) -> Config:
        """The run's config with the change and the budget; passages are left out, they do not change."""
        budget = budget_of(self.run.config.train, self.steps)
        changes = {**budget, "eval.context_retrieval.enabled": False, **variant.changes}
        place = {"run": str(path or self.path(variant))}
        return changed(self.run.config, {**changes, **place}, "a fork of the run")

    def is_done(self, variant: Variant) -> bool:
        """Whether the fork of a change is trained and evaluated."""
        path = self.path(variant)
        try:
            if not self._is_current(path, variant):
                return False
        except ConfigError:  # this run cannot be changed so; training says why
            return False
        fork = Run(load_config(path), reading=True)
        return fork.state(fork.stages["eval"]) == "done"

    def untrained(self, variants: Sequence[Variant]) -> list[Variant]:
        """The forks that some changes still need; a change that the run has already needs the baseline only."""
        needed = [BASELINE, *(variant for variant in variants if not variant.is_run(self.run.config))]
        return [variant for variant in needed if not self.is_done(variant)]

    # -- plan ----------------------------------------------------------------------------------------------

    def seconds(self, variant: Variant) -> float:
        """An estimate of the time that a change takes here; 0 if it cannot be made."""
        try:
            config = self.config(variant)
            model = replace(self._model, gnn_parameters=network_parameters(config, self._model.width))
            kept = self.run.kept_by(Run(config, reading=True))
        except ConfigError:
            return 0.0
        rates = rates_of_fork(self._rates, self.run.config, self._model, config, model)
        facts = PlanFacts(model, sizes_of_text(self.run), rates)
        needs = plan(config, facts)
        return sum(need.seconds for name, need in needs.items() if name not in kept)

    @cached_property
    def _model(self) -> ModelSizes:
        """The base model's own size is left out: no change reads text again, and loading the model would take long."""
        return stored_sizes(self.run)

    @cached_property
    def _rates(self) -> Rates:
        return measured_rates(self.run.config, self._model, sizes_of_text(self.run)["train"].tokens)

    # -- train ---------------------------------------------------------------------------------------------

    def train(self, variant: Variant) -> ForkResult:
        """Build the fork of a change, or find it built."""
        fork = self.fork(variant)
        fork.build_all()
        return trained(fork, variant.name)

    def fork(self, variant: Variant) -> Run:
        """The fork of a change, with the stages that it shares with the run; a current fork is kept as it is."""
        path = self.path(variant)
        if not self._is_current(path, variant):
            self._fork(path, variant)
        return Run(load_config(path), reading=True)

    def _is_current(self, path: Path, variant: Variant) -> bool:
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(record == self._record(variant))

    def _record(self, variant: Variant) -> dict[str, Any]:
        if variant.name not in self._records:
            self._records[variant.name] = self._made_from(variant)
        return self._records[variant.name]

    def _made_from(self, variant: Variant) -> dict[str, Any]:
        config = self.config(variant)
        kept = self.run.kept_by(Run(config, reading=True))
        values = {key: value for key, value in config.model_dump(mode="json").items() if key != "run"}
        return dict(
            plain({"config": values, "artifacts": {name: self.run.artifact(name).fingerprint for name in kept}})
        )

    def _fork(self, path: Path, variant: Variant) -> None:
        """Make the fork in a temporary folder, and move it to its place when it is complete."""
        if path.exists():
            if not (path / RECORD).is_file():
                raise ArtifactError(f"{path} was not made by gnnlm analyze; move it elsewhere")
            say(f"{variant.name}: the run has changed; its fork is made anew")
            disk.remove_tree(path)
        beside = path.with_name(f".{path.name}.partial")
        if beside.exists():
            disk.remove_tree(beside)
        kept = self.run.fork(self.config(variant, beside))
        write_json(beside / RECORD, self._record(variant))
        disk.rename(beside, path)
        disk.sync_directory(path.parent)
        say(f"{variant.name}: forked; {', '.join(kept)} are the run's")


def alternative_of(run: Run, name: str) -> AlternativeRun:
    """A finished run as one of the alternatives."""
    finished, scored = finished_of(run, name), run.artifact("eval")
    compared = finished.report.passages
    more = [] if compared is None else [row for row in compared.rows if row not in finished.report.rows]
    passages = {row: np.asarray(scored.array(f"{row}.log_probs.npy"), dtype=np.float64) for row in more}
    encoded, search = run.artifact("encode"), run.artifact("search").facts["seconds"]
    took = encoded.facts["seconds"]
    train = took["train"] if "train" in took else sum(part.facts["seconds"] for part in encoded.parts)
    seconds = {"encode": train + took["valid"]}
    seconds |= {f"search {split}": search[split] for split in ("train", "valid")}
    seconds |= {stage: run.artifact(stage).facts["seconds"] for stage in ("lm", "train") if stage in run.stages}
    return AlternativeRun(finished, passages, seconds)


def trained(fork: Run, name: str) -> ForkResult:
    """A finished fork's figures."""
    training = fork.artifact("train")
    facts = training.facts
    return ForkResult(finished_of(fork, name), int(facts["parameters"]), float(facts["seconds"]))


def finished_of(run: Run, name: str) -> ComparableRun:
    """A finished run as it is compared with others."""
    lm = run.artifact("lm") if "lm" in run.stages else None
    scored = run.artifact("eval")
    return ComparableRun.of(name, read_report(scored), scored, run.artifact("corpus"), lm)


def budget_of(train: TrainConfig, steps: int) -> dict[str, Any]:
    """The fields of a training with so many steps: phases as long as they were to each other, the warm-up shortened.

    >>> budget_of(TrainConfig(), 120)["train.curriculum"]
    [{'k': 32, 'steps': 100}, {'k': 128, 'steps': 20}]
    """
    whole = sum(phase.steps for phase in train.curriculum)
    ends, before = [], 0
    for phase in train.curriculum:
        before += phase.steps
        ends.append(round(steps * before / whole))
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    phases = [
        {"k": phase.k, "steps": length} for phase, length in zip(train.curriculum, lengths, strict=True) if length
    ]
    return {
        "train.curriculum": phases,
        "train.warmup": min(train.warmup, max(1, steps // 5)),
        "train.validate_every": min(train.validate_every, max(1, steps // 3)),
    }
