"""What is interrupted: commands, the run that each starts from, and what it must be in the end.

To have another command interrupted, add a `Scenario`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gnnlm.artifact import Artifact
from gnnlm.artifact.ownership import settle
from gnnlm.run.stages import STAGES
from tests.conftest import TINY, merge, save_tiny_lm, write_texts
from tests.faults.fault import Ended, Fault, command

SMALL: dict[str, Any] = merge(
    TINY,
    {
        "store": {"segment_tokens": 700, "shard_tokens": 256},
        "search": {"shard_queries": 512},
        "train": {"curriculum": [{"k": 4, "steps": 3}, {"k": 8, "steps": 2}], "validate_every": 2, "valid_tokens": 64},
        "tune": {"ks": [4], "lambdas": [0.0, 0.3]},
        "eval": {"bootstrap": 40},
    },
)
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other": {"seed": 1},
    "coded": {
        "index": {"kind": "IVF4,Flat"},
        "codec": {"kind": "pq", "bytes": 4},
        "cache": {"form": "states", "dtype": "pq", "bytes": 4},
    },
    "finetuned": {
        "lm": {
            "finetune": {
                "kind": "full",
                "unread": "first-reading",
                "settle": 0.2,
                "epochs": 1,
                "block": 32,
                "batch_tokens": 512,
                "validate_every": 2,
                "valid_tokens": 64,
                "warmup": 1,
            }
        }
    },
}


@dataclass(frozen=True)
class Scenario:
    """A command, and the run that it is given: one of a config, with all stages before `stage` done."""

    name: str
    arguments: tuple[str, ...]
    config: str = "plain"
    stage: str = "corpus"
    replaces: str | None = None  # the config of a finished run that the command replaces
    finish: tuple[str, ...] | None = None  # the command that finishes it, if it is not the same again

    @property
    def finishing(self) -> tuple[str, ...]:
        return self.finish or self.arguments


def of_stage(stage: str, config: str = "plain", command: str = "") -> Scenario:
    return Scenario(f"{stage} ({config})", tuple((command or stage).split()), config, stage)


SCENARIOS: list[Scenario] = [
    *(of_stage(stage) for stage in ("corpus", "encode", "search", "train", "cache", "tune", "eval")),
    *(of_stage(stage, "coded") for stage in ("codec", "index", "cache")),
    of_stage("lm", "finetuned", "lm finetune"),
    Scenario("run", ("run",)),
    Scenario("run --rebuild", ("run", "--rebuild"), "other", replaces="plain"),
]


@dataclass
class World:
    """A folder with a model, text, and finished runs that were never interrupted."""

    folder: Path
    _made: dict[str, Path] = field(default_factory=dict)
    _changes: dict[str, int] = field(default_factory=dict)

    def values(self, config: str, run: Path) -> dict[str, Any]:
        text, model = self.folder / "text", self.folder / "model"
        if not text.exists():
            write_texts(text, documents=8, sentences=5)
            save_tiny_lm(model)
        given = {"run": str(run), "corpus": {"source": str(text)}, "lm": {"model": str(model)}}
        return merge(merge(SMALL, CONFIGS[config]), given)

    def write_config(self, config: str, run: Path) -> Path:
        path = run.parent / "config.yaml"
        path.write_text(yaml.safe_dump(self.values(config, run)))
        return path

    def straight(self, config: str) -> Path:
        """The finished run of a config, built without a fault."""
        if config not in self._made:
            place = self.folder / f"straight-{config}"
            place.mkdir()
            ended = command(place / "run", "run", self.write_config(config, place / "run"))
            assert ended.code == 0, ended.errors
            self._made[config] = place / "run"
        return self._made[config]

    def prepare(self, scenario: Scenario, place: Path) -> Path:
        """The run that a command is given, and beside it its config; returns the config."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        run = place / "run"
        if scenario.replaces is not None:
            shutil.copytree(self.straight(scenario.replaces), run)
        elif scenario.stage == "corpus":
            run.mkdir()
        else:
            shutil.copytree(self.straight(scenario.config), run)
            order = list(STAGES)
            for name in order[order.index(scenario.stage) :]:
                shutil.rmtree(run / STAGES[name].folder, ignore_errors=True)
                for part in run.glob(f"segments/*/{STAGES[name].part}") if STAGES[name].part else ():
                    shutil.rmtree(part)
        return self.write_config(scenario.config, run)

    def run(self, scenario: Scenario, place: Path, fault: Fault | None = None) -> Ended:
        return command(place / "run", *scenario.arguments, place / "config.yaml", fault=fault)

    def changes(self, scenario: Scenario, place: Path) -> int:
        """How many changes on the disk a command makes."""
        if scenario.name not in self._changes:
            self.prepare(scenario, place)
            ended = self.run(scenario, place)
            assert ended.code == 0, ended.errors
            self._changes[scenario.name] = ended.changes
        return self._changes[scenario.name]

    def check(self, scenario: Scenario, place: Path) -> None:
        """What was interrupted is old or new, says so, and can be finished: with the bytes of what never was."""
        self.check_state(scenario, place)
        self.check_finish(scenario, place)

    def check_finish(self, scenario: Scenario, place: Path) -> None:
        run, config = place / "run", place / "config.yaml"
        ended = command(run, *scenario.finishing, config)
        assert ended.code == 0, ended.errors
        assert "Traceback" not in ended.errors
        for stage in STAGES.values():  # as the next build does; a stage that is done is not touched by its own command
            settle(run / stage.folder)
        expected, found = built(self.straight(scenario.config)), built(run)
        stages = {Path(name).parts[0] for name in found}
        assert stages, "nothing was built"
        expected = {name: data for name, data in expected.items() if name in found or Path(name).parts[0] in stages}
        if scenario.finishing[0] != "run":
            expected = {name: data for name, data in expected.items() if _stage_of(name) in _up_to(scenario.stage)}
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
        assert [path.name for path in run.rglob(".*.partial")] == [path.name for path in run.rglob(".*.old")] == []

    def check_state(self, scenario: Scenario, place: Path) -> None:
        run, config = place / "run", place / "config.yaml"
        status = command(run, "status", config, "--json")
        assert status.code == 0, status.errors
        states = {name: row["state"] for name, row in json.loads(status.output.splitlines()[-1]).items()}
        wanted = {"done", "half-done", "missing"} | ({"stale"} if scenario.replaces else set())
        assert set(states.values()) <= wanted, status.output
        known = [self.straight(config) for config in (scenario.config, scenario.replaces) if config is not None]
        for name, stage in STAGES.items():
            if not (run / stage.folder / "manifest.json").exists():
                assert scenario.replaces is None or name not in states, f"{name} is gone"
                continue
            opened = Artifact.open(run / stage.folder)
            opened.verify(trust=False)
            if name not in ("lm", "eval", "cache"):  # whose files hold times, or what depends on them
                whole = [Artifact.open(other / stage.folder).fingerprint for other in known]
                assert opened.fingerprint in whole, f"{name} is neither the old one nor the new one"


def _up_to(stage: str) -> set[str]:
    order = list(STAGES)
    return set(order[: order.index(stage) + 1])


def _stage_of(name: str) -> str:
    """The stage that made a file of a run."""
    parts = Path(name).parts
    kind = parts[2] if parts[0] == "segments" else None
    return next(
        stage for stage, made in STAGES.items() if (made.part == kind if kind is not None else made.folder == parts[0])
    )


def built(run: Path) -> dict[str, bytes]:
    """The files of a run's artifacts by name, but for those that hold times."""
    return dict(_built(run))


def _built(run: Path) -> Iterator[tuple[str, bytes]]:
    folders = {stage.folder for stage in STAGES.values()} | {"segments"}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run)
        timed = path.name in ("manifest.json",) or (name.parts[0] == "report" and path.suffix != ".npy")
        if path.is_file() and name.parts[0] in folders and not timed:
            yield str(name), path.read_bytes()
