"""Every field, given what it cannot use: one line with its name, what was expected and what was got."""

from __future__ import annotations

import math
import types
from typing import Any, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.config import Config, ConfigSection, dump_config, field_names, parse_config
from gnnlm.config.config_model import MAX_SEED
from gnnlm.config.config_section import MAX_STEPS
from gnnlm.config.plain_yaml import parse_yaml
from gnnlm.errors import ConfigError

PYDANTIC = ("Input should", "a valid", "Field required", "Value error", "unable to", "permitted", "Tuple")
WRONG = [
    None, True, False, 0, -1, 1, 1.5, -0.5, 2**63, 10**30, 10**5000, -(10**5000), math.nan, math.inf, -math.inf, 1e308,
    "", " ", "x", "x" * 5000, "3", "nan", "1e999", "9" * 5000, "a\0b", "\ud800", "yes", b"x", b"\xff",
    [], [[]], ["x"], [0], [-1], [math.nan], [True], [None], [10**5000], ["\0"], [1, 2, 3], [{}], [1] * 2000,
    {}, {"k": 1}, {"x": {"x": {}}}, {1: 2}, object(),
]  # fmt: skip


def leaves() -> list[str]:
    names = field_names()
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value if name.split(".")[0] == "run" else {"run": "x", **value}


def check(name: str, value: Any) -> None:
    """The value is refused in our words, or makes a config that can be written and read."""
    try:
        config = parse_config(nested(name, value))
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message
        assert name in message or name.rpartition(".")[2] in message, message
        assert not any(word in message for word in PYDANTIC), message
        assert "expected" in message or "must" in message or "give" in message or "set" in message or "key" in message
        assert len(message) < 1500, message
        if "expected" in message:
            assert "got" in message or "is missing" in message or "unknown key" in message, message
    else:
        assert parse_config(parse_yaml(dump_config(config), "config.yaml")) == config


@pytest.mark.parametrize("name", [*leaves(), "gnn", "lm", "lm.architecture"])
def test_every_field_with_every_wrong_value(name: str) -> None:
    for value in WRONG:
        check(name, value)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(field_names()), value=ANY)
def test_every_field_with_anything(name: str, value: Any) -> None:
    check(name, value)


