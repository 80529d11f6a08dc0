"""The paper's configs, by the numbers: parameters, receptive fields, and what they will need."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnlm.artifact import human_bytes
from gnnlm.cli.plan_command import rounded, total, without
from gnnlm.config import Config, changed, load_config, parse_config
from gnnlm.errors import ConfigError
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.plan import rates
from gnnlm.plan.needs import Need, PlanFacts, plan
from gnnlm.plan.rates import (
    NO_TIME,
    Rates,
    bf16_slowdown,
    measured_rates,
    row_operations,
    slow_settings,
    token_operations,
)
from gnnlm.plan.sizes import ModelSizes, TextSize
from gnnlm.progress import human_time
from gnnlm.run import Run
from gnnlm.run.planning import done_stages, model_sizes, rates_here, sizes_of_text
from tests.cli import error_line, gnnlm
from tests.conftest import TINY, merge, write_texts
from tests.train.test_lm import FINETUNE, SCRATCH

CONFIGS = Path(__file__).parent.parent.parent / "configs"


@dataclass(frozen=True)
class Speed:
    """Operations per second: of the device, by precision, and of the processor, where FAISS runs.

    A whole model reaches half of it.
    """

    fp32: float
    bf16: float
    processor: float

    def of(self, precision: str) -> float:
        return (self.bf16 if precision == "bf16" else self.fp32) / 2


GPU = Speed(fp32=1e14, bf16=3e14, processor=1e12)
HERE = Speed(fp32=2e11, bf16=4e11, processor=2e11)


def rates_at(config: Config, sizes: ModelSizes, speed: Speed) -> Rates:
    """The rates of a machine of this speed, by the numbers of operations."""
    fit = config.lm.train if config.lm.model == "scratch" else config.lm.finetune
    compare = 4.0 * sizes.width / speed.processor
    training = speed.of(config.train.precision)
    k = config.eval.graph_k or config.search.graph_k
    row = sizes.gnn_parameters + row_operations(resolve_options(config.gnn, sizes.width))
    return Rates(
        read=2.0 * sizes.parameters / speed.of(config.lm.dtype),
        learn=6.0 * sizes.parameters / speed.of(fit.precision),
        compare=compare,
        scan=compare,
        neighbour=0.0,
        train={p.k: 3.0 * token_operations(config, sizes, p.k) / training for p in config.train.curriculum},
        score=token_operations(config, sizes, k) / speed.of("fp32"),
        row=row / speed.of("fp32"),
    )


def at_speed(config: Config, sizes: ModelSizes, text: dict[str, TextSize], speed: Speed) -> dict[str, Need]:
    return plan(config, PlanFacts(sizes, text, rates_at(config, sizes, speed)))


def planned(run: Run, speed: Speed = GPU) -> dict[str, Need]:
    return at_speed(run.config, model_sizes(run), sizes_of_text(run), speed)


@pytest.mark.parametrize(
    ("name", "base", "both", "field"),
    [
        ("wikitext103", 247, 273, 3072),  # with 16 heads; with 8 it is 274
        ("one_billion_word", 1025, 1055, 512),  # the paper says 1.03B and 1.05B
        ("enwik8", 41, 48, 6656),  # T x L, and the segment a token stands in
        ("wikitext2-small", 6, 8, 128),
    ],
)
def test_the_papers_parameters(name: str, base: int, both: int, field: int) -> None:
    about = model_sizes(Run(load_config(CONFIGS / f"{name}.yaml")))
    assert round(about.parameters / 1e6) == base
    assert round((about.parameters + about.gnn_parameters) / 1e6) == both
    assert about.receptive_field == field


def test_eight_heads_make_274_million() -> None:
    about = model_sizes(Run(load_config(CONFIGS / "wikitext103.yaml", ("gnn.heads=8",))))
    assert round((about.parameters + about.gnn_parameters) / 1e6) == 274


def test_the_papers_settings() -> None:
    for name, index_bytes, clusters in (
        ("wikitext103", 128, 4096),
        ("one_billion_word", 64, 2**20),
        ("enwik8", 128, 4096),
    ):
        config = load_config(CONFIGS / f"{name}.yaml")
        assert (config.codec.kind, config.codec.bytes) == ("pq", 128)
        assert (config.index.bytes, config.index.clusters, config.index.probes) == (index_bytes, clusters, 32)
        assert (config.search.k, config.search.graph_k, config.search.exclude) == (1024, 128, "receptive-field")
        assert (config.gnn.preset, config.gnn.layers, config.gnn.left, config.gnn.right) == ("paper", 3, 1, 1)
        assert [phase.k for phase in config.train.curriculum] == [32, 128]
        assert config.gnn.context == 128
        assert (config.index.metric, config.index.kind) == ("cosine", "paper")
    words, sentences, characters = (
        load_config(CONFIGS / f"{name}.yaml") for name in ("wikitext103", "one_billion_word", "enwik8")
    )
    assert (words.lm.train.block, words.lm.window, words.lm.context) == (3072, 3072, 2560)
    assert words.lm.continuous
    assert words.lm.whole_lines
    assert not sentences.lm.continuous
    assert (sentences.corpus.min_count, sentences.corpus.tokens) == (3, "words")
    assert (characters.corpus.tokens, characters.lm.continuous) == ("bytes", True)
    assert characters.lm.window % 512 == characters.lm.context % 512 == 0
    assert (words.gnn.heads, sentences.gnn.heads, characters.gnn.heads) == (16, 16, 8)


def test_plan_of_wikitext103() -> None:
    run = Run(load_config(CONFIGS / "wikitext103.yaml"))
    text, about = sizes_of_text(run), model_sizes(run)
    tokens = {split: amount.tokens for split, amount in text.items()}
    assert tokens == {"train": 103_227_021, "valid": 217_646, "test": 245_569}
    needs = at_speed(run.config, about, text, GPU)
    assert needs["encode"].disk == pytest.approx(sum(tokens.values()) * 2048, rel=0.01)  # and the softmax
    assert needs["codec"].disk == pytest.approx(103_227_021 * 128)
    whole = total(needs)
    assert whole.disk > needs["encode"].disk
    assert whole.seconds == pytest.approx(sum(need.seconds for need in needs.values()))
    slower = at_speed(run.config, about, text, dataclasses.replace(GPU, fp32=1e13))
    assert slower["encode"].seconds == pytest.approx(10 * needs["encode"].seconds)
    assert slower["search"].seconds == needs["search"].seconds  # FAISS stays on the processor


def test_a_precision_that_is_slow_here_is_named() -> None:
    run = Run(load_config(CONFIGS / "wikitext103.yaml"))
    assert slow_settings(run.config, 80.0, ("lm", "encode", "train")) == [
        f"{name}=bf16 is about 80 times slower than fp32 on this machine: --set {name}=fp32"
        for name in ("lm.train.precision", "train.precision")
    ]
    assert not slow_settings(run.config, 80.0, ("encode", "search"))
    assert not slow_settings(run.config, 0.5, ("lm", "encode", "train"))


def test_a_precision_that_is_slow_here_is_not_tried(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan measures for seconds, on any machine: training is measured in fp32, and multiplied."""
    assert bf16_slowdown("cpu") > 0
    used = []
    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda *args, enabled: used.append(enabled) or real(*args, enabled=enabled))
    config = changed(tiny_run.config, {"train.precision": "bf16"})
    sizes = model_sizes(tiny_run)
    monkeypatch.setattr(rates, "ENOUGH", 0.0)
    monkeypatch.setattr(rates, "timed", lambda work, seconds=0.2: work() is None or 1.0)
    slow = measured_rates(config, sizes, 1000, slowdown=80.0)
    assert not any(used)
    fast = measured_rates(config, sizes, 1000)
    assert any(used)
    for k, seconds in fast.train.items():
        assert slow.train[k] == 80 * seconds


