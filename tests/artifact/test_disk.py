"""The layer of changes on the disk: everything goes through it, and what it does is what it says."""

from __future__ import annotations

import ast
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
