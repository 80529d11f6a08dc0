"""Several processes train as one: the same loss curve, the same artifact, and the same end for all."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.config import parse_config
from gnnlm.errors import GnnlmError
from gnnlm.lm.architecture import ONLY_ADAPTIVE
from gnnlm.run import Run
from gnnlm.run.follow import follow
from gnnlm.train.processes import Processes, ProcessLost, joined
from gnnlm.train.train_gnn import GnnTask
from gnnlm.train.train_lm import LMTask
from tests.conftest import TINY, merge
from tests.train.test_lm import CASES, FINETUNE, SCRATCH

fork = multiprocessing.get_context("fork")  # the processes start with everything imported
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "neighbour_dropout": 0.0}


def _process(rank: int, count: int, port: int, work: Callable[[], Any], answer: Any) -> None:
    found: Any = None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with joined() as here:
            found = work() if here.first else follow(here)
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    if rank == 0:
        answer.send(found)
    os._exit(0)


def in_processes(count: int, work: Callable[[], Any]) -> Any:
    """What `work` returns in the first of several processes (an error becomes text); the others follow it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours, theirs = fork.Pipe()
    started = [fork.Process(target=_process, args=(rank, count, port, work, theirs)) for rank in range(count)]
    try:
        for process in started:
            process.start()
        assert ours.poll(240), "the processes wait for one another"
        found = ours.recv()
        for process in started:
            process.join(30)
            assert process.exitcode == 0
        return found
    finally:
        for process in started:
            process.kill()


def prepared(folder: Path, case: str, text: Path, lm: Path) -> Run:
    """A run with all that comes before the training of a case."""
    values: dict[str, Any] = {"run": str(folder), "corpus": {"source": str(text)}}
    values = merge(merge(TINY, {"gnn": NO_DROPOUT}), values)
    if case in CASES:
        values = merge(merge(merge(TINY, SCRATCH), CASES[case]), values)
        dropouts = ("dropout", "attention_dropout", *(() if case == "transformer-xl" else ONLY_ADAPTIVE))
        short = {"steps": 8, "validate_every": 4, "batch_tokens": 72}  # three lines of a block
        values = merge(values, {"lm": {"architecture": dict.fromkeys(dropouts, 0.0), "train": short}})
    else:
        values = merge(values, {"lm": {"model": str(lm), "device": "cpu"}})
        tuning = {**FINETUNE, "kind": case, "unread": "first-reading", "settle": 0.25, "epochs": 1, "validate_every": 4}
        if case != "gnn":
            values = merge(values, {"lm": {"finetune": tuning}})
    run = Run(parse_config(values))
    run.build("corpus")
    if case == "gnn":
        for stage in ("encode", "codec", "index", "search"):
            run.build(stage)
    return run


def trained(run: Run, case: str) -> list[dict[str, Any]]:
    made = run.build("train" if case == "gnn" else "lm")
    history: list[dict[str, Any]] = json.loads((made.path / "history.json").read_text())
    return history


def assert_same_curve(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in first] == [entry["step"] for entry in second]
    assert len(first) > 2
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert (one[name] is None) == (other[name] is None)
            assert one[name] is None or math.isclose(one[name], other[name], rel_tol=0, abs_tol=1e-4), (
                name,
                one,
                other,
            )


@pytest.mark.parametrize(
    ("case", "count"),
    [("gnn", 2), ("gnn", 3), ("adaptive", 2), ("sentences", 2), ("transformer-xl", 2), ("full", 2), ("lora", 2)],
)
def test_two_processes_train_as_one(case: str, count: int, text_dir: Path, tiny_lm_dir: Path, tmp_path: Path) -> None:
    """Also where there are more processes than lines, and where lines are of unequal length."""
    alone = trained(prepared(tmp_path / "one", case, text_dir, tiny_lm_dir), case)
    run = prepared(tmp_path / "two", case, text_dir, tiny_lm_dir)
    found = in_processes(count, lambda: trained(run, case))
    assert isinstance(found, list), found
    assert_same_curve(alone, found)
    if case in ("full", "lora"):
        one, two = (Run(parse_config(merge(run.config.model_dump(mode="json"), {"run": str(tmp_path / name)})))
                    for name in ("one", "two"))  # fmt: skip
        assert torch.equal(torch.tensor(one.snapshot.unread_positions), torch.tensor(two.snapshot.unread_positions))
        states = [torch.tensor(r.snapshot.unread_states[:]).float() for r in (one, two)]
        assert float(states[0].abs().max()) > 0
        assert torch.allclose(states[0], states[1], atol=1e-2)
    assert not list((tmp_path / "two").glob(".*.partial"))


