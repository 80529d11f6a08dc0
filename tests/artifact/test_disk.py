"""The layer of changes on the disk: everything goes through it, and what it does is what it says."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from gnnlm.artifact import disk

SRC = Path(disk.__file__).parent.parent
CHANGING = {
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "write_text",
    "write_bytes",
    "touch",
    "symlink_to",
    "chmod",
}
MODULES = {"os": {"replace", "rename", "unlink", "remove", "mkdir", "makedirs", "link", "fsync", "truncate", "rmdir"}}
MODULES["shutil"] = {"rmtree", "copy", "copy2", "copyfile", "copytree", "move"}
ELSEWHERE = {  # what is not in a run directory, or nothing relies on
    "artifact/disk.py",
    "engine/storage.py",  # copies of files on this machine
    "engine/ray.py",  # a file by which machines see that they share the directory
}


def test_every_change_goes_through_the_layer() -> None:
    found = []
    for path in SRC.rglob("*.py"):
        name = str(path.relative_to(SRC))
        for node in ast.walk(ast.parse(path.read_text())) if name not in ELSEWHERE else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called, owner = node.func.attr, node.func.value
            module = owner.id if isinstance(owner, ast.Name) else ""
            if module in MODULES:
                wrong = called in MODULES[module]
            else:  # str.replace has two arguments, and dataclasses' is no attribute
                wrong = (
                    called in CHANGING
                    and module not in ("disk", "draft", "self")
                    and not (called == "replace" and (len(node.args) != 1 or node.keywords))
                )
            if wrong:
                found.append(f"{name}:{node.lineno} {called}")
    assert found == []


def test_an_exchange_swaps_two_folders(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not disk.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    with pytest.raises(FileNotFoundError):
        disk.exchange(tmp_path / "a", tmp_path / "nothing")


def test_what_watches_is_told_before_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(disk, "watch", lambda change, path: told.append((change, path.name)))
    disk.make_directories(tmp_path / "new")
    disk.replace_file(tmp_path / "new" / "x", b"1")
    disk.remove_tree(tmp_path / "new")
    assert told == [
        ("make directory", "new"),
        ("sync directory", tmp_path.name),
        ("create", "x.new"),
        ("write", "x.new"),
        ("sync", "x.new"),
        ("rename", "x.new"),
        ("sync directory", "new"),
        ("remove", "x"),
        ("remove directory", "new"),
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Calls of the system in order, each with the inode and the bytes it had; other tests run without fsync."""
    made: list[tuple[str, int, int]] = []
    replace = Path.replace

    def fsync(number: int) -> None:
        made.append(("fsync", os.fstat(number).st_ino, os.fstat(number).st_size))

    def renamed(path: Path, place: Path) -> Path:
        made.append(("rename", path.stat().st_ino, path.stat().st_size))
        return replace(path, place)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", renamed)
    return made


def test_a_replaced_file_is_synced_before_its_name_and_its_name_after(
    tmp_path: Path, calls: list[tuple[str, int, int]]
) -> None:
    path = tmp_path / "x"
    disk.replace_file(path, b"12345")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert [call[:2] for call in calls] == [("fsync", file), ("rename", file), ("fsync", folder)]
    assert [size for _, inode, size in calls if inode == file] == [5, 5]


def test_what_libraries_write_is_synced(tmp_path: Path, calls: list[tuple[str, int, int]]) -> None:
    with disk.written(tmp_path):
        (tmp_path / "part").mkdir()
        for name in ("a", "part/b"):
            (tmp_path / name).write_bytes(b"123")
    disk.copy(tmp_path / "a", tmp_path / "copy")
    expected = ["a", "part/b", "part", "", "copy"]
    assert [inode for _, inode, _ in calls] == [(tmp_path / name).stat().st_ino for name in expected]
    assert all(size == 3 for _, inode, size in calls if inode == (tmp_path / "copy").stat().st_ino)


def test_the_name_of_a_new_folder_is_synced(tmp_path: Path, calls: list[tuple[str, int, int]]) -> None:
    disk.make_directories(tmp_path / "a" / "b")
    assert [inode for _, inode, _ in calls] == [path.stat().st_ino for path in (tmp_path, tmp_path / "a")]