def test_plan_by_hand() -> None:
    """What was counted by hand for the paper's configs."""
    run = Run(load_config(CONFIGS / "wikitext103.yaml"))
    needs = planned(run)
    rows = 103_227_021
    assert needs["index"].disk == pytest.approx(rows * (128 + 8) + 4 * 4096 * 1024)
    probed = 4096 + rows * 32 / 4096  # a query is compared with all clusters and with the rows of 32
    queries = rows + 217_646 + 245_569
    assert needs["search"].seconds == pytest.approx(queries * 2 * 1024 * probed / 5e11, rel=1e-3)
    edges = 64 * 128 * (40_000 * 32 + 10_000 * 128)
    updates = 3 * 14 * 2 * 3 * 1024**2 * 0.7 * edges  # forward and back, two layers, three slots
    assert needs["train"].seconds == pytest.approx(updates / 1.5e14, rel=0.3)
    assert needs["cache"].disk == needs["cache"].seconds == 0  # over its limit
    billion = Run(load_config(CONFIGS / "one_billion_word.yaml"))
    needs = planned(billion)
    positions = 798_949_912 + 30_301_028 + 165_560 + 6_206 + 159_658 + 6_075
    assert needs["encode"].disk == pytest.approx(positions * 1536 * 2, rel=1e-3)
    assert needs["index"].memory > 4 * 8 * 2**20 * 1536


