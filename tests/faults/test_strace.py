"""What the system is really asked to do: nothing gets a name that counts before it is on the disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.living import NAMED, Living
from tests.faults.scenarios import World

CALLS = "write,writev,pwrite64,ftruncate,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,openat"
LOOSE = ("gnnlm.log", ".lock", "tensorboard", "stop")  # what nothing relies on
NAME = r'"((?:[^"\\]|\\.)*)"'


@pytest.fixture
def _strace() -> None:
    if shutil.which("strace") is None:
        got = subprocess.run(["apt-get", "install", "-y", "-qq", "strace"], capture_output=True)
        if got.returncode or shutil.which("strace") is None:
            pytest.skip("strace is not here and cannot be installed")


def calls(log: str, run: Path) -> Iterator[tuple[str, list[Path]]]:
    """The calls that succeeded on files of a run: name, and the paths that it is about."""
    for line in log.splitlines():
        call = re.match(r"(?:\d+ +)?(\w+)\((.*)\) += +(-?\d+)", line)
        if call is None or int(call[3]) < 0:
            continue
        name, arguments = call[1], call[2]
        if name in ("write", "writev", "pwrite64", "ftruncate", "fsync", "fdatasync"):
            found = re.match(r"\d+<([^>]*)>", arguments)
            paths = [found[1]] if found else []
        else:
            paths = re.findall(NAME, arguments)
        inside = [Path(path) for path in paths if path.startswith(str(run))]
        if inside and not any(part in LOOSE for path in inside for part in path.relative_to(run).parts):
            yield name, inside


@pytest.mark.usefixtures("_strace")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("config", ["plain", "finetuned"])
def test_nothing_is_renamed_before_it_is_synced(world: World, tmp_path: Path, config: str) -> None:
    path = world.write_config(config, tmp_path / "run")
    renames, syncs = traced(tmp_path, "run", str(path))
    assert renames > 50
    assert syncs > 200


@pytest.mark.usefixtures("_strace")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["add", "compact"])
def test_nothing_of_a_change_is_renamed_before_it_is_synced(living: Living, tmp_path: Path, name: str) -> None:
    run = living.prepare(NAMED[name], tmp_path)
    renames, syncs = traced(tmp_path, *living.arguments(NAMED[name].command, run))
    assert renames > 10
    assert syncs > 40


def traced(place: Path, *arguments: str) -> tuple[int, int]:
    """Run a command that writes to `run` below a folder, and follow its calls; how many renames and syncs it made."""
    run, log = place / "run", place / "log"
    command = ["strace", "-f", "-y", "-s", "4096", "--seccomp-bpf", "-e", f"trace={CALLS}", "-o", str(log)]
    done = subprocess.run(
        [*command, sys.executable, "-m", "gnnlm", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    unsynced: set[Path] = set()  # files written since they were last synced
    changed: set[Path] = set()  # directories whose names have changed since they were last synced
    renames = syncs = 0
    for name, paths in calls(log.read_text(), run):
        if name in ("write", "writev", "pwrite64", "ftruncate"):
            unsynced.add(paths[0])
        elif name in ("fsync", "fdatasync"):
            syncs += 1
            unsynced.discard(paths[0])
            changed.discard(paths[0])
        elif name in ("rename", "renameat", "renameat2"):
            renames += 1
            if paths[0].name.startswith(".tmp"):  # safetensors' own, inside a write of ours that is synced after it
                unsynced = {paths[1] if file == paths[0] else file for file in unsynced}
                continue
            below = [file for file in unsynced if paths[0] == file or paths[0] in file.parents]
            assert not below, f"{paths[0]} becomes {paths[1]}, but {below} are not on the disk"
            changed |= {paths[0].parent, paths[1].parent}
            changed = {Path(str(folder).replace(str(paths[0]), str(paths[1]), 1)) for folder in changed}
        elif name in ("link", "linkat"):
            assert paths[0] not in unsynced
    assert not {file for file in unsynced if file.exists()}, "left unsynced"
    assert not {folder for folder in changed if folder.is_dir() and folder.name != "shards"}, "names left unsynced"
    return renames, syncs
