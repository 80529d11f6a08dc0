"""The commands that change a store: what they print, and what they refuse in one line."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gnnlm.library.library import Library
from tests.cli import Process, error_line, gnnlm
from tests.library.conftest import make_text


def last(*arguments: str | Path) -> dict[str, Any]:
    """The JSON object of a command."""
    found: dict[str, Any] = json.loads(gnnlm(*arguments, "--json").stdout.splitlines()[-1])
    return found


def test_a_document_comes_and_goes(root: Path, write: Callable[..., Path]) -> None:
    assert "generation" not in gnnlm("status", root).stdout  # the run is as it was built
    folder = write(one=make_text(1), two=make_text(2))
    added = last("add", root, folder, "--tag", "manual", "--tag", "new")
    assert added.keys() == {"generation", "added", "removed", "rows", "seconds"}
    assert (added["generation"], added["added"], added["removed"]) == (1, 2, 0)
    listed = last("documents", root, "tag:manual")["documents"]
    assert [(one["name"], one["tags"]) for one in listed] == [
        ("one.txt", ["manual", "new"]),
        ("two.txt", ["manual", "new"]),
    ]
    assert "one.txt" in gnnlm("neighbors", root, make_text(1)[:20], "--only", "tag:new").stdout
    status = gnnlm("status", root).stdout
    assert "serves generation 1: 10 documents" in status
    assert "the report is of generation 0" in status
    write(two=make_text(3))
    assert "use replace" in error_line("add", root, folder)
    assert last("replace", root, folder)["generation"] == 2
    assert last("remove", root, "tag:manual")["removed"] == 2
    assert [one["by"] for one in last("history", root)["generations"]] == ["run", "add", "replace", "remove"]
    (root / "notes.txt").write_text(make_text(3))
    failed = gnnlm("compact", root, "--erase", code=1)
    assert f"text of erased documents is left in {root}/notes.txt" in failed.stderr
    (root / "notes.txt").unlink()
    assert last("compact", root, "--erase")["found"] == []


def test_a_folder_is_watched(root: Path, write: Callable[..., Path]) -> None:
    folder = write(one=make_text(1))
    with Process("gnnlm", "sync", root, folder, "--watch", "--every", "0.1", "--json") as process:
        process.wait_until(lambda: "watching" in process.errors)
        write(two=make_text(2))
        process.wait_until(lambda: '"generation": 2' in process.output)
        (folder / "one.txt").unlink()
        process.wait_until(lambda: '"removed": 1' in process.output)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert "Traceback" not in process.errors
    assert [entry.name for entry in Library(root).documents()][8:] == ["two.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "{run}", "{run}/nowhere.txt"), "does not exist"),
        (("add", "{run}", "{tmp}/empty"), "holds no file"),
        (("add", "{run}", "{tmp}/binary.txt"), "is not utf-8"),
        (("add", "{run}", "{tmp}/a", "{tmp}/b"), "2 of the documents are named 'x.txt'"),
        (("add", "{run}", "{tmp}/a", "--tag", "a*"), "expected a tag such as manual"),
        (("add", "{tmp}/a", "{tmp}/a"), "config"),
        (("remove", "{run}", "nothing"), "no document of the store is named 'nothing'"),
        (("remove", "{run}", "*"), "would leave no document"),
        (("remove", "{run}", "tag:none"), "'tag:none'"),
        (("replace", "{run}", "{tmp}/a"), "no document named 'x.txt' to replace; use add"),
        (("sync", "{run}", "{tmp}/binary.txt"), "is not a folder"),
        (("sync", "{run}", "{tmp}/empty"), "holds no file"),
        (("documents", "{run}", "nothing"), "no document of the store is named"),
        (("history", "{tmp}/empty"), "config"),
    ],
)
def test_bad_input_is_one_line(root: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    for folder in ("a", "b", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "x.txt").write_text(make_text(1))
    (tmp_path / "b" / "x.txt").write_text(make_text(2))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x01")
    line = error_line(*(each.format(run=root, tmp=tmp_path) for each in arguments))
    assert message in line
    assert not (root / "CURRENT").exists()
    assert not (root / "added").exists()


def test_an_unfinished_run_has_no_store_to_change(root: Path, write: Callable[..., Path]) -> None:
    (root / "tune" / "manifest.json").unlink()
    assert "build it first" in error_line("add", root, write(one=make_text(1)))
