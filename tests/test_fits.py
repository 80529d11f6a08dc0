"""What does not fit is refused before the long work, with a setting that makes it fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnlm.config import changed, load_config, parse_config
from gnnlm.errors import ArtifactError
from gnnlm.run import Run, fits
from gnnlm.run.fits import check_fits, problems, remaining, shortages
from gnnlm.run.machine import Machine
from gnnlm.run.plan import Need, plan
from gnnlm.run.rates import NO_TIME
from gnnlm.run.sizes import Amount, amounts, describe

CONFIGS = Path(__file__).parent.parent / "configs"
ROOMY = Machine(memory=1e15, disk=1e18)


def test_memory_counts_one_by_one_and_disk_together() -> None:
    needs = {"encode": Need(6.0, 5.0, 0.0), "search": Need(7.0, 9.0, 0.0)}
    assert shortages(needs, Machine(memory=9.0, disk=13.0)) == []
    lack = shortages(needs, Machine(memory=8.0, disk=12.0))
    assert [(each.stage, each.what, each.needed) for each in lack] == [
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
    about, text = describe(run), amounts(run)
    machine = replace(ROOMY, **lacking)
    needs = plan(run.config, about, text, NO_TIME)
    assert shortages(needs, ROOMY) == []
    found = problems(run.config, about, text, needs, machine)
    assert found
    assert f"the run would fit with --set {setting}" in found[0]
    name, value = found[0].rsplit(" ", 1)[1].split("=")
    kept = {**text, "train": Amount(int(value), 0)} if name == "corpus.max_train_tokens" else text
    plain: Any = {"true": True}.get(value, int(value) if value.isdigit() else value)
    again = plan(changed(run.config, {name: plain}), about, kept, NO_TIME)
    what, stage = next(iter(lacking)), shortages(needs, machine)[0].stage
    assert not [
        each for each in shortages(again, machine) if each.what == what and (what == "disk" or each.stage == stage)
    ]


def test_a_run_that_does_not_fit_is_refused_and_can_be_forced(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(parse_config({"run": str(tmp_path / "run"), **tiny_values}))
    monkeypatch.setattr(fits.Machine, "here", lambda folder: replace(ROOMY, disk=2e6))
    with pytest.raises(
        ArtifactError, match=r"most of it for cache, but 1.9 MB are free; the run would fit with --set cache.form=none"
    ):
        run.build_all()
    assert (tmp_path / "run" / "corpus").is_dir()  # which says how much text there is
    assert not (tmp_path / "run" / "store").exists()
    monkeypatch.setattr(fits.Machine, "here", lambda folder: replace(ROOMY, memory=1e6))
    with pytest.raises(ArtifactError, match=r"of memory, but .* --force starts the run in any case"):
        run.build_all()
    run.force = True
    monkeypatch.setattr(Run, "build", lambda self, name, rebuild=False: name)
    assert run.build_all() == "eval"


def test_what_is_done_needs_no_room(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = plan(tiny_run.config, describe(tiny_run), amounts(tiny_run), NO_TIME)
    assert remaining(needs, tiny_run) == {}
    monkeypatch.setattr(fits.Machine, "here", lambda folder: Machine(0.0, 0.0))
    check_fits(tiny_run)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine.here(tmp_path / "not" / "there")
    assert here.memory > 1e6
    assert here.disk > 1e6
    from gnnlm.run import machine

    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory() == 3e6  # the limit of a container counts
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() > 3e6
