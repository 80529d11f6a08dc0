"""kill -9, SIGINT and SIGTERM at any time; two writers; readers during a writer."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gnnlm.artifact import Artifact
from gnnlm.run.lock import locked
from gnnlm.run.stages import STAGES
from tests.faults.fault import Child, Ended, Signal, command, run_command
from tests.faults.living import ADD, CHANGES, MORE, NAMED, REMOVE, Living
from tests.faults.scenarios import SCENARIOS, Scenario, World, built

KILLS = 9  # of one run, one after the other
RUNS = 12  # so killed
BUILDS = {scenario.name: scenario for scenario in SCENARIOS}
RUN, REPLACE, FINETUNE = BUILDS["run"], BUILDS["run --rebuild"], BUILDS["lm (finetuned)"]


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
    return Child(partial(run_command, ["run", place / "config.yaml", *arguments]), place / "run")


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


# -- a store that changes ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(280)
@pytest.mark.parametrize("which", ["SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("name", [change.name for change in CHANGES])
def test_changes_signalled_at_any_time(living: Living, tmp_path: Path, seed: int, name: str, which: str) -> None:
    """Each attempt finds what the last one left, until the change is made."""
    change, chance, sent = NAMED[name], random.Random(f"{seed} {name} {which}"), signal.Signals[which]
    run, state = living.prepare(change, tmp_path / "x"), 0
    for _ in range(4):
        after = chance.uniform(0.02, 0.5)
        print(f"seed {seed}: {name} gets {which} after {after:.3f} s")
        ended = living.run(change.command, run, signalled=Signal(sent, after))
        assert "Traceback" not in ended.errors
        assert ended.code in (0, -9 if sent == signal.SIGKILL else 130), ended.errors
        state = living.check_state(change, run, thorough=False)
        if state:
            break
    living.check_finish(change, run, state)


@pytest.mark.timeout(120)
def test_two_writers_of_a_store(living: Living, tmp_path: Path, seed: int) -> None:
    """One changes the store; the other is told who does, and leaves nothing."""
    chance, run = random.Random(f"{seed} store writers"), Path(shutil.copytree(living.base, tmp_path / "run"))
    with locked(run):
        refused = living.run(ADD, run)
        assert "another gnnlm process is building in" in refused.error
        assert "process " in refused.error
    assert not (run / "added").exists()
    first = Child(partial(run_command, living.arguments(ADD, run)), run)
    time.sleep(chance.uniform(0, 0.4))
    second = Child(partial(run_command, living.arguments(MORE, run)), run)
    for child, words in ((first, ADD), (second, MORE)):
        ended = child.ended()
        if ended.code:
            assert "another gnnlm process is building in" in ended.error
            assert living.run(words, run).code == 0
    assert sorted(names_of(living, run)[-4:]) == ["four.txt", "one.txt", "three.txt", "two.txt"]


def names_of(living: Living, run: Path) -> list[str]:
    listed = json.loads(living.run("documents {run} --json", run).output.splitlines()[-1])
    return [one["name"] for one in listed["documents"]]


def read_on(run: Path, texts: Path, said: Path) -> None:
    """Open the run and look something up, again and again, and with one book that moves on; until there is `stop`."""
    import gnnlm

    kept = gnnlm.open(run)
    text = (texts / "first" / "two.txt").read_text()[:40]
    with said.open("w") as file:
        while not (said.parent / "stop").exists():
            kept.refresh()
            for book in (kept, gnnlm.open(run)):
                found: list[Any] = [book.generation, [document.name for document in book.documents]]
                found += [[round(float(value), 3) for value in book.score(text).gnn_knn]]
                print(json.dumps(found), file=file, flush=True)


@pytest.mark.timeout(250)
def test_readers_during_every_change(living: Living, tmp_path: Path) -> None:
    """A reader that opens the run at any time, and one that moves on, find whole generations, one after the other."""
    words = [ADD, MORE, REMOVE, "replace {run} {texts}/earlier/four.txt", "compact {run}", "compact {run} --erase"]
    run, said = Path(shutil.copytree(living.base, tmp_path / "run")), tmp_path / "said"
    reader = Child(partial(read_on, run, living.folder / "texts", said), run)
    known = {0: names_of(living, run)}
    for number, each in enumerate(words, 1):
        wait_for_reads(said, reader)
        ended = living.run(each, run)
        assert ended.code == 0, ended.errors
        known[min(number, 5)] = names_of(living, run)  # erasing finds nothing more to compact
    wait_for_reads(said, reader)
    (tmp_path / "stop").touch()
    ended = reader.ended()
    assert ended.code == 0, ended.errors
    reads = [json.loads(line) for line in said.read_text().splitlines()]
    assert all(names == known[generation] for generation, names, _ in reads)
    assert {generation for generation, _, _ in reads} == set(known)
    for generation in known:
        assert len({tuple(scores) for number, _, scores in reads if number == generation}) == 1
    for which in (0, 1):
        numbers = [generation for generation, _, _ in reads[which::2]]
        assert numbers == sorted(numbers)
    assert not list((run / "leases").iterdir())


def wait_for_reads(said: Path, reader: Child) -> None:
    """Wait until both readers have read once more from now on."""
    before = said.read_text().count("\n") if said.exists() else 0
    while not said.exists() or said.read_text().count("\n") < before + 4:
        assert not reader.wait(0.05), reader.ended().errors
