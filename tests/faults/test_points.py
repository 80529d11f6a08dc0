"""A fault at the n-th change that a command makes on the disk.

An artifact with parts, replaced by another: every kind of fault at every n. The commands: points drawn by the seed, all
kinds of faults, spread over the whole command. A test's name says which; `GNNLM_FAULTS_SEED` draws others.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnlm.artifact import Artifact, Draft, disk, state_of, write_json
from gnnlm.artifact.ownership import remove_other_parts, settle
from gnnlm.errors import ArtifactError
from tests.faults.fault import KINDS, Fault, forked
from tests.faults.scenarios import SCENARIOS, Scenario, World

POINTS = {"run": 14, "run --rebuild": 14}
POINTS_OF_A_STAGE = 26


def points_of(scenario: Scenario) -> list[Any]:
    count = POINTS.get(scenario.name, POINTS_OF_A_STAGE)
    return [pytest.param(scenario, number, count, id=f"{scenario.name}-{number}") for number in range(count)]


def test_there_are_enough_points() -> None:
    assert sum(len(points_of(scenario)) for scenario in SCENARIOS) >= 300


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("scenario", "number", "of"), [point for each in SCENARIOS for point in points_of(each)])
def test_a_command(world: World, tmp_path: Path, seed: int, scenario: Scenario, number: int, of: int) -> None:
    chance = random.Random(f"{seed} {scenario.name} {number}")
    changes = world.changes(scenario, tmp_path / "count")
    kind, n = KINDS[(number + seed) % len(KINDS)], 1 + int(changes * (number + chance.random()) / of)
    fault = Fault(kind, n, chance.randrange(2**31))
    print(f"seed {seed}: {scenario.name} with {fault}, of {changes} changes")
    world.prepare(scenario, tmp_path / "x")
    ended = world.run(scenario, tmp_path / "x", fault)
    assert "Traceback" not in ended.errors
    assert "this is a bug" not in ended.errors
    if ended.code == 1:
        assert ended.error
    assert ended.code in ((0, -9) if fault.kind.startswith(("kill", "power")) else (0, 1))
    world.check(scenario, tmp_path / "x")


# -- every n -----------------------------------------------------------------------------------------------------------


def build(run: Path, value: int) -> Artifact:
    """An artifact with parts, files of all kinds and folders that do not stay; found if it is done."""
    path, inputs = run / "store", {"value": value}
    settle(path)
    if state_of(path, inputs) == "done":
        return Artifact.open(path)

    def part(draft: Draft, number: int) -> dict[str, Any]:
        rows = draft.writer("rows.npy", (2, 2), np.int64)
        for _ in range(rows.rows, 2):
            rows.append(np.full((1, 2), value + number))
            draft.commit()
        return {}

    with Draft(path, "encode", inputs, rebuild=True) as draft:
        for number in range(2 if value == 1 else 3):
            draft.part(f"segments/{number:04d}/states", {"number": value + number}, partial(part, number=number))
        for number in range(draft.notes.get("checkpoint", -1) + 1, 2):
            folder = draft.file(f"checkpoint-{number}")
            disk.remove_tree(folder)
            disk.make_directory(folder)
            disk.write_file(folder / "weights", bytes([value, number]) * 50)
            draft.notes["checkpoint"] = number
            draft.commit(folder.name, without=[f"checkpoint-{number - 1}"])
            disk.remove_tree(draft.folder / f"checkpoint-{number - 1}")
        weights = (draft.folder / "checkpoint-1" / "weights").read_bytes()
        draft.write_bytes("weights", weights)
        write_json(draft.file("table.json"), [value])
        made = draft.finish({"value": value}, files=("weights", "table.json"))
    remove_other_parts(path, [segment / "states" for segment in (path.parent / "segments").glob("*")])
    return made


def old_or_new(run: Path) -> int:
    """Which artifact a reader finds; it is whole, with its own parts."""
    opened = Artifact.open(run / "store")
    opened.verify(trust=False)
    value: int = opened.facts["value"]
    assert opened.bytes("weights") == bytes([value, 1]) * 50
    assert [part.array("rows.npy").tolist() for part in opened.parts] == [
        [[value + number] * 2] * 2 for number in range(2 if value == 1 else 3)
    ]
    return value


EVERY = {"kill": 1, "power: any": 1, "power: nothing": 1}  # of the others, every third n


@pytest.mark.parametrize(
    ("kind", "exchanges"), [*((kind, True) for kind in KINDS), ("kill", False), ("full", False), ("power: any", False)]
)
def test_every_point_of_a_replacement(
    tmp_path: Path, seed: int, kind: str, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system cannot exchange two names in one step."""
    if not exchanges:
        monkeypatch.setattr(disk, "exchange", lambda path, other: False)
    run, before = tmp_path / "run", tmp_path / "before"
    before.mkdir()
    build(before, 1)
    step = EVERY.get(kind, 3) if exchanges else 3
    n, seen = seed % step, set()
    while True:
        n += step
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(before, run)
        fault = Fault(kind, n, seed + n)
        print(fault)
        ended = forked(partial(build, run, 5), run, fault)
        if ended.code == 0 and n > ended.changes:
            break
        assert ended.code in (0, 1, -9)
        if ended.code == 1:
            assert any(name in ended.errors for name in ("OSError", "PermissionError", "ArtifactError")), ended.errors
        seen.add(old_or_new(run))
        build(run, 5)
        assert old_or_new(run) == 5
        names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
        assert names == {
            *(f"store/{name}" for name in ("manifest.json", "weights", "table.json")),
            *(f"segments/000{number}/states/{name}" for number in range(3) for name in ("manifest.json", "rows.npy")),
        }
    assert n > 100
    assert seen == ({1, 5} if kind != "not allowed" else seen)


@pytest.mark.sample
@pytest.mark.parametrize("kind", KINDS)
def test_some_points_of_a_replacement(tmp_path: Path, seed: int, kind: str) -> None:
    """The sample that `make test` runs."""
    run, chance = tmp_path / "run", random.Random(f"{seed} {kind}")
    for n in chance.sample(range(1, 150), 4):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        build(run, 1)
        print(fault := Fault(kind, n, seed + n))
        forked(partial(build, run, 5), run, fault)
        assert old_or_new(run) in (1, 5)
        build(run, 5)
        assert old_or_new(run) == 5


def test_the_simulation_loses_what_was_not_synced(tmp_path: Path) -> None:
    """A build that forgets to sync is caught: the suite itself can fail."""

    def careless() -> None:
        build(tmp_path / "run", 5)

    caught = 0
    for seed in range(40):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        build(run, 1)
        sync, disk.sync = disk.sync, lambda file: file.flush()
        try:
            forked(careless, run, Fault("power: names", 30 + 4 * seed, seed))
        finally:
            disk.sync = sync
        try:
            caught += old_or_new(run) not in (1, 5)
        except (ArtifactError, AssertionError, ValueError):
            caught += 1
    assert caught
