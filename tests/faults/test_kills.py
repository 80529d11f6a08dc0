"""kill -9, SIGINT and SIGTERM at any time; two writers; readers during a writer."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from gnnlm.artifact import Artifact
from gnnlm.run.stages import STAGES
from tests.faults.fault import Child, Ended, Signal, command
from tests.faults.scenarios import SCENARIOS, Scenario, World, built

KILLS = 9  # of one run, one after the other
RUNS = 12  # so killed
NAMED = {scenario.name: scenario for scenario in SCENARIOS}
RUN, REPLACE, FINETUNE = NAMED["run"], NAMED["run --rebuild"], NAMED["lm (finetuned)"]


def test_there_are_enough_kills() -> None:
    assert KILLS * RUNS >= 100


@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", range(RUNS))
def test_killed_again_and_again(world: World, tmp_path: Path, seed: int, number: int) -> None:
    """Each attempt goes on where the last one was killed; the last one ends with the bytes of a run never killed."""
    scenario = (RUN, REPLACE, FINETUNE)[number % 3]
    chance, place = random.Random(f"{seed} kills {number}"), tmp_path / "x"
    world.straight(scenario.config)
    world.prepare(scenario, place)
    for _ in range(KILLS):
        after = chance.uniform(0.02, 1.2)
        print(f"seed {seed}: {scenario.name} killed after {after:.3f} s")
        ended = signalled(scenario, place, signal.SIGKILL, after)
        assert ended.code in (-9, 0), ended.errors
        world.check_state(scenario, place)
    world.check_finish(scenario, place)


def signalled(scenario: Scenario, place: Path, number: int, seconds: float) -> Ended:
    return command(place / "run", *scenario.arguments, place / "config.yaml", signalled=Signal(number, seconds))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", range(10))
def test_signalled_at_any_time(world: World, tmp_path: Path, seed: int, number: int) -> None:
    """Ctrl-C and a polite kill: one line, exit code 130, and the same command goes on."""
    scenario, which = (RUN, FINETUNE, REPLACE)[number % 3], (signal.SIGINT, signal.SIGTERM)[number % 2]
    chance, place = random.Random(f"{seed} signals {number}"), tmp_path / "x"
    world.prepare(scenario, place)
    for _ in range(3):
        after = chance.uniform(0.1, 2.0)
        print(f"seed {seed}: {scenario.name} gets {which.name} after {after:.3f} s")
        ended = signalled(scenario, place, which, after)
        assert "Traceback" not in ended.errors
        assert ended.code in (0, 130), ended.errors
        assert ended.code == 0 or ended.error.startswith("error: interrupted; finished work is kept")
        world.check_state(scenario, place)
    world.check_finish(scenario, place)


@pytest.mark.timeout(200)
def test_two_writers(world: World, tmp_path: Path, seed: int) -> None:
    """One builds, the other is told to wait; nothing is built twice or half."""
    chance = random.Random(f"{seed} writers")
    for attempt in range(3):
        place = tmp_path / str(attempt)
        world.prepare(RUN, place)
        first = writer(place)
        time.sleep(chance.uniform(0, 1.5))
        second = writer(place)
        ended = [first.ended(), second.ended()]
        assert sorted(each.code for each in ended) in ([0, 0], [0, 1])
        for each in ended:
            assert each.code == 0 or "another gnnlm process is building in" in each.error
        world.check(RUN, place)


def writer(place: Path, *arguments: str) -> Child:
    def work() -> None:
        from gnnlm.cli import main

        sys.argv = ["gnnlm", "run", str(place / "config.yaml"), *arguments]
        main()

    return Child(work, place / "run")


@pytest.mark.timeout(200)
def test_readers_during_every_writer(world: World, tmp_path: Path) -> None:
    """While every stage is replaced, a reader finds each artifact at any time: the old one or the new one, whole."""
    world.prepare(REPLACE, tmp_path)
    run = tmp_path / "run"
    whole = {
        name: {Artifact.open(world.straight(config) / stage.folder).fingerprint for config in ("plain", "other")}
        for name, stage in STAGES.items()
        if name not in ("lm", "passages", "cache", "eval")
    }
    child, seen, reads = writer(tmp_path, "--rebuild"), {name: set[str]() for name in whole}, 0
    while not child.wait(0):
        for name in whole:
            opened = Artifact.open(run / STAGES[name].folder)
            opened.verify(trust=False)
            seen[name].add(opened.fingerprint)
            reads += 1
    assert child.ended().code == 0
    assert all(seen[name] <= whole[name] for name in whole)
    assert reads > 20
    assert built(run).keys() == built(world.straight("other")).keys()
    shutil.rmtree(run)