@pytest.mark.parametrize("case", ["gnn", "transformer-xl"])
def test_a_checkpoint_resumes_under_another_number(
    case: str, text_dir: Path, tiny_lm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is interrupted, two go on and are interrupted, one ends it: the curve of one process."""
    whole = trained(prepared(tmp_path / "whole", case, text_dir, tiny_lm_dir), case)
    run = prepared(tmp_path / "cut", case, text_dir, tiny_lm_dir)
    task: Any = GnnTask if case == "gnn" else LMTask
    loss = task.loss

    def interrupted_at(number: int, rank: int) -> None:
        def watched(self: Any, step: int, part: int) -> Any:
            if step == number and part == 0 and self.processes.rank == rank:
                os.kill(os.getpid(), signal.SIGINT)
            return loss(self, step, part)

        monkeypatch.setattr(task, "loss", watched)

    interrupted_at(2, rank=0)
    with pytest.raises(KeyboardInterrupt):
        trained(run, case)
    interrupted_at(5, rank=1)  # a signal that reaches another process than the first
    assert in_processes(2, lambda: trained(run, case)) == "Interrupted: "
    place = tmp_path / "cut" / (".gnn.partial" if case == "gnn" else ".lm.partial")
    assert json.loads((place / "journal.json").read_text())["notes"]["checkpoint"] == 6
    monkeypatch.setattr(task, "loss", loss)
    assert_same_curve(whole, trained(run, case))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_process_ends_all(
    rank: int, text_dir: Path, tiny_lm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path / "run", "adaptive", text_dir, tiny_lm_dir)
    loss = LMTask.loss

    def fails(self: LMTask, step: int, part: int) -> Any:
        if step == 5 and self.processes.rank == rank:
            raise MemoryError("no more memory")
        return loss(self, step, part)

    monkeypatch.setattr(LMTask, "loss", fails)
    said = in_processes(2, lambda: trained(run, "adaptive"))
    assert said == ("MemoryError: no more memory" if rank == 0
                    else "PeerFailure: process 1 of 2: MemoryError: no more memory")  # fmt: skip
    notes = json.loads((tmp_path / "run" / ".lm.partial" / "journal.json").read_text())["notes"]
    assert notes["checkpoint"] == 4


def test_a_process_that_is_gone_is_noticed(
    text_dir: Path, tiny_lm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path / "run", "adaptive", text_dir, tiny_lm_dir)
    loss = LMTask.loss

    def dies(self: LMTask, step: int, part: int) -> Any:
        if step == 5 and self.processes.rank == 1:
            os._exit(0)
        return loss(self, step, part)

    monkeypatch.setattr(LMTask, "loss", dies)
    said = in_processes(2, lambda: trained(run, "adaptive"))
    assert said.startswith("ProcessLost: a process of this training was lost")
    assert said.endswith("run the same command again: it resumes from the last checkpoint")


def test_a_disk_that_only_the_first_process_sees(
    text_dir: Path, tiny_lm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gnnlm.run.follow as following

    run = prepared(tmp_path / "run", "adaptive", text_dir, tiny_lm_dir)
    elsewhere = lambda values: parse_config({**values, "run": str(tmp_path / "elsewhere")})  # noqa: E731
    monkeypatch.setattr(following, "parse_config", elsewhere)
    said = in_processes(2, lambda: trained(run, "adaptive"))
    assert said.startswith("PeerFailure: process 1 of 2: ")
    assert said.endswith(f"{tmp_path / 'elsewhere'} is not there; it must be on a disk that all processes share")


@given(lines=st.integers(0, 20), count=st.integers(1, 6))
def test_every_line_belongs_to_one_process(lines: int, count: int) -> None:
    shares = [range(lines)[Processes(rank, count).share_of(lines)] for rank in range(count)]
    assert [line for share in shares for line in share] == list(range(lines))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_launcher_without_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(GnnlmError, match="RANK is not set; start several processes with torchrun"), joined():
        pass
    assert issubclass(ProcessLost, GnnlmError)


def test_torchrun(text_dir: Path, tiny_lm_dir: Path, tmp_path: Path) -> None:
    """As a user starts it: SIGTERM leaves a training that the plain command resumes; one process speaks."""
    run = prepared(tmp_path / "run", "gnn", text_dir, tiny_lm_dir)
    long = run.config.model_dump(mode="json")
    long["train"] |= {"curriculum": [{"k": 4, "steps": 5000}], "validate_every": 5000}
    config = tmp_path / "run" / "long.json"
    config.write_text(json.dumps(long))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = subprocess.Popen([*launcher, "-m", "gnnlm", "train", str(config)], stderr=subprocess.PIPE, text=True)
    try:
        journal, deadline = tmp_path / "run" / ".gnn.partial" / "journal.json", time.monotonic() + 200
        while not journal.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode != 0
    ours = [line for line in said.splitlines() if line.startswith(("train:", "error:"))]
    assert [line for line in ours if "valid perplexity" in line] == [ours[1]]
    assert ours[-1] == "error: interrupted; finished work is kept, and the same command resumes where it stopped"
    assert "is saved; the same command resumes from there" in ours[-2]
    step = json.loads(journal.read_text())["notes"]["checkpoint"]
    assert 0 < step < 5000
    assert f"train: step {step} is saved" in ours[-2]
