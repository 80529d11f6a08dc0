"""Components: one thing changed at a time, trained in forks with a budget, compared with a baseline of that budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnlm.config import Config, TrainConfig, load_config, parse_config
from gnnlm.config.network_config import Phase
from gnnlm.errors import ArtifactError, ConfigError, TrainingError
from gnnlm.evaluate.analysis.components import ComponentsResult, measure, show
from gnnlm.evaluate.analysis.variants import (
    BASELINE,
    GROUPS,
    ForkResult,
    ForkTraining,
    Variant,
    resolved,
    select_variants,
    variants_of,
)
from gnnlm.evaluate.compare import ComparableRun
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis, AnalysisOptions
from gnnlm.run.forks import RECORD, Forks, budget_of
from tests.evaluate.reports import make_report

CONFIG = parse_config({"run": "r"})
DOCUMENTS = [("a", 2), ("b", 1), ("c", 3)]


def trained(scores: list[float], parameters: int = 7) -> ForkResult:
    values = np.array(scores)
    ppl = float(np.exp(-values.mean()))
    report = make_report({name: {"ppl": ppl} for name in ("base", "gnn", "gnn_knn")})
    finished = ComparableRun("fork", report, dict.fromkeys(("base", "gnn", "gnn_knn"), values), DOCUMENTS, "lm")
    return ForkResult(finished, parameters, 12.0)


# -- which changes ---------------------------------------------------------------------------------------------


def test_every_change_of_the_issue_is_there() -> None:
    names = {variant.name for variant in variants_of(CONFIG, 576)}
    assert {f"preset-{name}" for name in ("default", "paper", "released")} <= names
    assert {f"window-{n}" for n in (0, 1, 2)} <= names
    assert {f"layers-{n}" for n in (1, 2, 3, 4)} <= names
    assert {f"context-{n}" for n in (32, 64, 128, 256, 512)} <= names
    assert {"codec-fp16", "codec-pq16", "codec-pq64", "copying-off", "inter-centre", "updates-on"} <= names
    assert {"leakage-document", "leakage-field", "leakage-none"} <= names


@pytest.mark.parametrize("preset", ["default", "paper", "released"])
def test_each_group_has_a_value_that_is_the_runs_and_one_that_is_not(preset: str) -> None:
    config = parse_config({"run": "r", "gnn": {"preset": preset}})
    for group in GROUPS:
        same = [variant.is_run(config) for variant in variants_of(config, 576) if variant.group == group]
        assert any(same), group
        assert not all(same), group


def test_a_value_is_that_of_the_config_or_else_of_the_preset() -> None:
    assert resolved(CONFIG, "gnn.inter") == "window"
    assert resolved(parse_config({"run": "r", "gnn": {"preset": "released"}}), "gnn.inter") == "centre"
    assert (
        resolved(parse_config({"run": "r", "gnn": {"preset": "released", "inter": "window"}}), "gnn.inter") == "window"
    )
    assert resolved(CONFIG, "codec.kind") == "fp16"


def test_groups_and_single_changes_can_be_asked_for() -> None:
    variants = variants_of(CONFIG, 576)
    assert select_variants(variants, []) == variants
    names = [variant.name for variant in select_variants(variants, ["layers-2", "inter"])]
    assert names == ["layers-2", "inter-centre", "inter-window"]
    with pytest.raises(ConfigError, match="no component named 'layer'; expected one of presets"):
        select_variants(variants, ["layer"])


@pytest.mark.parametrize("steps", [1, 2, 7, 120, 360, 1000])
def test_the_budget_is_shared_as_the_runs_phases_are(steps: int) -> None:
    train = TrainConfig(curriculum=(Phase(k=4, steps=6), Phase(k=8, steps=3), Phase(k=16, steps=1)))
    phases = budget_of(train, steps)["train.curriculum"]
    assert sum(phase["steps"] for phase in phases) == steps
    assert [phase["k"] for phase in phases] == sorted(phase["k"] for phase in phases)
    if steps == 1000:
        assert [phase["steps"] for phase in phases] == [600, 300, 100]


# -- what is made of them --------------------------------------------------------------------------------------


def test_changes_are_paired_with_the_baseline() -> None:
    scores = {
        "baseline": [-1.0, -2.0, -3.0, -1.0, -1.0, -1.0],
        "layers-1": [-1.1, -2.1, -3.1, -1.1, -1.1, -1.1],  # 0.1 nats worse everywhere
        "layers-2": [-0.8, -1.8, -2.8, -0.8, -0.8, -0.8],  # 0.2 nats better everywhere
    }
    asked = [Variant(f"layers-{n}", "layers", str(n), {"gnn.layers": n}) for n in (1, 2, 3)]
    built: list[str] = []

    def train(variant: Variant) -> ForkResult:
        built.append(variant.name)
        return trained(scores[variant.name])

    found = measure(CONFIG, ForkTraining(asked, 5, train))
    assert built == ["baseline", "layers-1", "layers-2"], "three layers are the run's own"
    baseline, worse, better, same = found.rows
    assert baseline.gnn is not None
    assert baseline.gnn.ppl == pytest.approx(np.exp(1.5))
    assert baseline.change("gnn") is None
    assert worse.gnn is not None
    assert worse.gnn.change == pytest.approx(np.exp(0.1) - 1)
    assert worse.gnn.change_low == pytest.approx(np.exp(0.1) - 1)
    assert better.gnn is not None
    assert better.gnn.change_high == pytest.approx(np.exp(-0.2) - 1)
    assert same.is_run
    section = show(ComponentsResult.model_validate(json.loads(json.dumps(found.as_json()))))
    assert "Layers 2 helps most of 2 changes: -18.1% (-18.1 to -18.1)" in section.summary[0]
    assert section.tables[0].cells()[3][3] == "the baseline"
    assert section.tables[0].cells()[1][:4] == ["layers", "1", "4.95", "+10.5% (+10.5 to +10.5)"]


def test_what_is_not_significant_is_not_called_a_finding() -> None:
    scores = {"baseline": [-1.0, -2.0, -3.0, -1.0, -1.0, -1.0], "layers-1": [-2.0, -1.0, -4.0, -0.5, -0.5, -0.5]}
    variants = [Variant("layers-1", "layers", "1", {"gnn.layers": 1})]
    found = measure(CONFIG, ForkTraining(variants, 5, lambda variant: trained(scores[variant.name])))
    assert show(found).summary == ["1 of 1 changes are not significant."]


@pytest.mark.parametrize("error", [TrainingError("the loss is not finite"), ConfigError("copying needs more")])
def test_a_change_that_cannot_be_trained_is_a_row(error: Exception) -> None:
    def train(variant: Variant) -> ForkResult:
        if variant is not BASELINE:
            raise error
        return trained([-1.0] * 6)

    found = measure(CONFIG, ForkTraining([Variant("layers-1", "layers", "1", {"gnn.layers": 1})], 5, train))
    section = show(found)
    assert f"Layers 1 could not be trained: {error}" in section.sentences
    assert section.tables[0].cells()[1][3] == "could not be trained"
    assert not section.figures


def test_a_full_disk_is_no_finding() -> None:
    def train(variant: Variant) -> ForkResult:
        raise ArtifactError("the disk is full")

    with pytest.raises(ArtifactError):
        measure(CONFIG, ForkTraining([], 5, train))


# -- forks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tiny_run: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run.root, tmp_path / "run"))


def analysis_of(root: Path, *components: str, steps: int | None = 3) -> Analysis:
    asked = AnalysisOptions(train=True, steps=steps, components=components) if components else AnalysisOptions()
    return Analysis(Run(load_config(root), reading=True), asked)


def test_forks_are_trained_resumed_found_done_and_shown(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = [Path(load_config(run_dir).corpus.source or "")]
    plain = analysis_of(run_dir)
    (step,) = plain.plan(["components"])
    assert step.obstacle is not None
    assert step.obstacle.command.endswith("--part components --train")

    analysis = analysis_of(run_dir, "layers-1", "leakage-none")
    (step,) = analysis.plan(["components"])
    assert [name for name, _ in step.forks] == ["baseline", "layers-1", "leakage-none"]
    assert not (run_dir / "analysis").exists(), "planning builds nothing"

    # interrupted in the second fork: the first is kept, and the rest goes on
    build_all, built = Run.build_all, []

    def interrupted(run: Run, rebuild: bool = False) -> Any:
        built.append(run.root.name)
        if len(built) == 2:
            run.build("train")
            raise KeyboardInterrupt
        return build_all(run, rebuild)

    monkeypatch.setattr(Run, "build_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        analysis.build([step])
    analysis = analysis_of(run_dir, "layers-1", "leakage-none")
    (step,) = analysis.plan(["components"])
    assert [name for name, _ in step.forks] == ["layers-1", "leakage-none"]
    networks = {path: path.stat().st_mtime_ns for path in (run_dir / "analysis" / "forks").glob("*/gnn/manifest.json")}
    assert len(networks) == 2
    found = analysis.build([step])["components"]
    assert all(path.stat().st_mtime_ns == made for path, made in networks.items())
    assert built == ["baseline-3", "layers-1-3", "baseline-3", "layers-1-3", "leakage-none-3"]

    names = ["baseline", "layers-1", "layers-3", "leakage-document", "leakage-none"]
    assert [row["name"] for row in found["rows"]] == names, "each group with the value that the run has"
    assert [row["is_run"] for row in found["rows"]] == [True, False, True, True, False]
    assert found["steps"] == 3
    assert all(row["gnn"]["ppl"] > 1 for row in found["rows"])
    fork = Run(load_config(run_dir / "analysis" / "forks" / "layers-1-3"), reading=True)
    assert fork.config.gnn.layers == 1
    assert fork.config.corpus.source == str(source)
    assert fork.artifact("train").facts["steps_done"] == 3
    assert fork.artifact("encode").fingerprint == Run(load_config(run_dir), reading=True).artifact("encode").fingerprint
    leaking = Run(load_config(run_dir / "analysis" / "forks" / "leakage-none-3"), reading=True)
    ids = np.asarray(leaking.artifact("search").array("train.ids.npy"))
    assert (ids[:, 0] == np.arange(len(ids))).mean() > 0.9, "without the rule a position finds itself"

    # a plain analysis shows what is there, and trains nothing; so it does when the forks were removed
    again = analysis_of(run_dir)
    (step,) = again.plan(["components"])
    assert step.state == "done"
    shutil.rmtree(run_dir / "analysis" / "forks")
    again = analysis_of(run_dir)
    assert set(again.build(again.plan(["components"]))) == {"components"}
    assert not (run_dir / "analysis" / "forks").exists()


def test_another_group_is_added_to_those_that_are_there(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"baseline", "layers-1"}
    monkeypatch.setattr(Forks, "is_done", lambda forks, variant: variant.name in made)
    names = [variant.name for variant in analysis_of(run_dir, "inter-centre")._variants]
    assert names == ["layers-1", "layers-3", "inter-centre", "inter-window"]
    assert [variant.name for variant in analysis_of(run_dir)._variants] == ["layers-1", "layers-3"]
    made.clear()
    assert analysis_of(run_dir)._variants == []


def test_a_fork_of_other_artifacts_is_made_anew_and_others_folders_are_kept(run_dir: Path) -> None:
    run = Run(load_config(run_dir), reading=True)
    forks = Forks(run, run_dir / "analysis" / "forks", 3)
    variant = Variant("layers-1", "layers", "1", {"gnn.layers": 1})
    path = forks.path(variant)
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="was not made by gnnlm analyze"):
        forks._fork(path, variant)
    assert (path / "notes.txt").read_text() == "mine"
    (path / "notes.txt").unlink()
    (path / RECORD).write_text('{"config": {}, "artifacts": {"encode": "another"}}')
    assert not forks.is_done(variant)
    forks._fork(path, variant)
    assert forks._is_current(path, variant)
    assert not forks.is_done(variant), "nothing is trained yet"
    assert (path / "store" / "manifest.json").is_file()


def test_a_run_whose_text_is_gone_can_still_be_forked(run_dir: Path, tmp_path: Path) -> None:
    """The analysis reads a run; its corpus is linked, not read again."""
    moved = (run_dir / "config.yaml").read_text().replace("source: ", "source: /nowhere")
    (run_dir / "config.yaml").write_text(moved)
    run = Run(load_config(run_dir), reading=True)
    forks = Forks(run, run_dir / "analysis" / "forks", 3)
    assert "/nowhere" in forks.config(BASELINE).model_dump_json()
    kept = run.kept_by(Run(forks.config(BASELINE), reading=True))
    assert kept == ["corpus", "encode", "codec", "index", "search"]


def test_a_change_that_the_run_does_not_allow_is_planned_as_nothing(run_dir: Path) -> None:
    """Copying needs the base model's width."""
    text = (run_dir / "config.yaml").read_text()
    assert "width: null" in text
    (run_dir / "config.yaml").write_text(text.replace("width: null", "width: 16"))
    forks = Forks(Run(load_config(run_dir), reading=True), run_dir / "analysis" / "forks", 3)
    (copying,) = [variant for variant in forks.variants if variant.name == "copying-on"]
    changes = Variant("copying-on", "copying", "on", {**copying.changes, "gnn.layers": 2})
    assert not forks.is_done(changes)
    assert forks.seconds(changes) == 0.0
    with pytest.raises(ConfigError, match=r"gnn\.copying needs"):
        forks.train(changes)


def test_the_config_of_a_fork_changes_nothing_else(run_dir: Path) -> None:
    run = Run(load_config(run_dir), reading=True)
    forks = Forks(run, run_dir / "analysis" / "forks", 10)
    config: Config = forks.config(Variant("layers-1", "layers", "1", {"gnn.layers": 1}))
    same = {"run", "gnn", "train", "eval"}
    assert config.model_dump(exclude=same) == run.config.model_dump(exclude=same)
    assert config.gnn.model_dump(exclude={"layers"}) == run.config.gnn.model_dump(exclude={"layers"})
