"""Artifacts: whole or not there, checked, resumable."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gnnlm.run.advice  # noqa: F401  (names the commands in messages)
from gnnlm.artifact import (
    Artifact,
    ConcatenatedArrays,
    Draft,
    bytes_of,
    differences,
    disk,
    require_space,
    state_of,
    write_json,
    writing,
)
from gnnlm.artifact.json_record import sealed
from gnnlm.artifact.ownership import damage, link_artifact, remove_other_parts, settle
from gnnlm.errors import ArtifactError, LimitError


def build(path: Path, stop_after: int | None = None, inputs: dict[str, Any] | None = None, **options: Any) -> None:
    with Draft(path, "encode", inputs or {"a": 1}, **options) as draft:
        rows = draft.writer("rows.npy", (10, 2), np.float32)
        for number in range(rows.rows // 2, 5):
            if number == stop_after:
                rows.append(np.full((1, 2), 99))  # half a shard, never committed
                raise KeyboardInterrupt
            rows.append(np.full((2, 2), number))
            draft.commit()
        draft.finish({"n": 10})


def test_resumed_build_has_the_same_bytes(tmp_path: Path) -> None:
    build(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "broken", stop_after=3)
    assert state_of(tmp_path / "broken", {"a": 1}) == "half-done"
    assert not (tmp_path / "broken").exists()
    build(tmp_path / "broken")
    assert (tmp_path / "broken" / "rows.npy").read_bytes() == (tmp_path / "straight" / "rows.npy").read_bytes()
    artifact = Artifact.open(tmp_path / "broken")
    assert artifact.fingerprint == Artifact.open(tmp_path / "straight").fingerprint
    assert artifact.array("rows.npy")[9].tolist() == [4, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "straight"]


def test_half_built_from_other_inputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "x", stop_after=3)
    with pytest.raises(ArtifactError, match="a was 1, is now 2"):
        build(tmp_path / "x", inputs={"a": 2})
    build(tmp_path / "x", inputs={"a": 2}, rebuild=True)
    assert Artifact.open(tmp_path / "x").inputs == {"a": 2}


def test_damage_is_found(tmp_path: Path) -> None:
    build(tmp_path / "x")
    Artifact.open(tmp_path / "x")
    file = tmp_path / "x" / "rows.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"has \d+ bytes, but its manifest says"):
        Artifact.open(tmp_path / "x")
    file.write_bytes(whole[:-1] + b"!")
    with pytest.raises(ArtifactError, match="was edited after it was made"):
        Artifact.open(tmp_path / "x")
    file.write_bytes(whole)
    Artifact.open(tmp_path / "x")
    file.unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        Artifact.open(tmp_path / "x")
    (tmp_path / "x" / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="is damaged"):
        Artifact.open(tmp_path / "x")


def test_rebuilding_replaces_only_when_whole(tmp_path: Path) -> None:
    build(tmp_path / "x")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "x", stop_after=2, inputs={"a": 2}, rebuild=True)
    assert Artifact.open(tmp_path / "x").inputs == {"a": 1}
    build(tmp_path / "x", inputs={"a": 2})
    assert Artifact.open(tmp_path / "x").inputs == {"a": 2}


def test_a_manifest_cut_short_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "x", stop_after=3)
    (tmp_path / ".x.partial" / "manifest.json.new").write_text("{")
    build(tmp_path / "x")
    assert list(Artifact.open(tmp_path / "x").manifest.files) == ["rows.npy"]


def test_a_draft_that_lost_data_starts_over(tmp_path: Path) -> None:
    build(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "x", stop_after=3)
    (tmp_path / ".x.partial" / "rows.npy").write_bytes(b"short")
    build(tmp_path / "x")
    assert Artifact.open(tmp_path / "x").fingerprint == Artifact.open(tmp_path / "straight").fingerprint


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"the store needs 909\.5 TB at .* are free"):
        require_space(tmp_path / "a" / "b", 10**15, "the store")


def test_differences_name_both_sides() -> None:
    assert differences({"a": 1}, {"a": 1, "b": None}) == ""
    assert differences({"a": 1, "b": 2}, {"a": 3}) == "a was 1, is now 3; b was 2, is now not set"
    was = {"text": {f"{n}.txt": "1" for n in range(9)}}
    now = {"text": {f"{n}.txt": "2" if n < 5 else "1" for n in range(1, 10)}}
    assert differences(was, now) == "text: changed 1.txt, 2.txt, 3.txt and 1 more, added 9.txt, removed 0.txt"


# -- what is not ours ------------------------------------------------------------------------------------------------


def interrupted(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(path, stop_after=3)


def a_folder_of_theirs(path: Path) -> Path:
    path.mkdir()
    return path / "thesis.tex"


def a_file_beside_ours(path: Path) -> Path:
    build(path)
    return path / "thesis.tex"


def a_folder_beside_ours(path: Path) -> Path:
    build(path)
    (path / "figures").mkdir()
    return path / "figures" / "one.png"


def a_folder_named_as_a_file_of_ours(path: Path) -> Path:
    build(path)
    (path / "rows.npy").unlink()
    (path / "rows.npy").mkdir()
    return path / "rows.npy" / "mine"


def a_manifest_of_theirs(path: Path) -> Path:
    path.mkdir()
    return path / "manifest.json"


def a_draft_of_theirs(path: Path) -> Path:
    path.with_name(".x.partial").mkdir()
    return path.with_name(".x.partial") / "notes.txt"


def a_file_in_our_draft(path: Path) -> Path:
    interrupted(path)
    return path.with_name(".x.partial") / "notes.txt"


def an_old_one_of_theirs(path: Path) -> Path:
    path.with_name(".x.old").mkdir()
    return path.with_name(".x.old") / "thesis.tex"


def a_file_in_the_place(path: Path) -> Path:
    return path


PLACES: list[Callable[[Path], Path]] = [
    a_folder_of_theirs,
    a_file_beside_ours,
    a_folder_beside_ours,
    a_folder_named_as_a_file_of_ours,
    a_manifest_of_theirs,
    a_draft_of_theirs,
    a_file_in_our_draft,
    an_old_one_of_theirs,
    a_file_in_the_place,
]


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_is_not_ours_is_refused_before_the_work(
    tmp_path: Path, place: Callable[[Path], Path], rebuild: bool
) -> None:
    theirs = place(tmp_path / "x")
    theirs.write_text('{"name": "theirs"}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match=r"move .* elsewhere.*or choose another run directory") as error:
        Draft(tmp_path / "x", "encode", {"a": 2}, rebuild=rebuild)
    there = theirs.relative_to(tmp_path).parts
    assert str(tmp_path / there[0]) in str(error.value)  # the folder
    assert "".join(there[1:2]) in str(error.value)  # and what is in it
    assert theirs.read_text() == '{"name": "theirs"}'
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_the_place_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "elsewhere")
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="is a link"):
        build(tmp_path / "x", rebuild=True)
    assert Artifact.open(tmp_path / "elsewhere").facts == {"n": 10}


def test_what_comes_while_a_build_runs_is_not_lost(tmp_path: Path) -> None:
    build(tmp_path / "x")
    with Draft(tmp_path / "x", "s", {}, rebuild=True) as draft:
        (tmp_path / "x" / "thesis.tex").write_text("mine")
        with pytest.raises(ArtifactError, match=r"holds thesis\.tex"):
            draft.finish({})
    assert (tmp_path / "x" / "thesis.tex").read_text() == "mine"
    assert Artifact.open(tmp_path / "x").facts == {"n": 10}
    (tmp_path / "x" / "thesis.tex").rename(tmp_path / "thesis.tex")
    settle(tmp_path / "x")  # what was made is not lost either
    assert Artifact.open(tmp_path / "x").facts == {}


# -- killed at any moment --------------------------------------------------------------------------------------------

TOUCHING = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "shutil.rmtree")


def make_with_checkpoints(path: Path, value: int) -> None:
    """A build with shards, files of libraries, and folders that do not stay."""
    settle(path)
    if state_of(path, {"value": value}) == "done":
        return
    with Draft(path, "encode", {"value": value}, rebuild=True) as draft:
        rows = draft.writer("rows.npy", (4, 2), np.float32)
        for number in range(rows.rows // 2, 2):
            folder = draft.file(f"checkpoint-{number}")
            folder.mkdir(exist_ok=True)
            (folder / "weights").write_bytes(b"w")
            rows.append(np.full((2, 2), value))
            draft.commit()
        write_json(draft.file("table.json"), [value])
        draft.file("head").write_bytes(bytes([value]) * 9)
        draft.finish({"value": value}, files=("rows.npy", "table.json", "head"))


def killed_at(number: int, work: Callable[[], None], below: Path) -> bool:
    """Do the work in a process that ends, without a word, before its n-th touch of a file; whether it came so far."""
    pid = os.fork()
    if pid == 0:
        left = [number]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in TOUCHING and str(below) in str(arguments[0]):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9), code
    return code == 9


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    path, number, seen = tmp_path / "x", 0, set()
    while True:
        number += 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        make_with_checkpoints(path, 1)
        if not killed_at(number, lambda: make_with_checkpoints(path, 2), tmp_path):
            break
        seen.add(Artifact.open(path).facts["value"])
        make_with_checkpoints(path, 2)
        assert Artifact.open(path).facts == {"value": 2}
        assert Artifact.open(path).array("rows.npy").tolist() == [[2, 2]] * 4
        assert {p.name for p in path.iterdir()} == {"manifest.json", "rows.npy", "table.json", "head"}
        make_with_checkpoints(path, 3)  # what a kill has left beside it goes with the next build
        assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert number > 40
    assert seen == {1, 2}  # never nothing


# -- damage ----------------------------------------------------------------------------------------------------------


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    changed = change(manifest)
    file.write_text(json.dumps(manifest if changed is None else changed))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["facts"].update(n=11),
        lambda m: m["inputs"].update(a=3),
        lambda m: m["files"]["rows.npy"].update(bytes="80"),
        lambda m: m.pop("facts") and None,
        lambda m: m.pop("files") and None,
        lambda m: m.pop("checksum") and None,
        lambda m: m.update(files=["rows.npy"]),
        lambda m: m.update(facts=[1]),
        lambda m: m.update(format="2"),
        lambda m: [m],
        lambda m: "manifest",
    ],
)
def test_a_manifest_that_was_edited_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    build(tmp_path / "x")
    edit_manifest(tmp_path / "x", change)
    with pytest.raises(
        ArtifactError,
        match=r"manifest\.json is damaged.*(rebuild it: gnnlm run|delete .*, if nothing in it is yours, and run)",
    ):
        Artifact.open(tmp_path / "x")
    assert state_of(tmp_path / "x", {"a": 1}) == "damaged"


def test_a_damaged_manifest_is_rebuilt_where_it_still_says_whose_the_files_are(tmp_path: Path) -> None:
    build(tmp_path / "x")
    edit_manifest(tmp_path / "x", lambda m: m["facts"].update(n=11))
    build(tmp_path / "x", rebuild=True)
    assert Artifact.open(tmp_path / "x").facts == {"n": 10}


def test_another_format_is_refused_by_name_and_rebuilt(tmp_path: Path) -> None:
    build(tmp_path / "x")
    edit_manifest(tmp_path / "x", lambda m: m.pop("checksum") and m.update(format=1))
    with pytest.raises(ArtifactError, match=r"older version of gnnlm \(format 1.*gnnlm run .* --rebuild"):
        Artifact.open(tmp_path / "x")
    assert state_of(tmp_path / "x", {"a": 1}) == "stale"
    build(tmp_path / "x", rebuild=True)
    assert Artifact.open(tmp_path / "x").facts == {"n": 10}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.pop("format"),
        lambda m: m["files"]["rows.npy"].pop("bytes"),
        lambda m: m["files"]["rows.npy"].update(blocks={"bytes": 0, "crc32": ""}),
        lambda m: m.update(parts=[1]),
        lambda m: m["files"].update({"../x": m["files"]["rows.npy"]}),
    ],
)
def test_a_manifest_that_lacks_something_is_damaged_even_with_a_checksum(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    """Found by the fuzzed manifests of tests/faults."""
    build(tmp_path / "x")
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    write_json(tmp_path / "x" / "manifest.json", sealed(manifest))
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged"):
        Artifact.open(tmp_path / "x")
    assert state_of(tmp_path / "x", {"a": 1}) == "damaged"


@pytest.mark.parametrize("journal", ["[1, 2]", "{}", '{"inputs": [], "step": 1, "bytes": {}, "notes": {}}', "{", "7"])
def test_a_damaged_journal_is_a_fresh_start(tmp_path: Path, journal: str) -> None:
    interrupted(tmp_path / "x")
    (tmp_path / ".x.partial" / "journal.json").write_text(journal)
    build(tmp_path / "x")
    assert Artifact.open(tmp_path / "x").array("rows.npy")[9].tolist() == [4, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


# -- reading ---------------------------------------------------------------------------------------------------------


def make_of(path: Path, value: int) -> None:
    import torch
    from safetensors.torch import save_file

    with Draft(path, "encode", {"value": value}, rebuild=True) as draft:
        draft.save("rows.npy", np.full((3, 2), value))
        draft.save("none.npy", np.empty((0, 4), dtype=np.int32))
        draft.save("turned.npy", np.asfortranarray(np.arange(6).reshape(2, 3) + value))
        draft.write_text("words.txt", f"value {value}")
        save_file({"w": torch.full((2,), value)}, draft.file("head.safetensors"))
        draft.finish({"value": value})


def test_a_reader_keeps_what_it_has_opened(tmp_path: Path) -> None:
    make_of(tmp_path / "x", 1)
    artifact = Artifact.open(tmp_path / "x")
    artifact.check_in_place()
    make_of(tmp_path / "x", 2)
    assert Artifact.open(tmp_path / "x").array("rows.npy").max() == 2
    assert artifact.facts == {"value": 1}
    assert artifact.array("rows.npy").tolist() == [[1, 1]] * 3
    assert artifact.array("none.npy").shape == (0, 4)
    assert artifact.array("turned.npy").tolist() == [[1, 2, 3], [4, 5, 6]]
    for _ in range(2):  # and again, wherever the last reading has left the file
        assert artifact.text("words.txt") == "value 1"
        assert artifact.bytes("words.txt") == artifact.file("words.txt").read_bytes() == b"value 1"
        assert artifact.tensors("head.safetensors")["w"].tolist() == [1, 1]
    with pytest.raises(ArtifactError, match="was replaced by another build while it was in use"):
        artifact.check_in_place()
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(ArtifactError, match="was replaced"):
        artifact.check_in_place()


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        make_of(tmp_path / "x", 1)
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "x").iterdir()} == {"0o640"}


def test_a_linked_artifact_has_the_named_files_alone(tmp_path: Path) -> None:
    build(tmp_path / "x")
    (tmp_path / "x" / "checkpoint-3").mkdir()
    (tmp_path / "x" / "journal.json").write_text("{}")
    link_artifact(tmp_path / "x", tmp_path / "y")
    assert sorted(p.name for p in (tmp_path / "y").iterdir()) == ["manifest.json", "rows.npy"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y"]
    assert Artifact.open(tmp_path / "y").fingerprint == Artifact.open(tmp_path / "x").fingerprint
    assert (tmp_path / "y" / "rows.npy").samefile(tmp_path / "x" / "rows.npy")


def test_what_safetensors_leaves_when_it_is_killed_is_ours(tmp_path: Path) -> None:
    interrupted(tmp_path / "x")
    (tmp_path / ".x.partial" / ".tmp4kEUyZ").write_bytes(b"half a tensor")
    build(tmp_path / "x")
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"manifest.json", "rows.npy"}
    interrupted(tmp_path / "y")
    (tmp_path / ".y.partial" / ".tmp4kEUyZ").write_bytes(b"half a tensor")
    build(tmp_path / "y", inputs={"a": 2}, rebuild=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_a_damaged_list_of_names_is_no_licence_to_remove(tmp_path: Path) -> None:
    interrupted(tmp_path / "x")
    names = tmp_path / ".x.partial" / "draft.json"
    names.write_text(names.read_text().replace("rows.npy", "rowz.npy"))
    with pytest.raises(ArtifactError, match=r"holds draft\.json .*delete .*\.x\.partial"):
        build(tmp_path / "x")


def test_a_journal_and_what_it_relies_on_are_checked(tmp_path: Path, logged: Callable[[], str]) -> None:
    build(tmp_path / "straight")
    for name, place in (("rows.npy", 140), ("journal.json", 30)):
        interrupted(tmp_path / "x")
        file = tmp_path / ".x.partial" / name
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)
        build(tmp_path / "x")
        assert "has lost or damaged data, so this stage starts over" in logged()
        assert Artifact.open(tmp_path / "x").fingerprint == Artifact.open(tmp_path / "straight").fingerprint
        shutil.rmtree(tmp_path / "x")


def test_advice_fits_the_failure(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="check that you may write there"), writing(tmp_path / "x"):
        raise PermissionError(13, "Permission denied")
    with pytest.raises(ArtifactError, match="free some space"), writing(tmp_path / "x"):
        raise OSError("24 requested and 8 written")  # as numpy says it


# -- parts -----------------------------------------------------------------------------------------------------------


def build_with_parts(
    run: Path, numbers: list[int], stop_in: int | None = None, inputs: Any = 1, made: list[int] | None = None
) -> Artifact:
    """An artifact with a part for each number, whose rows are that number."""

    def rows_of(number: int, draft: Draft) -> dict[str, Any]:
        rows = draft.writer("rows.npy", (6,), np.int64)
        for _ in range(rows.rows, 6, 2):
            if number == stop_in and rows.rows == 4:
                raise KeyboardInterrupt
            rows.append(np.full(2, number))
            draft.commit()
            if made is not None:
                made.append(number)
        return {"number": number}

    with Draft(run / "store", "encode", {"a": inputs}, rebuild=True) as draft:
        for place, number in enumerate(numbers):
            draft.part(f"segments/{place:04d}/states", {"number": number}, partial(rows_of, number))
        return draft.finish({})


def bytes_under(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.suffix == ".npy" else b""
        for path in folder.rglob("*")
        if path.is_file()
    }


def state_parts(root: Path) -> list[Path]:
    return [segment / "states" for segment in (root / "segments").glob("*")]


def test_parts_are_opened_with_their_artifact(tmp_path: Path) -> None:
    build_with_parts(tmp_path, [3, 5])
    opened = Artifact.open(tmp_path / "store")
    assert [part.array("rows.npy").tolist() for part in opened.parts] == [[3] * 6, [5] * 6]
    assert [part.facts["number"] for part in opened.parts] == [3, 5]
    assert state_of(tmp_path / "store", {"a": 1}) == "done"
    size = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert bytes_of(tmp_path / "store", *state_parts(tmp_path)) == size


def test_an_interrupted_part_is_resumed_and_finished_ones_are_kept(tmp_path: Path) -> None:
    straight = build_with_parts(tmp_path / "a", [3, 5, 7])
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        build_with_parts(tmp_path / "b", [3, 5, 7], stop_in=5, made=made)
    assert made == [3, 3, 3, 5, 5]
    assert state_of(tmp_path / "b" / "store", {"a": 1}) == "half-done"
    assert not (tmp_path / "b" / "segments" / "0000" / "states").exists()  # it waits for the others
    assert build_with_parts(tmp_path / "b", [3, 5, 7], made=made).fingerprint == straight.fingerprint
    assert made == [3, 3, 3, 5, 5, 5, 7, 7, 7]
    assert bytes_under(tmp_path / "a") == bytes_under(tmp_path / "b")


def test_a_replacement_that_is_interrupted_leaves_the_old_artifact_whole(tmp_path: Path) -> None:
    build_with_parts(tmp_path, [3, 5])
    reader = Artifact.open(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        build_with_parts(tmp_path, [4, 6], stop_in=6, inputs=2)
    assert [part.array("rows.npy")[0] for part in Artifact.open(tmp_path / "store").parts] == [3, 5]
    build_with_parts(tmp_path, [4, 6], inputs=2)
    assert [part.array("rows.npy")[0] for part in Artifact.open(tmp_path / "store").parts] == [4, 6]
    assert [part.array("rows.npy")[0] for part in reader.parts] == [3, 5]  # the files it opened


def test_equal_parts_are_not_made_again(tmp_path: Path) -> None:
    build_with_parts(tmp_path, [3, 5, 7])
    made: list[int] = []
    build_with_parts(tmp_path, [3, 6], inputs=2, made=made)
    assert set(made) == {6}
    with pytest.raises(KeyboardInterrupt):
        build_with_parts(tmp_path, [4, 9], stop_in=9, inputs=3)  # given up
    build_with_parts(tmp_path, [3, 6], inputs=2)
    remove_other_parts(tmp_path / "store", state_parts(tmp_path))
    assert sorted(str(p.relative_to(tmp_path / "segments")) for p in tmp_path.glob("segments/*/*")) == [
        "0000/states",
        "0001/states",
    ]


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_kill_between_the_moves_is_finished_by_the_next_build(
    tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts first, then the artifact: whatever was moved, the next `settle` moves the rest."""
    build_with_parts(tmp_path, [3, 5])
    moves = 0

    def counted(change: disk.Change, path: Path) -> None:
        nonlocal moves
        moves += change in ("rename", "exchange") and path.name.endswith(".partial")
        if moves == killed_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "watch", counted)
    with pytest.raises(KeyboardInterrupt):
        build_with_parts(tmp_path, [4, 6], inputs=2)
    monkeypatch.undo()
    between = Artifact.open(tmp_path / "store")
    assert [part.array("rows.npy")[0] for part in between.parts] == [3, 5]  # whole until the last move
    settle(tmp_path / "store")
    opened = Artifact.open(tmp_path / "store")
    assert [part.array("rows.npy")[0] for part in opened.parts] == [4, 6]
    assert state_of(tmp_path / "store", {"a": 2}) == "done"


