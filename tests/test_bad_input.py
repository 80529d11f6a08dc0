"""Everything a user can get wrong is one line that says what to do, and nothing is half-written."""

from __future__ import annotations

import fcntl
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import gnnlm as gnnlm_module
from gnnlm import artifact
from gnnlm.config import load_config
from gnnlm.errors import ArtifactError
from gnnlm.run import Run
from gnnlm.run.stages import STAGES
from tests.cli import Process, error_line, finished, gnnlm, gnnlm_killed
from tests.conftest import WriteConfig, save_tiny_lm, write_texts


def copy_of(run: Run, place: Path) -> Path:
    """A finished run under another path, as a user would copy it."""
    return Path(shutil.copytree(run.root, place))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": {"source": "no/such/folder"}}, "no/such/folder does not exist"),
        ({"lm": {"model": "no/such/model/here"}}, "expected a model directory"),
        ({"lm": {"model": "no-such/model"}}, "could not be downloaded from the hub"),
        ({"lm": {"window": 4096}}, "reads at most 256"),
        ({"lm": {"start": "<nothing>"}}, "is not a token of this model"),
        ({"gnn": {"layer": 2}}, "unknown key gnn.layer; did you mean gnn.layers?"),
        ({"gnn": {"heads": 5}}, "gnn.heads must divide"),
        ({"index": {"kind": "HNSWx"}}, "cannot be built"),
        ({"search": {"graph_k": 4}}, "search.graph_k gives only 4"),
    ],
)
def test_config_mistakes(write_config: WriteConfig, changes: dict[str, Any], message: str) -> None:
    assert message in error_line("run", write_config(**changes))


