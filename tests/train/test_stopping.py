"""Trainings that are interrupted resume to the same bytes; those that are stopped keep the best step so far."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gnnlm.config import load_config, parse_config
from gnnlm.errors import TrainingError
from gnnlm.run import Run
from gnnlm.train.signals import SignalDelay
from gnnlm.train.train_lm import LMTask
from tests.cli import Process, error_line, finished, gnnlm
from tests.conftest import TINY, merge
from tests.train.test_lm import CASES, FINETUNE, SCRATCH, tree

STEPS = 200


@pytest.fixture(scope="module")
def trained_whole(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training of the graph network with one validation at its start and one at its end."""
    values = merge(
        tiny_run.config.model_dump(mode="json"),
        {
            "run": str(tmp_path_factory.mktemp("runs") / "whole"),
            "train": {"curriculum": [{"k": 4, "steps": STEPS}], "validate_every": 10_000},
        },
    )
    run = Run(parse_config(values))
    tiny_run.fork(run.config)
    run.build("train")
    return run


def untrained(run: Run, folder: Path) -> Path:
    shutil.copytree(run.root, folder)
    shutil.rmtree(folder / "gnn")
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_loses_no_step(trained_whole: Run, tmp_path: Path, number: signal.Signals) -> None:
    folder = untrained(trained_whole, tmp_path / "cut")
    journal = folder / ".gnn.partial" / "journal.json"
    with Process("gnnlm", "train", folder) as process:
        process.wait_until(journal.exists)
        time.sleep(0.3)
        process.send_signal(number)
        said = finished(process, code=130).stderr
    assert "stopping after this step" in said
    saved = re.search(r"train: step (\d+) is saved; the same command resumes from there", said)
    assert saved is not None, said
    assert 0 < int(saved[1]) < STEPS
    notes = json.loads(journal.read_text())["notes"]
    assert notes["checkpoint"] == int(saved[1])
    assert [entry["step"] for entry in notes["history"]] == [0]
    done = gnnlm("train", folder)
    assert f"resuming from step {saved[1]}" in done.stderr
    assert f"training curves: tensorboard --logdir {folder / 'tensorboard'}" in done.stderr
    assert tree(folder / "gnn") == tree(trained_whole.path("train"))


def lm_run(folder: Path, text: Path, case: str) -> Run:
    values = merge(merge(merge(TINY, SCRATCH), CASES[case]), {"run": str(folder), "corpus": {"source": str(text)}})
    run = Run(parse_config(values))
    run.build("corpus")
    return run


Act = Callable[[], None]


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Act) -> None:
    """Do something while a step is in flight."""
    loss = LMTask.loss

    def watched(self: LMTask, step: int, part: int) -> Any:
        if step == number and part == 0:
            act()
        return loss(self, step, part)

    monkeypatch.setattr(LMTask, "loss", watched)


def in_validation(monkeypatch: pytest.MonkeyPatch, number: int, act: Act) -> None:
    """Do something in the middle of a validation."""
    validate = LMTask.validate

    def watched(self: LMTask, step: int, report: Any) -> Any:
        if step == number:
            act()
        return validate(self, step, report)

    monkeypatch.setattr(LMTask, "validate", watched)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("case", ["adaptive", "transformer-xl"])
@pytest.mark.parametrize(("when", "number", "saved"), [(at_step, 27, 28), (in_validation, 20, 20)])
def test_interrupted_base_models_resume_to_the_same_bytes(
    case: str,
    when: Callable[[pytest.MonkeyPatch, int, Act], None],
    number: int,
    saved: int,
    text_dir: Path,
    tmp_path: Path,
    logged: Callable[[], str],
) -> None:
    whole = lm_run(tmp_path / "whole", text_dir, case).build("lm")
    cut = lm_run(tmp_path / "cut", text_dir, case)
    with pytest.MonkeyPatch.context() as patch:
        when(patch, number, interrupt)
        with pytest.raises(KeyboardInterrupt):
            cut.build("lm")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    journal = json.loads((tmp_path / "cut" / ".lm.partial" / "journal.json").read_text())
    assert journal["notes"]["checkpoint"] == saved
    assert journal["notes"]["history"][-1]["step"] == (20 if when is at_step else 0)
    again = lm_run(tmp_path / "cut", text_dir, case).build("lm")
    assert f"lm: resuming from step {saved}" in logged()
    assert tree(again.path) == tree(whole.path)
    assert "stopped_by_user_at" not in again.facts


