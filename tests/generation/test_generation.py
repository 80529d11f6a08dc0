"""Generations, leases and the writer's lock: the disk has the old or the new, and only the dead lose what they hold."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.errors import ArtifactError
from gnnlm.generation import (
    Generation,
    Holder,
    Lease,
    RefittedArtifact,
    SegmentRecord,
    commit,
    current_number,
    generations_of,
    leases_of,
    pinned,
    read_current,
)
from gnnlm.generation.current import forget_uncommitted, generation_file
from gnnlm.run.lock import LOCK, locked

numbers = st.lists(st.integers(0, 9), unique=True).map(lambda found: tuple(sorted(found)))
segments = st.builds(
    SegmentRecord,
    st.sampled_from(["segments/0000", "added/0001.0"]),
    st.dictionaries(
        st.sampled_from(["text", "states", "cache"]), st.text("0123456789abcdef", min_size=16, max_size=16)
    ),
    st.just(10),
    st.just(100),
    numbers,
    st.integers(0, 90),
    st.dictionaries(st.text(min_size=1, max_size=5), numbers),
    numbers,
    st.dictionaries(st.just("cache"), st.just("refitted/0003/segments/0000/cache")),
    numbers,
)


@given(st.lists(segments, max_size=3).map(tuple), st.frozensets(st.text("0123456789abcdef", min_size=4, max_size=4)))
def test_a_record_is_read_as_it_was_written(found: tuple[SegmentRecord, ...], gone: frozenset[str]) -> None:
    own = {"tune": RefittedArtifact("refitted/0002/tune", "y")}
    made = Generation(3, found, {"corpus": "x"}, "2026-01-01T00:00:00Z", "add", 1, 2, gone, own)
    assert Generation.parse(json.dumps(made.as_json()).encode(), Path("3.json")) == made


def test_committing_moves_current(tmp_path: Path) -> None:
    assert current_number(tmp_path) == 0
    assert read_current(tmp_path).number == 0
    for number in (1, 2):
        commit(tmp_path, Generation(number, what="add"))
    assert read_current(tmp_path) == Generation(2, what="add")
    assert [each.number for each in generations_of(tmp_path)] == [1, 2]


def test_a_record_that_current_does_not_name_is_nothing(tmp_path: Path) -> None:
    """What a writer leaves that was killed between the two renames."""
    commit(tmp_path, Generation(1))
    generation_file(tmp_path, 2).write_text("half")
    generation_file(tmp_path, 2).with_suffix(".json.new").write_text("half")
    assert read_current(tmp_path) == Generation(1)
    assert [each.number for each in generations_of(tmp_path)] == [1]
    forget_uncommitted(tmp_path)
    assert [path.name for path in (tmp_path / "generations").iterdir()] == ["1.json"]


@pytest.mark.parametrize("damage", ["flip", "cut", "other format"])
def test_a_damaged_record_is_refused(tmp_path: Path, damage: str) -> None:
    commit(tmp_path, Generation(1, what="add"))
    path = generation_file(tmp_path, 1)
    text = path.read_text()
    path.write_text(
        {
            "flip": text.replace('"add"', '"adx"'),
            "cut": text[:-9],
            "other format": text.replace('"format": 1', '"format": 7'),
        }[damage]
    )
    with pytest.raises(ArtifactError, match="another version" if damage == "other format" else "is damaged"):
        read_current(tmp_path)


@pytest.mark.parametrize("path", ["refitted/../../elsewhere/tune", "/refitted/0001/tune", "segments/0000/tune"])
def test_a_record_names_nothing_outside_its_folder(tmp_path: Path, path: str) -> None:
    """Whole, with its checksum; what it names would be read, and deleted."""
    commit(tmp_path, Generation(1, refitted={"tune": RefittedArtifact(path, "y")}))
    with pytest.raises(ArtifactError, match="is damaged"):
        read_current(tmp_path)


def test_a_damaged_or_lost_current_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").write_text("two\n")
    with pytest.raises(ArtifactError, match="expected the number of a generation"):
        current_number(tmp_path)
    (tmp_path / "CURRENT").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match="expected the number of a generation"):
        current_number(tmp_path)
    (tmp_path / "CURRENT").write_text("2\n")
    with pytest.raises(ArtifactError, match=r"2.json is missing, but .*CURRENT names it"):
        read_current(tmp_path)


def test_a_lease_lasts_as_long_as_its_reader(tmp_path: Path) -> None:
    commit(tmp_path, Generation(1))
    found, lease = pinned(tmp_path)
    assert found == Generation(1)
    assert [(each.generation, each.holder.pid) for each in leases_of(tmp_path)] == [(1, os.getpid())]
    lease.move(2)
    assert [each.generation for each in leases_of(tmp_path)] == [2]
    del lease
    assert list(leases_of(tmp_path)) == []


def test_a_reader_that_is_overtaken_while_it_opens_moves_with_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer commits between the reader's first look at CURRENT and its lease."""
    commit(tmp_path, Generation(1))
    commit(tmp_path, Generation(2))
    seen = iter([1, 2, 2])
    monkeypatch.setattr("gnnlm.generation.current.current_number", lambda root: next(seen))
    found, lease = pinned(tmp_path)
    assert found == Generation(2)
    assert lease.generation == 2