def test_folders(write_config: WriteConfig, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    config = write_config(corpus={"source": str(texts)})
    assert "holds no file ending in .txt" in error_line("run", config)
    (texts / "a.txt").write_bytes(b"\xff\xfe")
    assert "is not utf-8: byte 0xff at offset 0" in error_line("run", config)
    (texts / "a.txt").write_text("only one document")
    assert "three splits need at least 3" in error_line("run", config)
    assert not (tmp_path / "run" / "corpus").exists()


def test_tiny_corpus_still_works(write_config: WriteConfig, tmp_path: Path) -> None:
    """Documents shorter than the window, a store smaller than k: warnings, and the right result."""
    texts = write_texts(tmp_path / "few", documents=5, sentences=1)
    done = gnnlm("run", write_config(corpus={"source": str(texts)}, search={"k": 1024, "graph_k": 500}))
    assert "warning: the store has only" in done.stderr
    assert "+GNN+kNN" in done.stdout


def test_missing_stage(write_config: WriteConfig) -> None:
    message = error_line("train", write_config())
    assert "is missing; build it first: gnnlm corpus, with the same config" in message


def test_changed_config_is_refused_with_both_sides(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    message = error_line("run", run, "--set", "gnn.layers=1")
    assert "gnn.layers was 3, is now 1" in message
    assert "--rebuild" in message
    assert "stale" in gnnlm("status", run, "--set", "gnn.layers=1").stdout
    assert load_config(run).gnn.layers == 3  # nothing was written
    gnnlm("run", run, "--set", "gnn.layers=1", "--rebuild")
    assert load_config(run).gnn.layers == 1
    assert gnnlm("run", run).stderr.count("already done") == len(tiny_run.stages)


def test_what_depends_on_something_stale_is_stale(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    for stage in ("search", "train", "tune", "eval"):
        assert "index.metric was cosine, is now l2" in error_line(stage, run, "--set", "index.metric=l2")
    shutil.rmtree(run / "index")
    assert "index is missing; build it first: gnnlm index" in error_line("eval", run)


def test_a_refused_command_leaves_the_config_alone(write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(store={"shard_tokens": 64})
    gnnlm("corpus", config)
    journal = tmp_path / "run" / ".store.partial" / "journal.json"
    gnnlm_killed("encode", config, journal=journal, step=2)
    message = error_line("encode", tmp_path / "run", "--set", "store.dtype=fp32")
    assert "half-built from other inputs (store.dtype was fp16, is now fp32)" in message
    assert "resuming" in gnnlm("encode", tmp_path / "run").stderr


def test_run_rebuild_mends_an_edited_file(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    (run / "search" / "test.ids.npy").write_bytes(b"x")
    assert "its manifest says" in error_line("run", run)
    done = gnnlm("run", run, "--rebuild")
    assert done.stderr.count("already done") == len(tiny_run.stages) - 1  # the table is made again to the same bytes


def test_one_builder_at_a_time(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    shutil.rmtree(run / "report")
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another gnnlm process is building" in error_line("eval", run)


def test_a_run_directory_that_cannot_be_made(write_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = error_line("corpus", write_config(run=str(tmp_path / "file" / "run")))
    assert "Not a directory; check that it exists" in message


def test_store_of_another_model_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    other = save_tiny_lm(tmp_path / "other", seed=5)
    assert "model files was" in error_line("run", run, "--set", f"lm.model={other}")


def test_edited_text_makes_the_corpus_stale(write_config: WriteConfig, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    config = write_config(corpus={"source": str(texts)})
    gnnlm("corpus", config)
    (texts / "doc00.txt").write_text("other words")
    assert "text: changed doc" in error_line("corpus", config)
    assert "stale" in gnnlm("status", config).stdout


def test_damaged_artifacts(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    gnnlm("eval", run)
    states = run / "segments" / "0000" / "states" / "states.npy"
    whole = states.read_bytes()
    states.write_bytes(whole[:-10])
    assert "its manifest says" in error_line("eval", run)
    states.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "was edited after it was made" in error_line("eval", run)
    states.write_bytes(whole)
    (run / "gnn" / "manifest.json").write_text("{}")
    assert "is damaged" in error_line("eval", run)


def test_full_disk_is_told_and_resumed(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(load_config(write_config()))
    run.build("corpus")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ArtifactError, match=r"the store needs .* are free; free some space"):
        run.build("encode")
    monkeypatch.undo()
    real = artifact.ArrayWriter.append
    calls = []

    def full(self: artifact.ArrayWriter, rows: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(self, rows)

    monkeypatch.setattr(artifact.ArrayWriter, "append", full)
    with pytest.raises(OSError, match="No space left"):
        run.build("encode")
    assert not run.path("encode").exists()
    assert artifact.is_disk_full(OSError(28, ""))
    run.build("encode")  # goes on


@pytest.mark.parametrize(
    ("stage", "limit"), [("encode", 30_000), ("encode", 190_000), ("index", 30_000), ("train", 30_000)]
)
def test_full_disk_on_the_command_line(tiny_run: Run, tmp_path: Path, stage: str, limit: int) -> None:
    """A limit on file size makes every library's writes fail half-way, as a full disk does."""
    run = copy_of(tiny_run, tmp_path / "copy")
    shutil.rmtree(run / STAGES[stage].folder)
    shutil.rmtree(run / "segments" / "0000" / (STAGES[stage].part or "nothing"), ignore_errors=True)
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "from gnnlm.cli import main; main()"
    )
    large = ["--set", "index.kind=ivf"] if stage == "index" else []  # exact search needs no file
    done = finished(Process(script, stage, run, *large), code=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: "), last
    assert "free some space and run the same command again" in last
    assert not (run / STAGES[stage].folder).exists()
    gnnlm(stage, run)
    gnnlm("run", run, "--rebuild")


def test_interrupt(write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config(store={"shard_tokens": 64})
    gnnlm("corpus", config)
    journal = tmp_path / "run" / ".store.partial" / "journal.json"
    with Process("gnnlm", "encode", config) as process:
        process.wait_until(journal.exists)
        process.send_signal(signal.SIGINT)
        said = finished(process, code=130).stderr
    assert said.splitlines()[-1].startswith("error: interrupted; finished work is kept")
    gnnlm("encode", config)


def test_a_run_that_was_moved_and_whose_text_is_gone_still_opens(write_config: WriteConfig, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    gnnlm("run", write_config(corpus={"source": str(texts)}))
    shutil.rmtree(texts)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert gnnlm("run", tmp_path / "moved").stderr.count("already done") == 9
    write_texts(tmp_path / "texts", seed=9)
    gnnlm_module.open(tmp_path / "moved")  # other text stands there now: what was made still reads
    assert "text: changed doc" in error_line("run", tmp_path / "moved")