def test_plan_is_near_what_trainings_took() -> None:
    """Within a factor of three of what two cores took, at the speed they multiply matrices with."""
    small = load_config(CONFIGS / "one_billion_word-small.yaml")
    text = {"train": TextSize(544_588, 20_673), "valid": TextSize(30_000, 1_200), "test": TextSize(63_647, 2_430)}
    about = ModelSizes(4_900_000, 1_600_000, 256, 256, 13_590, 1_900_000)
    assert 1 / 3 < at_speed(small, about, text, HERE)["lm"].seconds / 2914 < 3
    paper = ("gnn.preset=paper", "train.curriculum=[{k: 32, steps: 150}]", "train.batch_blocks=2", "eval.graph_k=32")
    library = load_config(CONFIGS / "python-library.yaml", paper)
    about = ModelSizes(135_000_000, 8_600_000, 1024, 576, 49_152, 49_152 * 576)
    text = {"train": TextSize(240_000, 166), "valid": TextSize(16_000, 11), "test": TextSize(60_000, 38)}
    assert 1 / 3 < at_speed(library, about, text, HERE)["train"].seconds / 894 < 3


def test_plan_refuses_what_the_run_would() -> None:
    run = Run(load_config(CONFIGS / "wikitext103.yaml", ("index.bytes=100",)))
    with pytest.raises(ConfigError, match=r"index\.bytes"):
        planned(run)


@pytest.mark.parametrize("name", ["one_billion_word", "enwik8", "wikitext2-small", "enwik8-small"])
def test_every_benchmark_can_be_planned(name: str) -> None:
    run = Run(load_config(CONFIGS / f"{name}.yaml", ("run=nowhere",)))
    needs = planned(run)
    assert all(need.seconds > 0 and need.memory > 1e8 for name, need in needs.items() if name != "cache")


def test_plan_is_near_what_a_run_takes(tiny_run: Run) -> None:
    needs = planned(tiny_run, HERE)
    for stage in ("encode", "search", "cache"):
        assert needs[stage].disk == pytest.approx(tiny_run.bytes_of(stage), rel=0.1)


def test_sums_are_those_of_what_is_shown() -> None:
    """Stages of seconds are shown as minutes; their sum is that of the minutes."""
    needs = {f"stage {n}": Need(disk=1.26 * 2**20, memory=2e9, seconds=20) for n in range(6)}
    needs["long"] = Need(disk=1.0, memory=1e9, seconds=100)
    shown = {name: rounded(need) for name, need in needs.items()}
    whole = total(shown)
    assert human_time(shown["stage 0"].seconds) == "1 min"
    assert human_time(shown["long"].seconds) == "2 min"
    assert human_time(whole.seconds) == "8 min"
    assert human_bytes(shown["stage 0"].disk) == "1.3 MB"
    assert human_bytes(whole.disk) == "7.8 MB"
    assert human_bytes(whole.memory) == human_bytes(2e9)


def test_done_stages_need_nothing_more(tiny_run: Run, tmp_path: Path) -> None:
    needs = planned(tiny_run, HERE)
    done = done_stages(tiny_run)
    assert set(needs) == set(tiny_run.stages) - {"codec"}  # fp16 has none to build
    assert set(needs) < set(done)
    assert total(without(needs, done)) == Need(0, 0, 0)
    shutil.copytree(tiny_run.root, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "report")
    shown = gnnlm("plan", tmp_path / "copy", "--json").stdout.splitlines()
    found = json.loads(shown[-1])
    assert [name for name, stage in found["stages"].items() if not stage["done"]] == ["eval"]
    assert found["stages"]["encode"]["there"] == done["encode"]
    assert found["seconds"] == found["stages"]["eval"]["seconds"]
    assert found["fits"]
    assert found["rates"].keys() == vars(NO_TIME).keys()
    rows = {line.split()[0]: line.split() for line in shown[2:-1]}
    assert rows["encode"][-4:] == ["on", "disk", "-", "done"]
    assert rows["eval"][-2:] == rows["remaining"][-2:]
    assert rows["eval"][-1] in ("min", "h")