def test_an_interrupt_before_the_first_validation_leaves_nothing(
    text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lm_run(tmp_path / "run", text_dir, "adaptive")
    in_validation(monkeypatch, 0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.build("lm")
    assert not (tmp_path / "run" / ".lm.partial").exists()


def test_a_second_signal_takes_effect_at_once() -> None:
    with SignalDelay() as signals:
        interrupt()
        assert signals.pending == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_at_the_very_end_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), SignalDelay():
        interrupt()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with SignalDelay() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.pending is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_stopping_for_good(
    text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    """By a file while it runs, or with --finish after an interrupt: the same artifact, of the best step so far."""
    run = lm_run(tmp_path / "file", text_dir, "adaptive")
    stop = tmp_path / "file" / "stop"
    stop.touch()  # left from an earlier training: it counts for nothing
    with monkeypatch.context() as patch:
        at_step(patch, 27, stop.touch)
        made = run.build("lm")
    said = logged()
    assert f"create the file {stop}" in said
    assert "lm: stopped at step 28 of 60, as you asked; keeping step 20, the best so far" in said
    assert not stop.exists()
    assert made.facts["stopped_by_user_at"] == made.facts["steps_done"] == 28
    assert made.facts["best_step"] == 20
    cut = lm_run(tmp_path / "cut", text_dir, "adaptive")
    with monkeypatch.context() as patch:
        at_step(patch, 27, interrupt)
        with pytest.raises(KeyboardInterrupt):
            cut.build("lm")
    done = gnnlm("lm", "train", tmp_path / "cut", "--finish")
    assert "lm: stopped at step 28 of 60, as you asked" in done.stderr
    finished = Run(load_config(tmp_path / "cut")).artifact("lm")
    assert finished.facts["stopped_by_user_at"] == 28
    assert tree(finished.path) == tree(made.path)
    assert not (tmp_path / "cut" / ".lm.partial").exists()
    assert "already done" in gnnlm("lm", "train", tmp_path / "cut", "--finish").stderr


def test_nothing_to_finish(trained_whole: Run, tmp_path: Path) -> None:
    folder = untrained(trained_whole, tmp_path / "run")
    assert "there is no half-done training to finish; train first" in error_line("train", folder, "--finish")
    assert not (folder / ".gnn.partial").exists()


def test_stopped_before_the_first_better_step(
    text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    run = lm_run(tmp_path / "run", text_dir, "adaptive")
    at_step(monkeypatch, 3, (tmp_path / "run" / "stop").touch)
    assert run.build("lm").facts["best_step"] == 0
    assert "warning: lm: no validated step was better than the untrained model" in logged()


def test_fine_tuning_stopped_before_it_kept_anything(
    tiny_lm_dir: Path, text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without states for the GNN the artifact would be useless: it says so, and training can go on."""
    values = merge(TINY, {"corpus": {"source": str(text_dir)}, "lm": {"model": str(tiny_lm_dir), "device": "cpu"}})
    tuning = {**FINETUNE, "unread": "first-reading", "settle": 0.5, "epochs": 1}
    config = parse_config(merge(values, {"run": str(tmp_path / "run"), "lm": {"finetune": tuning}}))
    run = Run(config)
    run.build("corpus")
    with monkeypatch.context() as patch:
        at_step(patch, 2, (tmp_path / "run" / "stop").touch)
        with pytest.raises(TrainingError, match=r"stopped after batch 3, .* only from batch \d+ on; train longer"):
            run.build("lm")
    again = Run(config).build("lm")
    assert again.facts["steps_done"] == again.facts["steps_planned"]
    assert "stopped_by_user_at" not in again.facts