def numbers_of(model: type[ConfigSection], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every field that is a number: name, type, limits."""
    found = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(part for part in get_args(kind) if part is not type(None))
        if isinstance(kind, type) and issubclass(kind, ConfigSection):
            found += numbers_of(kind, f"{prefix}{name}.")
        elif kind in (int, float):
            found.append((prefix + name, kind, field.metadata))
    return found


@pytest.mark.parametrize(("name", "kind", "limits"), numbers_of(Config))
def test_every_number_is_bounded_on_both_sides(name: str, kind: Any, limits: Any) -> None:
    assert any(hasattr(limit, "ge") or hasattr(limit, "gt") for limit in limits)
    assert any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in limits)
    for value in (math.inf, -math.inf, math.nan, 1e300, -1e300, 10**30, True):
        with pytest.raises(ConfigError, match=rf"{name}: expected a (whole )?number .*\(got "):
            parse_config(nested(name, value))


WORDS: list[tuple[str, Any, str | None]] = [
    ("train.betas", "x", r"train.betas: expected a list of two numbers \(got 'x'\)$"),
    ("train.betas", [0.9], r"train.betas: expected a list of two numbers \(got \[0.9\]\)$"),
    ("train.betas", [2, 0.9], r"train.betas.0: expected a number of at least 0 and below 1 \(got 2\)$"),
    ("gnn.layers", "many", r"gnn.layers: expected a whole number from 0 to 64 \(got 'many'\)$"),
    ("gnn.layers", True, r"gnn.layers: expected a whole number from 0 to 64 \(got true\)$"),
    ("gnn.width", 10**9, r"gnn.width: expected a whole number from 1 to 16,384, or null \(got 1000000000\)$"),
    ("gnn.preset", "papr", r"gnn.preset: expected default, paper or released \(got 'papr'\)$"),
    ("gnn.bias", "maybe", r"gnn.bias: expected true or false, or null \(got 'maybe'\)$"),
    ("gnn", None, r"gnn: expected a mapping of fields \(got null\)$"),
    ("run", 2024, r"run: expected text \(got 2024\); put it in quotes$"),
    ("run", "", "run: expected text that is not empty"),
    ("corpus.source", "a\0b", r"corpus.source: expected text without NUL characters \(got 'a\\x00b'\)$"),
    ("run", "a\udcff", r"run: expected text that can be written as UTF-8 \(got 'a\\udcff'\)"),
    ("seed", 2**63, r"seed: expected a whole number from 0 to 2,147,483,646 \(got 9223372036854775808\)$"),
    ("seed", 10**5000, r"\(got a number of about 5,000 digits\)$"),
    ("train.lr", math.inf, r"train.lr: expected a number above 0 and at most 1,000 \(got inf\)$"),
    ("tune.temperatures", [math.nan], r"tune.temperatures.0: expected a number from 1e-09 to .* \(got nan\)$"),
    ("tune.ks", [], r"tune.ks: expected a list of 1 to 1,000 whole numbers, each from 1 to 65,536 \(got \[\]\)$"),
    ("tune.lambdas", [i / 999 for i in range(1000)], None),
    ("eval.bootstrap", 1, r"eval.bootstrap: expected a whole number from 40 to 100,000 \(got 1\)$"),
    ("lm.train.steps", 10**12, r"lm.train.steps: expected a whole number from 1 to 10,000,000 \(got 1000000000000"),
    ("train.curriculum", [{"k": 1, "steps": 10**12}], "train.curriculum.0.steps: expected .* to 10,000,000"),
    ("train.curriculum", [{"k": 1, "steps": 10**7}] * 2, "have 20,000,000 steps together; expected at most 10,000"),
    ("train.curriculum", [{"k": 1}], "train.curriculum.0.steps is missing: expected a whole number from 1"),
    ("train.curriculum", [7], r"train.curriculum.0: expected a mapping of fields \(got 7\)$"),
    ("train.curriculum", 7, r"train.curriculum: expected a list of 1 to 1,000 mappings of k and steps \(got 7\)$"),
    ("index.kind", "IDMap,Flat", "index.kind: .* without IDMap, which has ids of its own"),
    ("index.kind", "Flat,IDMap2", "without IDMap"),
    ("index.kind", "NSG16,Flat", "without NSG, which takes no second batch of rows"),
    ("index.kind", "ITQ,LSH", "without LSH, which does not give a distance"),
    ("index.kind", "HNSW1", r"numbers from 1 to 16,777,216, and of HNSW from 2 to 1,024 \(got 'HNSW1'\)"),
    ("index.kind", "HNSW1000000", "of HNSW from 2 to 1,024"),
    ("index.kind", "Exact", r"index.kind: expected exact, in lower case, or a FAISS factory string \(got 'Exact'\)"),
    ("index.kind", "IVF0,Flat", "numbers from 1 to 16,777,216"),
    ("index.kind", "IVF99999999999,Flat", "numbers from 1 to 16,777,216"),
    ("index.kind", "", "index.kind: expected text that is not empty"),
    ("index.kind", "PCA64,IVF1024_HNSW32,PQ32x4fs,RFlat", None),
    ("corpus.encoding", "hex", r"corpus.encoding: expected a text encoding .* such as utf-8 or latin-1 \(got 'hex'"),
    ("corpus.encoding", "rot13", "expected a text encoding"),
    ("corpus.encoding", "idna", "expected a text encoding"),
    ("corpus.encoding", "punycode", "expected a text encoding"),
    ("corpus.encoding", "unicode-escape", "expected a text encoding"),
    ("corpus.encoding", "utf-8\0", "without NUL characters"),
    ("corpus.encoding", "utf-16", None),
    ("corpus.encoding", "Windows-1252", None),
    ("corpus.suffixes", ["tex"], r"ends of file names, each with its dot, such as \[.tex, .py\] \(got 'tex'"),
    ("corpus.suffixes", [".gz"], "ends of file names"),
    ("corpus.suffixes", [".TeX", ".py"], None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), WORDS, ids=[f"{name} {n}" for n, (name, *_) in enumerate(WORDS)])
def test_words(name: str, value: Any, message: str | None) -> None:
    if message is None:
        parse_config(nested(name, value))
        return
    with pytest.raises(ConfigError, match=message):
        parse_config(nested(name, value))


def test_many_mistakes_are_a_few_lines_worth() -> None:
    with pytest.raises(ConfigError, match=r"unknown key k4; remove it; and 2995 more$"):
        parse_config({"run": "x", **{f"k{i}": 1 for i in range(3000)}})


def test_too_many_mixes() -> None:
    lists = {"ks": list(range(1, 1001)), "lambdas": [0.5] * 1000}
    with pytest.raises(ConfigError, match=r"tune: .* make 96,000,000 combinations; expected at most 10,000,000"):
        parse_config({"run": "x", "tune": lists})


def test_seeds_derived_from_the_largest_seed_fit() -> None:
    import faiss

    config = parse_config({"run": "x", "seed": MAX_SEED})
    torch.manual_seed(config.seed * 1_000_003 + MAX_STEPS * 100_000)
    torch.Generator().manual_seed(config.seed * 1_000_003 + MAX_STEPS * 100_000)
    assert config.seed * 1_000_003 + MAX_STEPS * 100_000 < 2**63
    np.random.default_rng([config.seed, MAX_STEPS])
    parameters = faiss.ClusteringParameters()
    parameters.seed = config.seed + 1
    assert parameters.seed == config.seed + 1
