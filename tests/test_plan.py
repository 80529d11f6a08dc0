"""The paper's configs, by the numbers: parameters, receptive fields, and what they will need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnnlm.config import load_config
from gnnlm.errors import ConfigError
from gnnlm.pipeline import Run
from gnnlm.plan import describe, matrix_speed, plan, split_tokens, table_of
from tests.cli import gnnlm

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("name", "base", "both", "field"),
    [
        ("wikitext103", 247, 273, 3072),  # with 16 heads; with 8 it is 274
        ("one_billion_word", 1025, 1056, 512),  # the paper says 1.03B and 1.05B
        ("enwik8", 41, 48, 6656),  # T x L, and the segment a token stands in
        ("wikitext2-small", 6, 8, 384),
    ],
)
def test_the_papers_parameters(name: str, base: int, both: int, field: int) -> None:
    about = describe(Run(load_config(CONFIGS / f"{name}.yaml")))
    assert round(about.parameters / 1e6) == base
    assert round((about.parameters + about.gnn_parameters) / 1e6) == both
    assert about.receptive_field == field


def test_eight_heads_make_274_million() -> None:
    about = describe(Run(load_config(CONFIGS / "wikitext103.yaml", ("gnn.heads=8",))))
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


def test_plan_of_wikitext103() -> None:
    run = Run(load_config(CONFIGS / "wikitext103.yaml"))
    tokens, about = split_tokens(run), describe(run)
    assert tokens == {"train": 103_227_021, "valid": 217_646, "test": 245_569}
    needs = plan(run.config, about, tokens, speed=1e14)
    assert needs["encode"].disk == pytest.approx(sum(tokens.values()) * 2048, rel=0.01)  # and the softmax
    assert needs["codec"].disk == pytest.approx(103_227_021 * 128)
    whole = table_of(needs)
    assert whole["disk"] > needs["encode"].disk
    assert whole["seconds"] == pytest.approx(sum(need.seconds for need in needs.values()))
    slower = plan(run.config, about, tokens, speed=1e13)
    assert slower["encode"].seconds == pytest.approx(10 * needs["encode"].seconds)
    assert matrix_speed("cpu", 0.01) > 1e8


@pytest.mark.parametrize("name", ["one_billion_word", "enwik8", "wikitext2-small", "enwik8-small"])
def test_every_benchmark_can_be_planned(name: str) -> None:
    run = Run(load_config(CONFIGS / f"{name}.yaml", ("run=nowhere",)))
    needs = plan(run.config, describe(run), split_tokens(run), speed=1e12)
    assert all(need.seconds > 0 and need.memory > 1e8 for need in needs.values())


def test_plan_is_near_what_a_run_takes(tiny_run: Run) -> None:
    needs = plan(tiny_run.config, describe(tiny_run), split_tokens(tiny_run), speed=1e12)
    for stage, name in (("encode", "store"), ("search", "neighbours"), ("cache", "cache")):
        made = sum(file.stat().st_size for file in (tiny_run.root / name).iterdir())
        assert needs[stage].disk == pytest.approx(made, rel=0.1)


def test_command_line() -> None:
    shown = gnnlm("lm", "describe", CONFIGS / "enwik8.yaml", "--json")
    found = json.loads(shown.stdout.splitlines()[-1])
    assert {"parameters", "gnn_parameters", "receptive_field"} <= found.keys()
    planned = json.loads(gnnlm("plan", CONFIGS / "enwik8.yaml", "--json").stdout.splitlines()[-1])
    assert {"stages", "disk", "memory", "seconds"} == planned.keys()


def test_what_is_not_known_yet_is_told(tmp_path: Path, text_dir: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"run: {tmp_path / 'r'}\ncorpus: {{source: {text_dir}, tokens: words}}\nlm: {{model: scratch}}\n")
    config.write_text(config.read_text() + "seed: 1\n")
    for ask in (describe, split_tokens):
        with pytest.raises(ConfigError, match="make it first: gnnlm corpus"):
            ask(Run(load_config(config)))
