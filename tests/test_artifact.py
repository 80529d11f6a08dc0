"""Artifacts: whole or not there, checked, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gnnlm.artifact.reading as module
from gnnlm.artifact import Artifact, Draft, differences, require_space, state_of
from gnnlm.errors import ArtifactError


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


@pytest.mark.parametrize("threshold", [0, 2**30])
def test_damage_is_found(tmp_path: Path, threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRUST_ABOVE", threshold)
    build(tmp_path / "x")
    Artifact.open(tmp_path / "x")
    file = tmp_path / "x" / "rows.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"has \d+ bytes, its manifest says"):
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
    assert list(Artifact.open(tmp_path / "x").manifest["files"]) == ["rows.npy"]


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
