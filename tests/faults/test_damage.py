"""Bits flipped and files cut short at random places in every file; a clock that went back; full and read-only disks."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gnnlm.artifact import Artifact
from gnnlm.errors import ArtifactError
from gnnlm.generation import Holder, Lease
from gnnlm.run.stages import STAGES
from tests.faults.fault import Fault, command, forked, run_command
from tests.faults.living import ADD, MORE, NAMED, REMOVE, Living, everything, look
from tests.faults.scenarios import SCENARIOS, World, built

BUILDS = {scenario.name: scenario for scenario in SCENARIOS}
RUN = BUILDS["run"]


def damage(file: Path, chance: random.Random) -> str:
    """Flip a bit or cut the file short, with its time kept; says what was done."""
    status, data = file.stat(), bytearray(file.read_bytes())
    place = chance.randrange(len(data))
    if chance.random() < 0.5:
        data[place] ^= 1 << chance.randrange(8)
        words = f"{file.name}: byte {place} changed"
    else:
        del data[place:]
        words = f"{file.name}: cut to {place} bytes"
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    return words


def artifacts(run: Path) -> Iterator[Path]:
    yield from (run / stage.folder for stage in STAGES.values() if (run / stage.folder).is_dir())
    yield from (path for path in run.glob("segments/*/*") if path.is_dir())


def verify(folder: Path) -> None:
    Artifact.open(folder).verify(trust=False)


def test_damage_in_every_file_is_found(world: World, tmp_path: Path, seed: int) -> None:
    chance, run = random.Random(f"{seed} damage"), tmp_path / "run"
    shutil.copytree(world.straight("plain"), run)
    count = 0
    for folder in artifacts(run):
        for file in sorted(folder.iterdir()):
            whole = file.read_bytes()
            for _ in range(3 if whole else 0):
                print(damage(file, chance))
                with pytest.raises(ArtifactError, match=r"--rebuild|delete .* and run again"):
                    verify(folder)
                file.write_bytes(whole)
                count += 1
        verify(folder)
    assert count > 100


@pytest.mark.timeout(250)
@pytest.mark.parametrize("number", range(8))
def test_damage_is_told_and_mended(world: World, tmp_path: Path, seed: int, number: int) -> None:
    """`status` or the build names the command that mends it, and that command does."""
    chance, run = random.Random(f"{seed} mending {number}"), tmp_path / "run"
    shutil.copytree(world.straight("plain"), run)
    config = world.write_config("plain", run)
    file = chance.choice([file for folder in artifacts(run) for file in folder.iterdir() if file.stat().st_size])
    print(f"seed {seed}: {damage(file, chance)} in {file.parent}")
    refused = command(run, "run", config)
    assert refused.code == 1
    assert "--rebuild" in refused.error or "delete" in refused.error
    if "delete" in refused.error:
        shutil.rmtree(file.parent)
    mended = command(run, "run", config, "--rebuild")
    assert mended.code == 0, mended.errors
    assert built(run) == built(world.straight("plain"))


@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", ["encode (plain)", "train (plain)", "cache (coded)", "lm (finetuned)"])
def test_damage_in_a_half_built_stage(world: World, tmp_path: Path, seed: int, name: str) -> None:
    """It goes on as if nothing had been, starts over, or says what to delete: never another result."""
    scenario, chance = BUILDS[name], random.Random(f"{seed} {name}")
    changes = world.changes(scenario, tmp_path / "count")
    world.prepare(scenario, tmp_path / "half")
    world.run(scenario, tmp_path / "half", Fault("kill", int(changes * 0.6)))
    drafts = [path for path in (tmp_path / "half" / "run").rglob(".*.partial") if path.is_dir()]
    files = [file for draft in drafts for file in draft.rglob("*") if file.is_file() and file.stat().st_size]
    assert len(files) > 3
    for file in chance.sample(files, min(6, len(files))):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        shutil.copytree(tmp_path / "half", tmp_path / "x")
        world.write_config(scenario.config, tmp_path / "x" / "run")
        print(f"seed {seed}: {damage(tmp_path / 'x' / file.relative_to(tmp_path / 'half'), chance)}")
        ended = world.run(scenario, tmp_path / "x")
        assert "Traceback" not in ended.errors
        if ended.code == 1:
            assert "delete" in ended.error
            assert "this is a bug" not in ended.error
            for draft in drafts:
                shutil.rmtree(tmp_path / "x" / draft.relative_to(tmp_path / "half"), ignore_errors=True)
        world.check_finish(scenario, tmp_path / "x")


def test_damage_beside_the_artifacts(world: World, tmp_path: Path, seed: int) -> None:
    """The config, the log and the like: one line, or no difference."""
    chance, run = random.Random(f"{seed} beside"), tmp_path / "run"
    for file in sorted(path for path in world.straight("plain").iterdir() if path.is_file() and path.stat().st_size):
        for _ in range(4):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(world.straight("plain"), run)
            print(damage(run / file.name, chance))
            ended = command(run, "status", run)
            assert ended.code == 0 or ended.error
            assert "this is a bug" not in ended.errors
            finished = command(run, "run", world.write_config("plain", run))  # the user's config mends it
            assert finished.code == 0, finished.errors


def test_a_clock_that_went_back(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(world.straight("plain"), run)
    config = world.write_config("plain", run)
    for path in run.rglob("*"):
        os.utime(path, (0, 0))
    rows = json.loads(command(run, "status", config, "--json").output.splitlines()[-1])
    assert {row["state"] for row in rows.values()} == {"done"}
    assert command(run, "run", config).errors.count("already done") == len(rows)


# -- a store that changes ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", ["CURRENT", "generations", "text", "states", "codes", "index", "cache"])
def test_damage_in_a_changed_store_is_found(living: Living, tmp_path: Path, seed: int, kind: str) -> None:
    """The doctor names the file, and what to do; for a segment, that mends it."""
    chance, run = random.Random(f"{seed} {kind}"), tmp_path / "run"
    shutil.copytree(living.made(ADD, MORE, REMOVE), run)
    segment = kind not in ("CURRENT", "generations")
    place = run / "added" / "0001.0" / kind if segment else run / kind
    files = [path for path in sorted(place.glob("*" if segment else "3.json")) if path.stat().st_size] or [place]
    for file in files if segment else files * 4:
        data = file.read_bytes()
        print(f"seed {seed}: {damage(file, chance)}")
        found = forked(partial(look, run, False), run)
        assert found.code == 1
        said = " ".join((found.output + found.errors).split())
        assert "this is a bug" not in said
        assert file.name in said
        advice = ["gnnlm renew"] if segment else ["into CURRENT", "into it", "use that version"]
        assert any(words in said for words in advice)
        file.write_bytes(data)
    if segment:
        damage(files[-1], chance)
        mended = living.run("renew {run}", run)
        assert mended.code == 0, mended.errors
        assert ("is lost" in mended.errors) == (kind == "text")
        looked = forked(partial(look, run, False), run)
        assert looked.code == 0, looked.output + looked.errors


def test_a_clock_that_went_back_while_a_store_changes(living: Living, tmp_path: Path) -> None:
    """Neither the change nor leases and the lock depend on the time: a reader keeps its lease, a dead one none."""
    run = living.prepare(NAMED["erase"], tmp_path / "x")
    lease = Lease.take(run, 1)
    dead = lease.path.with_name("dead.json")
    dead.write_text(json.dumps({**Holder(lease.holder.host, os.getpid(), "another").as_json(), "generation": 1}))
    for path in run.rglob("*"):
        os.utime(path, (2**32, 2**32))  # in a future from which the clock went back

    def work(*arguments: str) -> None:
        time.time, time.gmtime = lambda: 0.0, lambda *_: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0))
        run_command([*living.arguments(NAMED["erase"].command, run), *arguments])

    refused = forked(partial(work, "--wait", "0"), run)
    assert f"{lease.holder} reads generation 1" in refused.error
    assert not dead.exists()
    lease.release()
    ended = forked(work, run)
    assert ended.code == 0, ended.errors
    assert everything(run) == everything(living.whole(NAMED["erase"]).after)


# -- disks that are full or may not be written -----------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "gnnlm-faults", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def resize(place: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", place], check=True)


@pytest.mark.timeout(250)
def test_a_full_disk(world: World, small_disk: Path) -> None:
    """Room comes bit by bit: each attempt goes on where the last one ran out of it."""
    straight, run = world.straight("plain"), small_disk / "run"
    run.mkdir()
    config = world.write_config("plain", straight.parent / "elsewhere")
    full = 0
    for size in (24, 64, 150, 250, 400, 600, 900, 1300, 2000):
        resize(small_disk, f"{size}k")
        ended = command(straight, "run", config, "--set", f"run={json.dumps(str(run))}", "--force")
        assert "Traceback" not in ended.errors
        assert "this is a bug" not in ended.errors
        if ended.code:
            assert "free" in ended.error
            full += 1
    assert full > 3
    resize(small_disk, "64m")
    ended = command(straight, "run", config, "--set", f"run={json.dumps(str(run))}", "--force")
    assert ended.code == 0, ended.errors
    assert built(run) == built(straight)


def test_a_read_only_disk(world: World, small_disk: Path) -> None:
    """A finished run can be read there; building is refused with one line."""
    resize(small_disk, "64m")
    straight, run = world.straight("plain"), small_disk / "run"
    shutil.copytree(straight, run)
    config = world.write_config("plain", straight.parent / "elsewhere")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    status = command(straight, "status", run, "--json")
    assert {row["state"] for row in json.loads(status.output.splitlines()[-1]).values()} == {"done"}
    scored = command(straight, "score", run, next((world.folder / "text").iterdir()))
    assert scored.code == 0, scored.errors
    ended = command(straight, "run", config, "--set", f"run={json.dumps(str(run))}", "--set", "seed=3", "--rebuild")
    assert ended.code == 1
    assert "this is a bug" not in ended.error


@pytest.mark.timeout(250)
def test_a_full_disk_while_a_store_changes(living: Living, small_disk: Path) -> None:
    """Each attempt is refused in one line and leaves the old generation, until there is room."""
    resize(small_disk, "64m")
    change, run = NAMED["add"], small_disk / "run"
    shutil.copytree(living.whole(change).before, run)
    used, full = sum(path.stat().st_blocks * 512 for path in run.rglob("*")) // 1024, 0
    for more in (16, 40, 80, 140, 220):
        resize(small_disk, f"{used + more}k")
        ended = living.run(change.command, run)
        assert "Traceback" not in ended.errors
        if ended.code == 0:
            break
        assert "full" in ended.error or "free" in ended.error
        full += 1
        assert not (run / "CURRENT").exists()
    assert full
    resize(small_disk, "64m")
    living.check(change, run)


def test_a_store_on_a_read_only_disk(living: Living, small_disk: Path) -> None:
    """It can be read; a change is refused with one line."""
    resize(small_disk, "64m")
    change, run = NAMED["remove"], small_disk / "run"
    shutil.copytree(living.whole(change).before, run)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    elsewhere = living.base  # what a command says is kept beside it
    scored = command(elsewhere, *living.arguments("score {run} {texts}/first/two.txt --json", run))
    assert scored.output == living.scores(living.whole(change).before)
    ended = command(elsewhere, *living.arguments(change.command, run))
    assert ended.code == 1
    assert "this is a bug" not in ended.error
