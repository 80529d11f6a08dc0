"""Small worlds for the tests: a random-initialised LM with a byte-level tokenizer, text, and a whole run."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors: threads would only wait for one another
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: threads that spin slow each other
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch
import yaml
from hypothesis import HealthCheck, settings

from gnnlm.progress import line_of

# Shells start background commands with Ctrl-C ignored, and children inherit it; tests that send it need it handled.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.fsync = os.fstat  # type: ignore[assignment]  # no test cuts the power; tests/faults knows what was synced without it

settings.register_profile(
    "gnnlm", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("gnnlm")


def make_tokenizer() -> Any:
    """Byte-level, 256 symbols and two special tokens; adds no BOS itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_tiny_lm(folder: Path, seed: int = 0) -> Path:
    """A Llama of two layers and width 32, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # with the usual 0.02 all predictions would be alike
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(folder: Path, documents: int = 12, sentences: int = 12, seed: int = 0) -> Path:
    """Documents of made-up sentences over a small vocabulary; no two alike."""
    rng = random.Random(seed)
    words = [a + b for a in ("ba", "do", "ki", "lu", "me") for b in ("n", "r", "sha", "to", "v")]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        lines = [" ".join(rng.choices(words, k=rng.randint(5, 11))) + "." for _ in range(sentences)]
        (folder / f"doc{number:02d}.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return folder


TINY: dict[str, Any] = {
    "corpus": {"valid_share": 0.2, "test_share": 0.2},
    "lm": {"window": 48, "context": 16, "batch_tokens": 256},
    "store": {"shard_tokens": 512},
    "search": {"k": 16, "graph_k": 8, "shard_queries": 1024},
    "gnn": {"heads": 4, "context": 12},
    "train": {
        "curriculum": [{"k": 4, "steps": 6}, {"k": 8, "steps": 4}],
        "block": 24,
        "batch_blocks": 2,
        "validate_every": 4,
        "valid_tokens": 256,
        "warmup": 2,
        "lr": 1e-3,
        "device": "cpu",
    },
    "cache": {"form": "projected"},  # what auto takes depends on the machine's mood
    "tune": {"ks": [1, 4, 16], "lambdas": [0.0, 0.1, 0.3, 1.0]},
    "eval": {"bootstrap": 50, "block": 40},
}


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested update, without touching either side."""
    out = dict(base)
    for key, value in changes.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


@pytest.fixture(scope="session")
def tiny_lm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def tiny_values(tiny_lm_dir: Path, text_dir: Path) -> dict[str, Any]:
    """A config, as plain values, without a run directory."""
    return merge(TINY, {"corpus": {"source": str(text_dir)}, "lm": {"model": str(tiny_lm_dir)}})


WriteConfig = Callable[..., Path]


@pytest.fixture
def write_config(tiny_values: dict[str, Any], tmp_path: Path) -> WriteConfig:
    """Write a tiny config with changes; its run directory is tmp_path/run unless told otherwise."""

    def write(**changes: Any) -> Path:
        values = merge({"run": str(tmp_path / "run"), **tiny_values}, changes)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def quick_codes() -> Iterator[None]:
    """Codes learned in one round from few rows: enough for tests that compare a run with itself, and seconds faster."""
    from gnnlm.datastore import quantize
    from gnnlm.predict import cache_build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "OPQ_ROUNDS", 1)
        patch.setattr(cache_build, "TRAIN_ROWS", 600)
        yield


@pytest.fixture(scope="session")
def tiny_run(tiny_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run, shared by the tests that only read it."""
    from gnnlm.config import parse_config
    from gnnlm.run import Run

    run = Run(parse_config({"run": str(tmp_path_factory.mktemp("runs") / "tiny"), **tiny_values}))
    run.build_all()
    return run


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What the library has logged since this was last called, as the command line prints it."""
    caplog.set_level("INFO", "gnnlm")

    def since() -> str:
        lines = [line_of(record) for record in caplog.records]
        caplog.clear()
        return "\n".join(lines)

    return since
