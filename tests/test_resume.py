"""kill -9 in the middle of encode, search and train; the resumed run ends in the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli import gnnlm, gnnlm_killed
from tests.conftest import WriteConfig

SLOWER: dict[str, Any] = {
    "store": {"shard_tokens": 64},
    "search": {"shard_queries": 32},
    "train": {"curriculum": [{"k": 4, "steps": 14}, {"k": 8, "steps": 6}], "validate_every": 3},
}


def files(folder: Path) -> dict[str, bytes]:
    """Everything a stage made, but for its manifest, which holds times."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "manifest.json"}


@pytest.mark.timeout(280)
def test_killed_and_resumed_equals_uninterrupted(write_config: WriteConfig, tmp_path: Path) -> None:
    straight = write_config(run=str(tmp_path / "straight"), **SLOWER)
    gnnlm("run", straight)
    config = write_config(run=str(tmp_path / "killed"), **SLOWER)
    run = tmp_path / "killed"
    gnnlm("corpus", config)
    for stage, folder, progress in (("encode", "store", 5), ("search", "search", 20), ("train", "gnn", 3)):
        for before in {"search": ("index",), "train": ("codec",)}.get(stage, ()):
            gnnlm(before, config)
        journal = run / f".{folder}.partial" / "journal.json"
        gnnlm_killed(stage, config, journal=journal, step=progress)
        assert not (run / folder).exists()
        status = gnnlm("status", config).stdout
        assert "half-done" in status
        done = gnnlm(stage, config)
        assert "resuming" in done.stderr
        assert files(run / folder) == files(tmp_path / "straight" / folder), stage
        assert not (run / f".{folder}.partial").exists()
    gnnlm("run", config)
    for name in ("base", "knn", "gnn", "gnn_knn"):
        file = f"report/{name}.log_probs.npy"
        assert (run / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()
