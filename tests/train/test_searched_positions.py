"""Only the train positions that training reads are searched; what it learns is the same as if all were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.config import TrainConfig, parse_config
from gnnlm.errors import ArtifactError
from gnnlm.retrieval import search
from gnnlm.retrieval.search import searched_positions
from gnnlm.run import Run
from gnnlm.run.doctor import examine
from gnnlm.train.train_gnn import block_order, read_lines, sampled_lines
from tests.conftest import merge


@given(
    positions=st.integers(1, 200),
    block=st.integers(1, 20),
    batch=st.integers(1, 4),
    batches=st.integers(0, 12),
    seed=st.integers(0, 9),
)
def test_the_positions_that_are_read(positions: int, block: int, batch: int, batches: int, seed: int) -> None:
    order = block_order(TrainConfig(block=block, batch_blocks=batch), positions, seed)
    want = set(sampled_lines(order, 64).flatten().tolist())
    for number in range(batches):
        want |= set(order(number).flatten().tolist())
    assert torch.nonzero(read_lines(order, batches, 64))[:, 0].tolist() == sorted(want)


def made(run: Run, root: Path, *stages: str, **changes: Any) -> Run:
    """A fork of the tiny run whose search is its own, up to its network."""
    values = merge(run.config.model_dump(mode="json"), {"run": str(root), "search": {"k": 12}, **changes})
    new = Run(parse_config(values))
    if not root.exists():
        run.fork(new.config)
    for stage in ("corpus", "encode", "codec", "index", "search", *stages):
        new.build(stage)
    return new


def test_less_is_searched_and_the_same_is_learned(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(tiny_run, tmp_path / "whole", "train")
    monkeypatch.setattr(search, "ALL_SEARCHED", 100)
    some = made(tiny_run, tmp_path / "some", "train")
    searched = some.snapshot.searched("train").table
    assert searched.queried is not None
    assert 0 < len(searched) < 0.5 * len(whole.snapshot.searched("train").table)
    positions = some.config.train.batch_blocks * some.config.train.block * 10
    assert searched_positions(some.config, len(whole.snapshot.streams["train"])) == positions >= len(searched) - 200
    learned = [(run.path("train") / "model.safetensors").read_bytes() for run in (whole, some)]
    assert learned[0] == learned[1]
    assert whole.artifact("train").text("history.json") == some.artifact("train").text("history.json")
    assert examine(Run(some.config, reading=True)).problems == []


def test_search_is_stale_only_where_more_would_be_read(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(root: Path, *phases: tuple[int, int], **train: Any) -> str:
        changes = {"train": {"curriculum": [{"k": k, "steps": steps} for k, steps in phases], **train}}
        values = merge(tiny_run.config.model_dump(mode="json"), {"run": str(root), "search": {"k": 12}, **changes})
        run = Run(parse_config(values))
        return run.state(run.stages["search"])

    every = made(tiny_run, tmp_path / "every")
    monkeypatch.setattr(search, "ALL_SEARCHED", 100)
    assert state(every.root, (4, 3)) == "done"  # it has all
    some = made(tiny_run, tmp_path / "some")
    assert state(some.root, (4, 6), (8, 4)) == "done"
    assert state(some.root, (4, 5)) == "done"  # fewer steps
    assert state(some.root, (8, 10)) == "done"  # the same steps, another k
    assert state(some.root, (4, 11)) == "stale"  # more steps
    assert state(some.root, (4, 5), block=12) == "stale"  # other blocks
    with pytest.raises(ArtifactError, match="train batches"):
        made(tiny_run, some.root, train={"curriculum": [{"k": 4, "steps": 11}]})
