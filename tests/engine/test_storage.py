"""Copies of a run on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gnnlm.engine.storage import SCRATCH, RunView, Storage
from gnnlm.errors import ArtifactError


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Storage, RunView]:
    """A storage with the two files of a view."""
    pytest.importorskip("fsspec")
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    root = tmp_path / "run"
    root.mkdir()
    for name in ("one", "two"):
        (root / name).write_text(name, encoding="utf-8")
    storage, view = Storage(f"file://{tmp_path}/bucket"), RunView.of(root, ["one", "two"])
    storage.upload(root, view)
    return storage, view


def test_a_copy_that_another_process_made_meanwhile_is_not_replaced(
    stored: tuple[Storage, RunView], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is replaced while it gets a second name is not found: two processes of a machine start together."""
    storage, view = stored
    copies, get, nodes = tmp_path / "scratch" / "files", Storage.get, list[int]()

    def late(self: Storage, *given: Any) -> None:
        if not nodes:
            nodes.append(0)
            storage.download(view)  # the other process
            nodes[:] = [(copies / digest).stat().st_ino for digest in view.files.values()]
        get(self, *given)

    monkeypatch.setattr(Storage, "get", late)
    root = storage.download(view)
    assert [(copies / digest).stat().st_ino for digest in view.files.values()] == nodes
    assert {path.name: path.read_text() for path in root.iterdir()} == {"one": "one", "two": "two"}
    assert [path.name for path in root.parent.iterdir()] == [view.name]


def test_a_damaged_file_is_refused_and_not_kept(stored: tuple[Storage, RunView], tmp_path: Path) -> None:
    storage, view = stored
    damaged = tmp_path / "bucket" / "files" / view.files["two"]
    damaged.write_text("other", encoding="utf-8")
    with pytest.raises(ArtifactError, match=f"{view.files['two']} is damaged"):
        storage.download(view)
    assert not (tmp_path / "scratch" / "files" / view.files["two"]).exists()
    assert list((tmp_path / "scratch" / "runs").iterdir()) == []
    damaged.write_text("two", encoding="utf-8")
    assert (storage.download(view) / "two").read_text(encoding="utf-8") == "two"
