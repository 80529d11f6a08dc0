"""Reading on gives the states of encoding, for every kind of model, however the texts are cut, cropped and mixed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnlm.config import LMConfig
from gnnlm.datastore.encode import encode_tokens
from gnnlm.lm.adaptive import AdaptiveTransformer
from gnnlm.lm.hf import HFModel
from gnnlm.lm.hf_stream import Way
from gnnlm.lm.native import NativeLM
from gnnlm.lm.protocol import BaseLM
from gnnlm.lm.reader import LMPast, Read, Reader
from gnnlm.lm.transformer_xl import TransformerXL
from tests.conftest import make_tokenizer
from tests.lm.test_adaptive import SMALL as SMALL_ADAPTIVE
from tests.lm.test_transformer_xl import SMALL as SMALL_XL

VOCAB = 40
SIZE: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION: dict[str, Any] = {
    **SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MAMBA = {"mamba_d_state": 8, "use_mamba_kernels": False}
FAMILIES: dict[str, tuple[Way, Callable[[], Any]]] = {
    "llama": (Way.RAGGED, lambda: transformers.LlamaConfig(**ATTENTION)),
    "gpt2": (
        Way.RAGGED,
        lambda: transformers.GPT2Config(vocab_size=300, n_positions=48, n_embd=32, n_layer=2, n_head=4),
    ),
    "opt": (
        Way.RAGGED,
        lambda: transformers.OPTConfig(
            **SIZE, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=48
        ),
    ),
    "mistral": (Way.RAGGED, lambda: transformers.MistralConfig(**ATTENTION, sliding_window=6)),
    "gemma2": (Way.RAGGED, lambda: transformers.Gemma2Config(**ATTENTION, head_dim=8, sliding_window=5)),
    "gpt-neo": (
        Way.RAGGED,
        lambda: transformers.GPTNeoConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, window_size=5,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=48, bos_token_id=0, eos_token_id=0,
        ),
    ),
    "bloom": (Way.EVEN, lambda: transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)),
    "mpt": (
        Way.EVEN,
        lambda: transformers.MptConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    ),
    "mamba2": (
        Way.CHUNKS,
        lambda: transformers.Mamba2Config(**SIZE, state_size=8, head_dim=8, num_heads=8, n_groups=2, chunk_size=8),
    ),
    "mamba": (Way.STEPS, lambda: transformers.MambaConfig(**SIZE, state_size=8)),
    "jamba": (
        Way.STEPS,
        lambda: transformers.JambaConfig(
            **{**ATTENTION, **MAMBA}, attn_layer_period=2, attn_layer_offset=1, num_experts=2
        ),
    ),
    "recurrent-gemma": (
        Way.NONE,
        lambda: transformers.RecurrentGemmaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            lru_width=32, attention_window_size=8, logits_soft_cap=1e4,
        ),
    ),
}  # fmt: skip
NATIVE: dict[str, Callable[[], Any]] = {
    "adaptive": lambda: AdaptiveTransformer(SMALL_ADAPTIVE),
    "transformer-xl": lambda: TransformerXL(dataclasses.replace(SMALL_XL, vocab_size=VOCAB, memory=6)),
    "same-length": lambda: TransformerXL(dataclasses.replace(SMALL_XL, vocab_size=VOCAB, same_length=True)),
}
MODELS = [*FAMILIES, *NATIVE]


@functools.cache
def make_lm(name: str, dtype: str = "fp32") -> Any:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = NATIVE[name]() if name in NATIVE else transformers.AutoModelForCausalLM.from_config(FAMILIES[name][1]())
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return NativeLM(model, dtype=dtype) if name in NATIVE else HFModel(model, make_tokenizer(), dtype=dtype)


def encoded(lm: BaseLM, text: Sequence[int], window: int, context: int, key: str = "state") -> torch.Tensor:
    made = encode_tokens(lm, np.array(text, dtype=np.int64), LMConfig(window=window, context=context), key)
    return torch.from_numpy(made.states if key == "state" else made.keys)


def check(
    lm: BaseLM, read: Read, texts: Sequence[Sequence[int]], firsts: Sequence[int], shape: tuple[int, int]
) -> None:
    counts = [len(text) + 1 - first for text, first in zip(texts, firsts, strict=True)]
    assert read.states_BTD.shape == (len(texts), max(counts), lm.width)
    assert read.states_BTD.dtype == torch.float32
    assert read.real_BT.sum(1).tolist() == counts
    assert not read.states_BTD[~read.real_BT].any()
    for row, (text, first) in enumerate(zip(texts, firsts, strict=True)):
        want = encoded(lm, text, *shape)[first:]
        torch.testing.assert_close(read.states_BTD[row, : counts[row]], want, rtol=1e-5, atol=1e-5)


def some_tokens(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(VOCAB, size=count).tolist()
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token(name: str) -> None:
    lm, text = make_lm(name), some_tokens(60)
    reader = Reader(lm, window=24, context=7)
    read, past = reader.read([[]])
    states = [read.states_BTD[0]]
    for token in text:
        read, past = reader.read([[token]], past)
        states.append(read.states_BTD[0])
    assert past.lengths == (60,)
    torch.testing.assert_close(torch.cat(states), encoded(lm, text, 24, 7), rtol=1e-5, atol=1e-5)


@given(data=st.data())
@settings(max_examples=15)
@pytest.mark.parametrize("name", MODELS)
def test_any_reading_is_encoding(name: str, data: st.DataObject) -> None:
    """Batches, cuts, crops over window starts, reorders, repeats, and several continuations of one past."""
    lm = make_lm(name)
    shape = data.draw(st.sampled_from([(16, 0), (16, 4), (20, 19), (32, 5), (48, 16)]), "window and context")
    reader = Reader(lm, *shape)
    pieces = st.lists(st.integers(0, VOCAB - 1), max_size=data.draw(st.sampled_from([2, 12, 60]), "longest piece"))
    texts = [list(text) for text in data.draw(st.lists(pieces, min_size=1, max_size=4), "texts")]
    read, past = reader.read(texts)
    check(lm, read, texts, [0] * len(texts), shape)
    known: list[tuple[list[list[int]], LMPast]] = [(texts, past)]
    for _ in range(data.draw(st.integers(1, 6), "operations")):
        texts, past = known[data.draw(st.integers(0, len(known) - 1), "past")]
        what = data.draw(st.sampled_from(["read", "read", "step", "crop", "select"]), "operation")
        if what in ("read", "step"):
            new = [[row % VOCAB] if what == "step" else list(data.draw(pieces)) for row in range(len(texts))]
            whole = [text + part for text, part in zip(texts, new, strict=True)]
            read, past = reader.read(new, past)
            check(lm, read, whole, [len(text) + 1 for text in texts], shape)
            texts = whole
        elif what == "crop":
            counts = [data.draw(st.integers(0, len(text)), "cropped") for text in texts]
            past, texts = past.crop(counts), [text[: len(text) - n] for text, n in zip(texts, counts, strict=True)]
        else:
            rows = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=4), "rows")
            past, texts = past.select(rows), [texts[row] for row in rows]
        assert past.lengths == tuple(len(text) for text in texts)
        assert len(past) == len(texts)
        known.append((texts, past))
    for texts, past in known:  # what was read from a past has not changed it
        read, _ = reader.read([[7]] * len(texts), past)
        check(lm, read, [[*text, 7] for text in texts], [len(text) + 1 for text in texts], shape)
