"""A fault at the n-th change on the disk while a store changes: it is the old generation or the new one.

Adding and removing: every n. The other changes: points drawn by the seed, all kinds of faults, spread over the whole
command.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault import KINDS, Fault, import_all
from tests.faults.living import CHANGES, NAMED, Change, Living

POINTS = {"add": 8, "remove": 8, "erase": 48}  # of the others:
POINTS_OF_A_CHANGE = 16
LINES = 16  # that go through every n of adding side by side


def points_of(change: Change) -> list[Any]:
    count = POINTS.get(change.name, POINTS_OF_A_CHANGE)
    return [pytest.param(change, number, count, id=f"{change.name}-{number}") for number in range(count)]


def test_there_are_enough_points() -> None:
    assert sum(len(points_of(change)) for change in CHANGES) >= 120


def interrupt(living: Living, change: Change, place: Path, fault: Fault) -> Path:
    """Make a change with a fault in it; returns the run."""
    run = living.prepare(change, place)
    ended = living.run(change.command, run, fault)
    assert "Traceback" not in ended.errors
    assert "this is a bug" not in ended.errors
    if ended.code == 1:
        assert ended.error
    assert ended.code in ((0, -9) if fault.kind.startswith(("kill", "power")) else (0, 1))
    return run


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("change", "number", "of"), [point for each in CHANGES for point in points_of(each)])
def test_a_change(living: Living, tmp_path: Path, seed: int, change: Change, number: int, of: int) -> None:
    chance, changes = random.Random(f"{seed} {change.name} {number}"), living.whole(change).changes
    n = 1 + int(changes * (number + chance.random()) / of)
    fault = Fault(KINDS[(number + seed) % len(KINDS)], n, chance.randrange(2**31))
    print(f"seed {seed}: {change.name} with {fault}, of {changes} changes")
    living.check(change, interrupt(living, change, tmp_path / "x", fault), thorough=number % 4 == 0)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("line", range(LINES))
def test_every_point_of_adding(living: Living, tmp_path: Path, seed: int, line: int) -> None:
    """The kind of fault changes from point to point."""
    changes = living.whole(NAMED["add"]).changes
    assert changes > 200
    states = set()
    for n in range(1 + line, changes + 1, LINES):
        fault = Fault(KINDS[(n // LINES + line + seed) % len(KINDS)], n, seed + n)
        print(f"seed {seed}: {fault}")
        run = interrupt(living, NAMED["add"], tmp_path / "x", fault)
        states.add(state := living.check_state(NAMED["add"], run, thorough=False))
        living.check_finish(NAMED["add"], run, state)
    assert 0 in states


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", KINDS)
def test_every_point_of_removing(living: Living, tmp_path: Path, seed: int, kind: str) -> None:
    changes, states = living.whole(NAMED["remove"]).changes, set()
    for n in range(1, changes + 2):  # the last of which is not interrupted
        fault = Fault(kind, n, seed + n)
        print(f"seed {seed}: {fault}")
        run = interrupt(living, NAMED["remove"], tmp_path / "x", fault)
        states.add(state := living.check_state(NAMED["remove"], run, thorough=False))
        living.check_finish(NAMED["remove"], run, state)
    assert states == {0, 1}


def test_the_pieces_of_erased_documents_can_be_found(living: Living) -> None:
    """The suite itself can fail: before erasing the files with their text, tokens and states are found."""
    found = living.left(living.whole(NAMED["erase"]).before)
    assert {"documents.jsonl", "tokens.npy", "states.npy"} <= {Path(name).name for name in found}
    assert {Path(name).parts[0] for name in found} == {"segments", "added"}


@pytest.mark.sample
def test_some_points_of_changes(tiny_run: Any, tmp_path: Path, seed: int) -> None:
    """The sample that `make test` runs."""
    import_all()
    living, chance = Living(tmp_path / "living", tiny_run.root), random.Random(f"{seed} sample")
    for name, kind in (("add", "kill"), ("add", "power: any"), ("remove", "power: nothing")):
        fault = Fault(kind, chance.randrange(1, living.whole(NAMED[name]).changes + 1), seed)
        print(f"seed {seed}: {name} with {fault}")
        run = interrupt(living, NAMED[name], tmp_path / "x", fault)
        living.check_finish(NAMED[name], run, living.check_state(NAMED[name], run, thorough=False))
