"""Config files and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnnlm.config import Config, ConfigSection, dump_config, field_names, load_config, parse_config
from gnnlm.config.plain_yaml import parse_yaml
from gnnlm.config.presets import PRESETS, preset_words
from gnnlm.errors import ConfigError
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.retrieval.search import LeakageRule


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "run: runs/x\ngnn: {layers: 4}\n")
    config = load_config(path, ("gnn.layers=2", "train.lr=1e-3", "tune.ks=[1, 2]", "corpus.source=texts", "seed=7"))
    assert (config.gnn.layers, config.train.lr, config.tune.ks) == (2, 1e-3, (1, 2))
    assert (config.corpus.source, config.seed) == ("texts", 7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gnn": {"layer": 2}}, "unknown key gnn.layer; did you mean gnn.layers?"),
        ({"gnm": {}}, "unknown key gnm; did you mean gnn?"),
        ({"train": {"lr": "fast"}}, r"train.lr: .* \(got 'fast'\)"),
        ({"search": {"k": 4, "graph_k": 8}}, r"graph_k must be at most k \(got 8 and 4\)"),
        ({"lm": {"window": 8, "context": 8}}, "context must be smaller than window"),
        ({"corpus": {"train": "a"}}, "give train, valid and test together"),
        ({"tune": {"lambdas": [2.0]}}, r"tune.lambdas.0: expected a number from 0 to 1 \(got 2.0\)"),
        ({"tune": {"ks": [0]}}, "tune.ks.0: expected a whole number from 1"),
        ({"corpus": "notes/"}, r"corpus: expected a mapping of fields \(got 'notes/'\)"),
        ({"train": {"curriculum": [{"k": 4}]}}, "config: train.curriculum.0.steps is missing: expected a whole"),
        ({"eval": {"graph_k": 5000}}, r"eval.graph_k must be at most search.k \(got 5000 and 1024\)"),
        ({"train": {"betas": [2, 0.9]}}, "train.betas.0: expected a number of at least 0 and below 1"),
        (
            {"eval": {"context_retrieval": {"strides": [0]}}},
            r"context_retrieval.strides.0: expected a whole number from 1",
        ),
        (
            {"eval": {"context_retrieval": {"counts": [0]}}},
            r"context_retrieval.counts.0: expected a whole number from 1",
        ),
        (
            {"eval": {"context_retrieval": {"lengths": []}}},
            r"context_retrieval.lengths: expected a list of 1 to 16 whole",
        ),
        ({"eval": {"context_retrieval": "yes"}}, r"eval.context_retrieval: expected a mapping of fields \(got 'yes'\)"),
        (
            {"eval": {"context_retrieval": True}, "lm": {"window": 512, "context": 128}},
            r"2 passages of 256 tokens, lm.context \(128\) and a stride of 64 must fit into lm.window, but make 704",
        ),
        ({"search": {"graph_k": 32}}, "train.curriculum asks for k = 128, search.graph_k gives only 32"),
    ],
)
def test_mistakes_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"run": "x", **values})


def test_true_is_short_for_passages_with_their_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "run: runs/x\n")
    off = load_config(path).eval.context_retrieval
    assert not off.enabled
    on = load_config(path, ("eval.context_retrieval=true",))
    assert on.eval.context_retrieval == off.model_copy(update={"enabled": True})
    assert load_config(path, ("eval.context_retrieval=false",)).eval.context_retrieval == off
    longer = ("eval.context_retrieval.lengths=[2048]",)
    assert load_config(path, longer).eval.context_retrieval.lengths == (2048,)  # not asked for, so not refused
    assert load_config(write(tmp_path, dump_config(on))) == on


def test_run_is_required() -> None:
    with pytest.raises(ConfigError, match="run is missing: expected text"):
        parse_config({})


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a config file or a run directory, found none"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match=r"a run directory with a config\.yaml"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(write(tmp_path, "a: [1"))
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(write(tmp_path, "- 1"))
    with pytest.raises(ConfigError, match="--set expects name=value"):
        load_config(write(tmp_path, "run: x"), ("gnn.layers",))


def test_round_trip(tmp_path: Path) -> None:
    config = parse_config({"run": "x", "gnn": {"preset": "paper"}, "train": {"lr": 1e-5}})
    assert load_config(write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_cover_every_section(preset: str) -> None:
    """What a preset sets are fields, all presets set the same, and a value in the config overrides it."""
    assert {s: set(values) for s, values in PRESETS[preset].items()} == {
        s: set(values) for s, values in PRESETS["default"].items()
    }
    names = [f"{section}.{name}" for section, values in PRESETS[preset].items() for name in values]
    assert set(names) <= set(field_names())
    config = parse_config({"run": "x", "gnn": {"preset": preset}})
    assert all(getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) is None for name in names)
    paper = preset != "default"
    assert (config.exclude, config.buckets) == (("receptive-field", 1) if paper else ("document", 8))
    assert LeakageRule.of(config, 9).whole_document is not paper
    explicit = {"search": {"exclude": "document"}, "tune": {"buckets": 3}}
    own = parse_config({"run": "x", "gnn": {"preset": preset, "dropout": 0.25}, **explicit})
    assert (own.exclude, own.buckets, resolve_options(own.gnn, 64).dropout) == ("document", 3, 0.25)
    (followed,), (said, overridden) = preset_words(config), preset_words(own)
    assert followed.startswith(f"gnn.preset {preset} sets: gnn.dropout ")
    assert f"tune.buckets 3 (preset: {config.buckets})" in overridden
    assert ("search.exclude document" in said) is not paper
    again = parse_yaml(dump_config(config), "saved")
    assert parse_config(again) == config  # what follows the preset still follows it, so that a fork may change it


def test_every_field_is_documented() -> None:
    def check(model: type[ConfigSection]) -> None:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
                check(field.annotation)

    check(Config)
    assert "train.curriculum" in field_names()