def test_command_line() -> None:
    shown = gnnlm("lm", "describe", CONFIGS / "enwik8.yaml", "--json")
    found = json.loads(shown.stdout.splitlines()[-1])
    assert {"parameters", "gnn_parameters", "receptive_field"} <= found.keys()


def test_needs_grow_with_the_text_and_shrink_with_cores() -> None:
    run = Run(load_config(CONFIGS / "wikitext103.yaml"))
    text, about = sizes_of_text(run), model_sizes(run)
    here = PlanFacts(about, text, rates_at(run.config, about, HERE))
    once = plan(run.config, here)
    cores = plan(run.config, dataclasses.replace(here, rates=here.rates.on(4)))
    for name in ("lm", "encode", "index", "search", "train", "tune"):
        assert once[name].seconds > 0
        assert cores[name].disk == once[name].disk
        assert cores[name].seconds < once[name].seconds
    assert cores["encode"].seconds == pytest.approx(once["encode"].seconds / 4)
    tenfold = {**text, "train": TextSize(10 * text["train"].tokens, 10 * text["train"].documents)}
    more = plan(run.config, dataclasses.replace(here, text=tenfold))
    assert more["encode"].disk > 9 * once["encode"].disk
    assert more["search"].seconds > 9 * once["search"].seconds
    assert more["train"].seconds == pytest.approx(once["train"].seconds)  # its steps are those of the config
    whole = total(once)
    assert whole.seconds == pytest.approx(sum(need.seconds for need in once.values()))
    assert whole.disk == pytest.approx(sum(need.disk for need in once.values()))
    assert whole.memory == max(need.memory for need in once.values())


def test_planning_for_another_machine(write_config: Any) -> None:
    """More text and more cores than there are; text that is not built yet counts as the tokens say."""
    config = write_config()
    shown = gnnlm("plan", config, "--tokens", "3M", "--cores", "64", "--memory", "1G", "--disk", "10M", "--json")
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["cores"] == 64
    assert found["stages"]["encode"]["disk"] > 3e6 * 32 * 2
    assert not found["fits"]
    assert len(found["problems"]) == shown.stderr.count("this run does not fit: ") >= 1
    assert "most of it for cache" in found["problems"][-1]
    assert "error: --tokens: expected a number such as" in error_line("plan", config, "--tokens", "many")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretrained", "scratch", "finetuned"])
def test_the_plan_beside_what_runs_take(kind: str, tiny_lm_dir: Path, tmp_path: Path) -> None:
    """Prints the estimate and the measured seconds of every stage; how near they are, no test decides."""
    text = write_texts(tmp_path / "text", documents=40, sentences=40)
    values: dict[str, Any] = merge(TINY, {"run": str(tmp_path / "run"), "corpus": {"source": str(text)}})
    if kind == "scratch":
        values = merge(merge(values, SCRATCH), {"index": {"kind": "ivf"}, "gnn": {"preset": "paper"}})
    else:
        values = merge(
            values, {"lm": {"model": str(tiny_lm_dir), "device": "cpu"}, "search": {"k": 256, "graph_k": 32}}
        )
        values = merge(values, {"train": {"curriculum": [{"k": 32, "steps": 60}], "block": 64, "batch_blocks": 4}})
    if kind == "finetuned":
        values = merge(values, {"lm": {"finetune": {**FINETUNE, "epochs": 2}}, "codec": {"kind": "pq", "bytes": 8}})
    run = Run(parse_config(values))
    run.build("corpus")
    about = model_sizes(run)
    measured = rates_here(run, about, learning=True, slowdown=bf16_slowdown("cpu"))
    needs = plan(run.config, PlanFacts(about, sizes_of_text(run), measured))
    took = {}
    for name in list(run.stages)[1:]:
        began = time.perf_counter()
        run.build(name)
        took[name] = time.perf_counter() - began
    expected = {name: needs[name].seconds if name in needs else 0.0 for name in took}
    words = {name: (round(expected[name], 2), round(seconds, 2)) for name, seconds in took.items()}
    print(words)
    assert needs.keys() <= took.keys() | {"corpus"}


def test_what_is_not_known_yet_is_told(tmp_path: Path, text_dir: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"run: {tmp_path / 'r'}\ncorpus: {{source: {text_dir}, tokens: words}}\nlm: {{model: scratch}}\n")
    config.write_text(config.read_text() + "seed: 1\n")
    for ask in (model_sizes, sizes_of_text):
        with pytest.raises(ConfigError, match="build it first: gnnlm corpus"):
            ask(Run(load_config(config)))
