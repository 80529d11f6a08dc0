"""Data order, schedule, and what happens when the loss is not a number."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm import progress
from gnnlm.artifact import Draft
from gnnlm.config import Phase, TrainConfig, TrainingSection, parse_config
from gnnlm.errors import TrainingError
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.run import Run
from gnnlm.train import training_loop
from gnnlm.train.batches import BlockOrder
from gnnlm.train.schedule import TrainingPlan
from gnnlm.train.train_gnn import Curriculum, GnnTask, TrainingTexts, train_gnn
from gnnlm.train.training_loop import TrainingSetup
from tests.clock import Clock


@given(positions=st.integers(2, 200), block=st.integers(1, 30), batch=st.integers(1, 4), step=st.integers(0, 50))
def test_blocks_are_consecutive_inside_and_repeatable(positions: int, block: int, batch: int, step: int) -> None:
    order = BlockOrder(positions, block, batch, seed=3)
    got = order(step)
    assert got.shape == (batch, min(block, positions))
    assert int(got.min()) >= 0
    assert int(got.max()) < positions
    assert (got.diff(dim=1) == 1).all()
    assert torch.equal(got, BlockOrder(positions, block, batch, seed=3)(step))


def test_an_epoch_sees_each_block_once() -> None:
    order = BlockOrder(1001, 10, 4, seed=0)
    starts = [int(s) for step in range(order.steps_per_epoch) for s in order(step)[:, 0]]
    assert len(set(starts)) == len(starts) == 100


def test_cosine_schedule() -> None:
    plan = TrainingPlan(config=TrainingSection(lr=2.0, warmup=10), steps=110, schedule="cosine")
    rates = [plan.learning_rate(step) for step in range(110)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert rates[-1] < 0.01


def train(run: Run, folder: Any, **changes: Any) -> Any:
    parts = run.snapshot
    torch.manual_seed(0)
    config = TrainConfig(**{**run.config.train.model_dump(), **changes})
    model = GnnModel(resolve_options(run.config.gnn, run.snapshot.head.width), run.snapshot.head)
    with Draft(folder / "gnn", "train", {}) as draft:
        return train_gnn(TrainingSetup(draft, seed=0, cpu=True), model, parts.head, parts.graphs, texts(run), config)


def texts(run: Run) -> TrainingTexts:
    return TrainingTexts(run.snapshot.searched("train"), run.snapshot.searched("valid"))


def make_task(run: Run, model: Any, order: BlockOrder, ks: Curriculum, accumulate: int, valid_tokens: int) -> GnnTask:
    parts = run.snapshot
    return GnnTask(model, parts.head, parts.graphs, texts(run), order, ks, accumulate, valid_tokens)


def test_training_starts_at_base_and_gets_better(tiny_run: Run) -> None:
    made = tiny_run.artifact("train")
    history = json.loads((made.path / "history.json").read_text())
    assert history[0]["step"] == 0
    assert history[0]["valid_gnn"] == pytest.approx(history[0]["valid_base"], abs=1e-6)
    assert made.facts["best_step"] > 0
    assert made.facts["best_valid_loss"] < history[0]["valid_base"]


def test_early_stopping_keeps_the_best(tiny_run: Run, tmp_path: Any) -> None:
    made = train(tiny_run, tmp_path, lr=30.0, warmup=0, patience=1, validate_every=1, clip=1e9)
    assert made.facts["steps_done"] < made.facts["steps_planned"]
    best = min(json.loads((made.path / "history.json").read_text()), key=lambda entry: entry["valid_gnn"])
    assert made.facts["best_step"] == best["step"]


def test_a_step_in_parts_reads_the_same_blocks(tiny_run: Run) -> None:
    """Four blocks at once, or one by one: the mean over their targets is one loss."""
    train, head = tiny_run.snapshot.searched("train"), tiny_run.snapshot.head
    torch.manual_seed(0)
    model = GnnModel(resolve_options(tiny_run.config.gnn, head.width), head).eval()
    losses = []
    for batch, accumulate in ((4, 1), (1, 4)):
        order = BlockOrder(len(train.table), 16, batch, seed=0)
        ks = Curriculum((Phase(k=4, steps=3),))
        task = make_task(tiny_run, model, order, ks, accumulate, valid_tokens=64)
        task.start(torch.device("cpu"))
        parts = [2 * accumulate + part for part in range(accumulate)]
        assert task.tokens(2) == sum(int((train.text.tokens(order(part)) >= 0).sum()) for part in parts)
        losses.append(sum(task.loss(2, part).item() for part in range(accumulate)) / task.tokens(2))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_training_in_parts(tiny_run: Run, tmp_path: Any) -> None:
    made = train(tiny_run, tmp_path, batch_blocks=1, accumulate=tiny_run.config.train.batch_blocks)
    whole = tiny_run.artifact("train").facts
    assert made.facts["steps_done"] == whole["steps_done"]
    assert made.facts["best_valid_loss"] == pytest.approx(whole["best_valid_loss"], abs=0.05)


def test_bf16(tiny_run: Run, tmp_path: Any) -> None:
    made = train(tiny_run, tmp_path, precision="bf16")
    full = tiny_run.artifact("train").facts
    assert made.facts["best_valid_loss"] == pytest.approx(full["best_valid_loss"], abs=0.1)


def test_a_curriculum_is_looked_up_not_laid_out(tiny_run: Run, tmp_path: Any) -> None:
    """Any number of steps takes no memory, in the lookup and in a training that stops early."""
    ks = Curriculum((Phase(k=2, steps=3), Phase.model_construct(k=4, steps=10**12), Phase(k=8, steps=1)))
    assert len(ks) == 10**12 + 4
    assert [ks[step] for step in (0, 2, 3, 10**12 + 2, 10**12 + 3, -1)] == [2, 2, 4, 4, 8, 8]
    with pytest.raises(IndexError):
        ks[len(ks)]
    long = [{"k": 4, "steps": 10**7}]
    made = train(tiny_run, tmp_path, curriculum=long, lr=30.0, warmup=0, patience=1, validate_every=1, clip=1e9)
    assert made.facts["steps_planned"] == 10**7
    assert made.facts["steps_done"] < 10


def test_a_validation_over_documents_has_an_interval(tiny_run: Run, tmp_path: Any) -> None:
    made = train(tiny_run, tmp_path, valid_tokens=1000)  # the first document of valid is shorter
    for entry in json.loads((made.path / "history.json").read_text()):
        change = math.exp(entry["valid_gnn"] - entry["valid_base"]) - 1
        assert entry["valid_change_low"] - 1e-6 <= change <= entry["valid_change_high"] + 1e-6
    assert entry["valid_change_low"] < entry["valid_change_high"] < 0


def test_the_history_compares_like_with_like(tiny_run: Run) -> None:
    """GNN and base on the same blocks of the training text, few beside the valid tokens."""
    made = tiny_run.artifact("train")
    history = json.loads((made.path / "history.json").read_text())
    assert {"step", "valid_base", "valid_gnn", "train_base", "train_gnn", "loss"} == history[0].keys()
    assert history[0]["train_gnn"] == pytest.approx(history[0]["train_base"], abs=1e-6)  # untrained: the base model
    assert len({entry["train_base"] for entry in history}) == 1
    assert history[-1]["train_gnn"] < history[-1]["train_base"]
    source = tiny_run.snapshot.searched("train")
    order, ks = BlockOrder(len(source.table), 24, 2, seed=0), Curriculum((Phase(k=4, steps=3),))
    task = make_task(tiny_run, tiny_run.snapshot.gnn, order, ks, 1, valid_tokens=700)
    task.start(torch.device("cpu"))
    lines = task._sample
    assert lines.shape == (2, 24)  # whole blocks, less than a tenth of the valid tokens
    assert lines[0, 0] == 0
    assert lines[-1, -1] == len(source.table) - 1
    positions = source.table.positions(lines)
    targets = source.text.tokens(positions)
    real, head = targets >= 0, tiny_run.snapshot.head
    wanted = -head.target_log_probs(source.text.states(positions)[real], targets[real])
    assert task.train_losses()["train_base"] == pytest.approx(float(wanted.mean()), abs=1e-5)


def test_nan_loss_is_told(tiny_run: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingPlan, "learning_rate", lambda self, step: math.nan)
    with pytest.raises(TrainingError, match=r"the loss is nan at step 2 .* lower train.lr"):
        train(tiny_run, tmp_path)
    assert not (tmp_path / "gnn").exists()


def test_released_and_paper_presets_train(tiny_run: Run, tmp_path: Any) -> None:
    for preset in ("paper", "released"):
        values = tiny_run.config.model_dump(mode="json")
        values["gnn"]["preset"] = preset
        config = parse_config(values)
        run = Run(config)
        torch.manual_seed(0)
        head, graphs = tiny_run.snapshot.head, tiny_run.snapshot.graphs
        model = GnnModel(resolve_options(config.gnn, head.width), head)
        with Draft(tmp_path / preset, "train", {}) as draft:
            setup = TrainingSetup(draft, seed=0, cpu=True)
            made = train_gnn(setup, model, head, graphs, texts(tiny_run), run.config.train)
        history = json.loads((made.path / "history.json").read_text())
        assert history[-1]["valid_gnn"] < history[0]["valid_gnn"]  # it learns, wherever it starts
        if preset == "paper":  # which starts as the base model
            assert history[0]["valid_gnn"] == pytest.approx(history[0]["valid_base"], abs=1e-5)


def test_validation_shows_progress_and_stays_out_of_the_rate(
    tiny_run: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    clock = Clock()
    for module in (training_loop, progress):
        monkeypatch.setattr(module, "time", clock)
    loss, validate = GnnTask.loss, GnnTask.validate

    def second(self: GnnTask, step: int, part: int) -> Any:
        clock.now += 1
        return loss(self, step, part)

    def minute(self: GnnTask, step: int, report: Any) -> Any:
        clock.now += 60
        return validate(self, step, report)

    monkeypatch.setattr(GnnTask, "loss", second)
    monkeypatch.setattr(GnnTask, "validate", minute)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    made = train(tiny_run, tmp_path, curriculum=[{"k": 4, "steps": 2}], validate_every=2)
    lines = logged().splitlines()
    assert any(re.match(r"train, validation: 256/256 [\d,]+ tokens/s ETA 0:00", line) for line in lines), lines
    assert any(line.startswith("train: 48/96 48 tokens/s ETA 1:01 ") for line in lines), lines  # validation included
    ended = "train: 96 tokens in 0:02 (48 tokens/s) plus 2:00 of validation"
    assert any(line.startswith(ended) for line in lines), lines
    assert (made.facts["seconds"], made.facts["validation_seconds"]) == (122, 120)
