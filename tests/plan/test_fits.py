"""What does not fit is refused before the long work, with a setting that makes it fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnlm.config import changed, load_config, parse_config
from gnnlm.errors import ArtifactError
from gnnlm.plan import fits
from gnnlm.plan.fits import FreeResources, problems, shortages
from gnnlm.plan.needs import Need, PlanFacts, plan
from gnnlm.plan.rates import NO_TIME
from gnnlm.plan.sizes import TextSize
from gnnlm.run import Run
from gnnlm.run.planning import check_fits, model_sizes, remaining, sizes_of_text

CONFIGS = Path(__file__).parent.parent.parent / "configs"
ROOMY = FreeResources(memory=1e15, disk=1e18)


def test_memory_counts_one_by_one_and_disk_together() -> None:
    needs = {"encode": Need(6.0, 5.0, 0.0), "search": Need(7.0, 9.0, 0.0)}
    assert shortages(needs, FreeResources(memory=9.0, disk=13.0)) == []
    lack = shortages(needs, FreeResources(memory=8.0, disk=12.0))
    assert [(each.stage, each.resource, each.needed) for each in lack] == [
        ("search", "memory", 9.0),
        ("search", "disk", 13.0),
    ]


@pytest.mark.parametrize(
    ("changes", "lacking", "setting"),
    [
        (("index.kind=exact",), {"memory": 100e9}, "index.kind=auto"),
        (("store.dtype=fp32",), {"disk": 480e9}, "store.dtype=fp16"),
        (("train.batch_blocks=512",), {"memory": 60e9}, "train."),
        ((), {"disk": 150e9}, "corpus.max_train_tokens="),
    ],
)
def test_the_setting_named_makes_it_fit(changes: tuple[str, ...], lacking: dict[str, float], setting: str) -> None:
    run = Run(load_config(CONFIGS / "wikitext103.yaml", ("run=nowhere", *changes)))
    facts = PlanFacts(model_sizes(run), sizes_of_text(run), NO_TIME)
    text = facts.text
    machine = replace(ROOMY, **lacking)
    needs = plan(run.config, facts)
    assert shortages(needs, ROOMY) == []
    found = list(problems(run.config, facts, needs, machine))
    assert found
    assert f"the run would fit with --set {setting}" in found[0]
    name, value = found[0].rsplit(" ", 1)[1].split("=")
    kept = {**text, "train": TextSize(int(value), 0)} if name == "corpus.max_train_tokens" else text
    plain: Any = {"true": True}.get(value, int(value) if value.isdigit() else value)
    again = plan(changed(run.config, {name: plain}), replace(facts, text=kept))
    what, stage = next(iter(lacking)), shortages(needs, machine)[0].stage
    assert not [
        each for each in shortages(again, machine) if each.resource == what and (what == "disk" or each.stage == stage)
    ]


def test_a_run_that_does_not_fit_is_refused_and_can_be_forced(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(parse_config({"run": str(tmp_path / "run"), **tiny_values}))
    monkeypatch.setattr(fits.FreeResources, "here", lambda folder: replace(ROOMY, disk=2e6))
    with pytest.raises(
        ArtifactError, match=r"most of it for cache, but 1.9 MB are free; the run would fit with --set cache.form=none"
    ):
        run.build_all()
    assert (tmp_path / "run" / "corpus").is_dir()  # which says how much text there is
    assert not (tmp_path / "run" / "store").exists()
    monkeypatch.setattr(fits.FreeResources, "here", lambda folder: replace(ROOMY, memory=1e6))
    with pytest.raises(ArtifactError, match=r"of memory, but .* --force starts the run in any case"):
        run.build_all()
    run.force = True
    monkeypatch.setattr(Run, "build", lambda self, name, rebuild=False: name)
    assert run.build_all() == "eval"


def test_what_is_done_needs_no_room(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = plan(tiny_run.config, PlanFacts(model_sizes(tiny_run), sizes_of_text(tiny_run), NO_TIME))
    assert remaining(needs, tiny_run) == {}
    monkeypatch.setattr(fits.FreeResources, "here", lambda folder: FreeResources(0.0, 0.0))
    check_fits(tiny_run)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = FreeResources.here(tmp_path / "not" / "there")
    assert here.memory > 1e6
    assert here.disk > 1e6
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr(fits, "CGROUP", tmp_path)
    assert fits.free_memory() == 3e6  # the limit of a container counts
    (tmp_path / "memory.max").write_text("max\n")
    assert fits.free_memory() > 3e6