def test_damage_in_a_part_is_found(tmp_path: Path) -> None:
    build_with_parts(tmp_path, [3, 5])
    part = tmp_path / "segments" / "0001" / "states"
    file = part / "rows.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"!")
    opened = Artifact.open(tmp_path / "store")  # measured, not read
    opened.parts[0].verify()
    mend = rf"rebuild it: gnnlm run {tmp_path} --rebuild"
    with pytest.raises(ArtifactError, match=rf"rows\.npy was edited after it was made .*{mend}"):
        opened.parts[1].array("rows.npy")
    with pytest.raises(ArtifactError, match="was edited"):
        opened.verify()
    build_with_parts(tmp_path, [3, 5])
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"has \d+ bytes, but its manifest says"):
        Artifact.open(tmp_path / "store")
    assert state_of(tmp_path / "store", {"a": 1}) == "damaged"
    shutil.rmtree(part)
    assert state_of(tmp_path / "store", {"a": 1}) == "damaged"
    shutil.copytree(tmp_path / "segments" / "0000" / "states", part)
    assert "is not the part that" in damage(tmp_path / "store")
    with pytest.raises(ArtifactError, match="is not the part that"):
        Artifact.open(tmp_path / "store")


def test_too_many_open_files_are_told(tmp_path: Path) -> None:
    build_with_parts(tmp_path, list(range(20)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/dev/fd")}
    free = [number for number in range(max(used) + 10) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[8], limits[1]))  # the limit is on the number, not on the count
    try:
        with pytest.raises(LimitError, match=r"no more open files; allow more .* or build the run with larger seg"):
            Artifact.open(tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_parts_are_linked_with_their_artifact(tmp_path: Path) -> None:
    build_with_parts(tmp_path / "a", [3, 5])
    link_artifact(tmp_path / "a" / "store", tmp_path / "b" / "store")
    assert bytes_under(tmp_path / "a") == bytes_under(tmp_path / "b")
    assert len(Artifact.open(tmp_path / "b" / "store").parts) == 2


def test_what_is_not_ours_among_the_parts_stays(tmp_path: Path) -> None:
    build_with_parts(tmp_path, [3])
    mine = tmp_path / "segments" / "0007" / "states" / "thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    remove_other_parts(tmp_path / "store", state_parts(tmp_path))
    assert mine.read_text() == "years of work"


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5), data=st.data())
def test_joined_arrays_read_as_one(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(2 * sum(lengths)).reshape(-1, 2)
    ends = np.cumsum(lengths)
    both = ConcatenatedArrays([whole[end - length : end] for end, length in zip(ends, lengths, strict=True)])
    assert both.shape == whole.shape
    assert np.array_equal(np.asarray(both), whole)
    first, last = data.draw(st.integers(-7, 20)), data.draw(st.integers(-7, 20))
    assert np.array_equal(both[first:last], whole[first:last])
    if len(whole):
        rows = np.array(data.draw(st.lists(st.integers(-len(whole), len(whole) - 1), max_size=6)), dtype=np.int64)
        assert np.array_equal(both[rows], whole[rows])
        assert both[int(whole[-1, 0]) // 2].tolist() == whole[-1].tolist()
