"""Runs: what they refuse to touch, what makes a stage stale, how they are moved, read and logged."""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import gnnlm as gnnlm_module
from gnnlm.artifact import read_manifest
from gnnlm.config import Config, load_config, parse_config
from gnnlm.config.evaluation_config import COSINE_TEMPERATURES
from gnnlm.config.paths import portable
from gnnlm.config.presets import PRESETS
from gnnlm.config.save import HEADER
from gnnlm.errors import ArtifactError, GnnlmError
from gnnlm.run import Run
from gnnlm.run import run as run_module
from tests.cli import error_line, gnnlm
from tests.conftest import TINY, WriteConfig, merge, write_texts


def copy_of(run: Run, place: Path) -> Path:
    """A finished run under another path, as a user would copy it."""
    return Path(shutil.copytree(run.root, place))


def states(run: Run) -> dict[str, str]:
    return {name: run.state(stage) for name, stage in run.stages.items()}


def why(run: Run, name: str) -> str:
    return run.why(run.stages[name], run.state(run.stages[name]))


def changed(config: Config, section: str, **changes: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


# -- what is not ours ------------------------------------------------------------------------------------------------


def test_a_thesis_in_the_run_directory_survives(write_config: WriteConfig, tmp_path: Path) -> None:
    thesis = tmp_path / "run" / "report" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    config = write_config()
    for flags in ((), ("--rebuild",)):
        message = error_line("run", config, *flags)
        assert f"{thesis.parent} holds thesis.tex, which gnnlm has no record of making" in message
        assert "move thesis.tex elsewhere" in message
    assert thesis.read_text() == "years of work"
    assert not (tmp_path / "run" / "corpus").exists()  # it is said before the work, not after it


def test_other_files_in_the_run_directory_survive(write_config: WriteConfig, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / ".lock").write_text("mine")
    (root / "config.yaml").write_text("# notes of mine\nrun: elsewhere\n")
    run = Run(load_config(write_config()))
    run.build("corpus")
    assert (root / ".lock").read_text() == "mine"
    assert (root / "config.1.yaml").read_text() == "# notes of mine\nrun: elsewhere\n"
    assert load_config(root) == run.config
    assert (root / "config.yaml").read_text().startswith(HEADER)


def test_a_config_that_lies_in_its_own_run_directory_is_left_alone(write_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    text = "# mine\n" + write_config().read_text()
    file = tmp_path / "run" / "config.yaml"
    file.write_text(text)
    Run(load_config(file)).build("corpus")
    assert file.read_text() == text
    assert not list(file.parent.glob("config.*.yaml"))


def test_a_run_directory_that_is_a_file(write_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ArtifactError, match="is a file; name a directory"):
        Run(load_config(write_config())).build("corpus")
    with pytest.raises(ArtifactError, match="already exists"):
        Run(load_config(write_config())).fork(load_config(write_config()))


def test_a_nul_in_a_path(write_config: WriteConfig) -> None:
    for command in ("status", "run", "corpus"):
        assert "NUL character" in error_line(command, write_config(run="a\0b"))


# -- what makes a stage stale ----------------------------------------------------------------------------------------


def test_a_changed_default_makes_the_network_stale(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(states(Run(tiny_run.config)).values()) == {"done"}
    monkeypatch.setitem(PRESETS["default"]["gnn"], "copying", False)
    run = Run(tiny_run.config)
    found = states(run)
    assert [name for name, state in found.items() if state == "stale"] == ["train", "cache", "tune", "eval"]
    assert why(run, "train") == "gnn.copying was True, is now False"
    assert why(run, "cache") == "depends on a stale stage"


def test_the_same_choice_written_out_is_the_same(tiny_run: Run) -> None:
    written = changed(tiny_run.config, "gnn", preset="paper")
    for section, values in PRESETS["default"].items():
        written = changed(written, section, **values)
    written = changed(written, "corpus", overlap="drop")
    written = changed(written, "tune", temperatures=COSINE_TEMPERATURES)
    assert set(states(Run(written)).values()) == {"done"}


def test_the_default_of_clusters_is_resolved(tiny_run: Run) -> None:
    run = Run(changed(tiny_run.config, "index", kind="ivf"))
    inputs = run.inputs(run.stages["index"])
    rows = tiny_run.snapshot.streams["train"].token_count
    assert inputs is not None
    assert inputs["index.clusters"] == rows // 39  # fewer than 4 x the root: each needs rows to be trained on


def test_a_changed_preset_makes_a_base_model_stale(
    text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnlm.lm import architecture

    scratch = {"corpus": {"source": str(text_dir), "tokens": "words"}, "lm": {"model": "scratch"}}
    run = Run(parse_config(merge(merge(TINY, scratch), {"run": str(tmp_path / "run")})))
    run.build("corpus")
    before = run.inputs(run.stages["lm"])
    assert before is not None
    assert before["lm.architecture.layers"] == 16
    monkeypatch.setitem(architecture.PRESETS, "wikitext103", ("adaptive", {"layers": 8}))
    after = Run(run.config).inputs(run.stages["lm"])
    assert after == {**before, "lm.architecture.layers": 8}


def test_status_says_what_is_missing(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    shutil.rmtree(run / "index")
    (run / "gnn" / "model.safetensors").unlink()
    made = Run(load_config(run))
    assert why(made, "search") == "a stage it depends on is missing"
    assert why(made, "train") == f"{run / 'gnn' / 'model.safetensors'} is missing"
    shown = gnnlm("status", run).stdout
    assert "a stage it depends on is missing" in shown
    assert "damaged" in shown
    assert "gnn.preset default sets: " in shown
    shown = gnnlm("status", run, "--set", "gnn.preset=paper", "--set", "tune.buckets=2").stdout
    assert "search.exclude receptive-field" in shown
    assert "overridden by the config: tune.buckets 2 (preset: 1)" in shown


def test_changed_text_is_named(write_config: WriteConfig, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    config = load_config(write_config(corpus={"source": str(texts)}))
    Run(config).build("corpus")
    for number in range(5):
        (texts / f"doc{number:02d}.txt").write_text("other words")
    (texts / "doc11.txt").rename(texts / "new.txt")
    run = Run(config)
    assert why(run, "corpus") == (
        "text: changed doc00.txt, doc01.txt, doc02.txt and 2 more, added new.txt, removed doc11.txt"
    )
    with pytest.raises(ArtifactError, match=r"corpus was made from other inputs: text: changed doc00\.txt"):
        run.build("corpus")


def test_the_command_that_is_advised_is_there(tiny_run: Run, tmp_path: Path) -> None:
    config = tiny_run.config.model_copy(update={"run": str(tmp_path / "run")})
    finetuned = config.lm.finetune.model_copy(update={"kind": "full"})
    run = Run(changed(config, "lm", finetune=finetuned))
    run.build("corpus")
    with pytest.raises(ArtifactError, match=r"build it first: gnnlm lm finetune, with the same config"):
        run.artifact("lm")


def test_a_run_of_an_older_format_is_mended_by_the_command_it_names(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "a run")
    for stage in tiny_run.stages:
        file = run / tiny_run.path(stage).name / "manifest.json"
        manifest = json.loads(file.read_text())
        del manifest["checksum"]
        file.write_text(json.dumps({**manifest, "format": 1}))
    assert set(states(Run(load_config(run))).values()) == {"stale"}
    with pytest.raises(GnnlmError, match="format 1, this version reads 3"):
        gnnlm_module.open(run)
    message = error_line("run", run)
    assert "was made by an older version of gnnlm (format 1, this version reads 3)" in message
    program, *arguments = shlex.split(message.partition("rebuild it: ")[2])
    assert program == "gnnlm"
    gnnlm(*arguments)
    assert set(states(Run(load_config(run))).values()) == {"done"}


def test_a_changed_fact_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "copy")
    file = run / "tune" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["facts"]["mix"]["gnn"]["temperature"] *= 2
    file.write_text(json.dumps(manifest))
    with pytest.raises(GnnlmError, match=r"tune/manifest\.json is damaged \(it was changed after it was written\)"):
        gnnlm_module.open(run)


# -- paths -----------------------------------------------------------------------------------------------------------


def relative_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Run:
    """A run whose config names everything from the current folder on."""
    monkeypatch.chdir(folder)
    values = merge(TINY, {"run": "run", "corpus": {"source": "texts"}, "lm": {"model": "model"}})
    run = Run(parse_config(merge(values, changes)))
    run.build("corpus")
    return run


@pytest.fixture
def folder(tmp_path: Path, tiny_lm_dir: Path) -> Path:
    write_texts(tmp_path / "a" / "texts")
    shutil.copytree(tiny_lm_dir, tmp_path / "a" / "model")
    (tmp_path / "b").mkdir()
    return tmp_path / "a"


def test_a_run_opens_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relative_run(folder, monkeypatch)
    monkeypatch.chdir(folder.parent / "b")
    config = load_config(folder / "run")
    assert config.corpus.source == str(folder / "texts")
    assert config.lm.model == str(folder / "model")
    run = Run(config)
    assert states(run)["corpus"] == "done"
    assert run.snapshot.source_lm.width == 32
    (folder / "texts" / "doc00.txt").write_text("other words")
    assert states(Run(config))["corpus"] == "stale"  # the text was looked at, not missed


def test_what_lies_in_a_run_moves_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run").mkdir()
    (folder / "texts").rename(folder / "run" / "texts")
    (folder / "model").rename(folder / "run" / "model")
    inside = {"corpus": {"source": "run/texts"}, "lm": {"model": "run/model"}}
    with pytest.raises(GnnlmError, match="holds no file"):  # a run directory is no source of text
        relative_run(folder, monkeypatch, **inside)
    (folder / "run" / "texts").rename(folder / "texts")
    relative_run(folder, monkeypatch, lm={"model": "run/model"})
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["lm"]["model"] == "$RUN/model"
    moved = folder.parent / "b" / "moved"
    shutil.move(folder / "run", moved)
    monkeypatch.chdir("/")
    config = load_config(moved)
    assert config.lm.model == str(moved / "model")
    run = Run(config)
    assert states(run)["corpus"] == "done"
    assert run.snapshot.source_lm.width == 32
    kept = run.fork(load_config(moved, (f"run={json.dumps(str(folder / 'fork'))}",)))
    assert kept == ["corpus"]
    assert load_config(folder / "fork").lm.model == str(moved / "model")


def test_split_files_and_data_folders_are_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, seed in (("train", 1), ("valid", 2), ("test", 3)):
        write_texts(folder / "data" / split, documents=3, seed=seed)
    splits = {split: f"data/{split}" for split in ("train", "valid", "test")}
    relative_run(folder, monkeypatch, run="one", corpus={"source": None, **splits})
    below = {split: split for split in splits}
    relative_run(folder, monkeypatch, run="two", corpus={"source": None, "data_dir": "data", **below})
    monkeypatch.chdir("/")
    one, two = load_config(folder / "one"), load_config(folder / "two")
    assert one.corpus.train == str(folder / "data" / "train")
    assert (two.corpus.data_dir, two.corpus.train) == (str(folder / "data"), "train")
    for config in (one, two):
        assert states(Run(config))["corpus"] == "done"
    manifests = [read_manifest(folder / name / "corpus") for name in ("one", "two")]
    assert manifests[0].inputs == manifests[1].inputs


@pytest.mark.parametrize("name", ["python-docs", "enwik8", "smollm2", "scratch", "no/such/model"])
def test_a_name_is_not_taken_for_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    if name.count("/") == 0:
        (tmp_path / name).mkdir()
    (tmp_path / "model").mkdir()
    config = parse_config({"run": "run", "corpus": {"source": name}, "lm": {"model": "model"}})
    assert portable(config).corpus.source == name
    assert portable(changed(config, "lm", model=name)).lm.model == name
    assert portable(config).lm.model == str(tmp_path / "model")


# -- readers and builders --------------------------------------------------------------------------------------------


def test_a_reader_keeps_its_run_while_another_replaces_it(tiny_run: Run, tmp_path: Path) -> None:
    root = copy_of(tiny_run, tmp_path / "copy")
    reader = Run(load_config(root), reading=True)
    reader.open_all()
    texts = write_texts(tmp_path / "other", seed=7)
    config = changed(load_config(root), "corpus", source=str(texts))
    Run(config).build_all(rebuild=True)
    assert list(reader.snapshot.streams["train"].documents) == list(tiny_run.snapshot.streams["train"].documents)
    assert (reader.snapshot.store.segments[0].tokens_P == tiny_run.snapshot.store.segments[0].tokens_P).all()
    assert reader.artifact("tune").facts == tiny_run.artifact("tune").facts
    now = Run(load_config(root), reading=True)
    now.open_all()
    assert list(now.snapshot.streams["train"].documents) != list(reader.snapshot.streams["train"].documents)
    with pytest.raises(ArtifactError, match="was replaced by another build"):
        reader.artifact("corpus").check_in_place()


def test_a_half_replaced_run_is_refused(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy_of(tiny_run, tmp_path / "copy")
    config = changed(load_config(root), "train", lr=2e-3)
    Run(config).build("train", rebuild=True)
    monkeypatch.setattr(run_module, "PAUSES", (0.01, 0.01))
    with pytest.raises(GnnlmError, match="cache was made from other inputs: artifact train was"):
        gnnlm_module.open(root)
    with (root / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            GnnlmError, match=r"another gnnlm process is building in .*open the run when it has finished"
        ):
            gnnlm_module.open(root)


def test_a_reader_waits_for_what_is_being_swapped(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_of(tiny_run, tmp_path / "copy")
    (root / "cache").rename(root / ".cache.old")  # the moment between the two renames of a replacement

    def swapped_meanwhile(seconds: float) -> None:
        if seconds:
            (root / ".cache.old").rename(root / "cache")

    monkeypatch.setattr(run_module.time, "sleep", swapped_meanwhile)
    Run(load_config(root), reading=True).open_all()


def test_what_is_open_is_let_go_when_it_is_replaced(tiny_run: Run, tmp_path: Path) -> None:
    """One run object, used before and after a rebuild."""
    run = Run(load_config(copy_of(tiny_run, tmp_path / "copy")))
    run.artifact("eval")
    before = run.snapshot.predictor.gnn
    run.config = changed(run.config, "train", lr=2e-3)
    run._own_inputs.clear()
    run.build("train", rebuild=True)
    with pytest.raises(ArtifactError, match="cache was made from other inputs"):
        run.artifact("cache")
    assert run.snapshot.gnn is not before


def test_a_builder_looks_again_when_it_has_the_run_to_itself(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has replaced what this one has opened, before this one begins to build."""
    root = copy_of(tiny_run, tmp_path / "copy")
    shutil.rmtree(root / "report")
    run = Run(load_config(root))
    run.artifact("tune")
    Run(changed(load_config(root), "train", lr=2e-3)).build("train", rebuild=True)
    with pytest.raises(ArtifactError, match="gnn was replaced by another build"):
        run.build("eval")


def test_everything_said_is_logged(write_config: WriteConfig, tmp_path: Path) -> None:
    config = load_config(write_config())
    Run(config).build("corpus")
    Run(config).build("encode")
    bad = changed(config, "index", kind="HNSWx")
    with pytest.raises(GnnlmError, match="cannot be built"):
        Run(bad).build("index")
    lines = (tmp_path / "run" / "gnnlm.log").read_text().splitlines()
    assert all(line[:4].isdigit() and line[4] == "-" and line[19] == " " for line in lines)
    words = [line[20:] for line in lines]
    assert words.count(f"gnnlm {gnnlm_module.__version__} starts building") == 3
    assert any(line.startswith("corpus: tokens: train") for line in words)
    assert any(line.startswith("encode train: ") for line in words)
    assert words[-1].startswith("stopped by ConfigError: index.kind 'HNSWx' cannot be built")


# -- the program -----------------------------------------------------------------------------------------------------

INTERRUPTED_AT = """
import os, signal, sys
module = sys.argv.pop(1)
def hook(event, arguments):
    global module
    if event == "import" and arguments[0] == module:
        module = ""
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""
PROGRAMS = {
    "gnnlm": "from gnnlm.cli import main; main()",
    "python -m gnnlm": "import runpy; runpy.run_module('gnnlm', run_name='__main__', alter_sys=True)",
}


@pytest.mark.parametrize("module", ["gnnlm.cli.commands", "typer", "pydantic", "numpy", "gnnlm.run.stages", "torch"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_while_importing(write_config: WriteConfig, program: str, module: str) -> None:
    script = INTERRUPTED_AT + PROGRAMS[program]
    name = "corpus" if module == "torch" else "status"  # which does without torch
    command = [sys.executable, "-c", script, module, name, str(write_config())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("error: interrupted; finished work is kept")
    assert len(done.stderr.splitlines()) == 1


def test_version() -> None:
    assert gnnlm("--version").stdout == f"gnnlm {gnnlm_module.__version__}\n"