def test_only_leases_of_the_provably_gone_are_dropped(tmp_path: Path) -> None:
    me = Holder.here()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    holders = {
        "alive": me,
        "ended": Holder(me.host, child.pid, "long ago"),
        "another with my number": replace(me, started="long ago"),
        "elsewhere": Holder("another-machine", 1, "unknown"),
    }
    (tmp_path / "leases").mkdir()
    for name, holder in holders.items():
        text = json.dumps({**holder.as_json(), "generation": 1})
        (tmp_path / "leases" / f"{name}.json").write_text(text)
    (tmp_path / "leases" / "junk.json").write_text("{")
    assert [each.path.stem for each in leases_of(tmp_path)] == ["alive", "elsewhere"]
    assert sorted(path.stem for path in (tmp_path / "leases").iterdir()) == ["alive", "elsewhere"]


def test_a_forked_process_does_not_end_its_parents_lease(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path, 1)
    if not (child := os.fork()):
        import weakref

        weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # what the end of the interpreter does
        os._exit(0)
    os.waitpid(child, 0)
    assert lease.path.is_file()


def test_where_nothing_can_be_written_reading_goes_on(tmp_path: Path) -> None:
    (tmp_path / "leases").write_text("in the way")
    found, _ = pinned(tmp_path)
    assert found.number == 0


def test_the_lock_says_who_holds_it(tmp_path: Path) -> None:
    code = f"""
import sys, pathlib
from gnnlm.run.lock import locked
with locked(pathlib.Path({str(tmp_path)!r})):
    print("held", flush=True); sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ArtifactError, match=rf"process {process.pid} on {socket.gethostname()}"), locked(tmp_path):
        pass
    process.kill()
    process.wait()
    with locked(tmp_path):  # its holder is gone
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK).read_text() == ""


def test_a_lock_of_another_machine_is_not_taken(tmp_path: Path) -> None:
    """Its file system may not show locks across machines; nothing here proves that its holder is gone."""
    (tmp_path / LOCK).write_text(json.dumps(Holder("another-machine", 1, "x").as_json()))
    with pytest.raises(ArtifactError, match=r"process 1 on another-machine has locked .*delete"), locked(tmp_path):
        pass
    (tmp_path / LOCK).unlink()
    with locked(tmp_path):
        pass


def test_a_lease_does_not_come_along_with_a_copy(tmp_path: Path) -> None:
    """Its reader, though alive, reads the original; the lease stays with a run that is renamed."""
    lease = Lease.take(_made(tmp_path / "run"), 3)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert list(leases_of(tmp_path / "copy")) == []
    (tmp_path / "run").rename(tmp_path / "moved")
    assert [each.generation for each in leases_of(tmp_path / "moved")] == [3]
    lease.release()


def _made(root: Path) -> Path:
    root.mkdir()
    return root


def test_a_flipped_bit_in_current_names_no_other_generation(tmp_path: Path) -> None:
    for number in range(1, 5):
        commit(tmp_path, Generation(number))
    whole = (tmp_path / "CURRENT").read_bytes()
    damaged = [whole[:place] for place in range(len(whole))]
    damaged += [
        bytes([*whole[:n], whole[n] ^ (1 << bit), *whole[n + 1 :]]) for n in range(len(whole)) for bit in range(8)
    ]
    for text in damaged:
        (tmp_path / "CURRENT").write_bytes(text)
        with pytest.raises(ArtifactError, match="CURRENT"):
            read_current(tmp_path)
    (tmp_path / "CURRENT").write_text("3\n")  # as the message says
    assert read_current(tmp_path) == Generation(3)


def test_what_a_killed_reader_left_of_a_lease_is_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    folder, host = tmp_path / "leases", socket.gethostname()
    folder.mkdir()
    stay = {f"{host}-{os.getpid()}-ab.json.new", f"elsewhere-{child.pid}-ab.json.new"}
    for name in (*stay, f"{host}-{child.pid}-ab.json.new"):
        (folder / name).touch()
    assert list(leases_of(tmp_path)) == []
    assert {path.name for path in folder.iterdir()} == stay
