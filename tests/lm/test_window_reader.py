"""Reading on gives the states of encoding, for every kind of model, however the texts are cut, cropped and mixed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnlm.config import LMConfig
from gnnlm.datastore.encode import encode_tokens
from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.adaptive_transformer import AdaptiveTransformer
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.hf_model import HFModel
from gnnlm.lm.hf_stream import StreamMode
from gnnlm.lm.kv_cache import BLOCK, KeyValues
from gnnlm.lm.native_lm import NativeLM
from gnnlm.lm.transformer_xl import TransformerXL
from gnnlm.lm.window_reader import LMPast, ReadStates, WindowReader
from tests.conftest import make_tokenizer
from tests.lm.test_adaptive_transformer import SMALL as SMALL_ADAPTIVE
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
FAMILIES: dict[str, tuple[StreamMode, Callable[[], Any]]] = {
    "llama": (StreamMode.RAGGED, lambda: transformers.LlamaConfig(**ATTENTION)),
    "gpt2": (
        StreamMode.RAGGED,
        lambda: transformers.GPT2Config(vocab_size=300, n_positions=48, n_embd=32, n_layer=2, n_head=4),
    ),
    "opt": (
        StreamMode.RAGGED,
        lambda: transformers.OPTConfig(
            **SIZE, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=48
        ),
    ),
    "mistral": (StreamMode.RAGGED, lambda: transformers.MistralConfig(**ATTENTION, sliding_window=6)),
    "gemma2": (StreamMode.RAGGED, lambda: transformers.Gemma2Config(**ATTENTION, head_dim=8, sliding_window=5)),
    "gpt-neo": (
        StreamMode.RAGGED,
        lambda: transformers.GPTNeoConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, window_size=5,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=48, bos_token_id=0, eos_token_id=0,
        ),
    ),
    "bloom": (StreamMode.EVEN, lambda: transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)),
    "mpt": (
        StreamMode.EVEN,
        lambda: transformers.MptConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    ),
    "mamba2": (
        StreamMode.CHUNKS,
        lambda: transformers.Mamba2Config(**SIZE, state_size=8, head_dim=8, num_heads=8, n_groups=2, chunk_size=8),
    ),
    "mamba": (StreamMode.STEPS, lambda: transformers.MambaConfig(**SIZE, state_size=8)),
    "jamba": (
        StreamMode.STEPS,
        lambda: transformers.JambaConfig(
            **{**ATTENTION, **MAMBA}, attn_layer_period=2, attn_layer_offset=1, num_experts=2
        ),
    ),
    "recurrent-gemma": (
        StreamMode.NONE,
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
    from_config = transformers.AutoModelForCausalLM.from_config
    model = NATIVE[name]() if name in NATIVE else from_config(FAMILIES[name][1]())
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return NativeLM(model, dtype=dtype) if name in NATIVE else HFModel(model, make_tokenizer(), dtype=dtype)


def encoded(lm: BaseLM, text: Sequence[int], window: int, context: int, key: str = "state") -> torch.Tensor:
    made = encode_tokens(lm, np.array(text, dtype=np.int64), LMConfig(window=window, context=context), key)
    wanted = made.states if key == "state" else made.keys
    assert wanted is not None
    return torch.from_numpy(wanted)


def check(
    lm: BaseLM, read: ReadStates, texts: Sequence[Sequence[int]], firsts: Sequence[int], shape: tuple[int, int]
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


class Calls:
    """Counts what a Hugging Face model is asked to do."""

    def __init__(self, lm: HFModel) -> None:
        self.made: list[dict[str, Any]] = []
        self._hook = lm.model.base_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, args: Any, named: dict[str, Any]) -> None:
        self.made.append(named)

    def __enter__(self) -> list[dict[str, Any]]:
        return self.made

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_way_a_family_reads_on_is_found_out(name: str) -> None:
    lm = make_lm(name)
    assert lm._stream.mode is FAMILIES[name][0]
    assert lm.ragged == (lm._stream.mode is StreamMode.RAGGED)


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token(name: str) -> None:
    lm, text = make_lm(name), some_tokens(60)
    reader = WindowReader(lm, window=24, context=7)
    read, past = reader.read([[]])
    states = [read.states_BTD[0]]
    for token in text:
        read, past = reader.read([[token]], past)
        states.append(read.states_BTD[0])
    assert past.lengths == (60,)
    torch.testing.assert_close(torch.cat(states), encoded(lm, text, 24, 7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_crop(name: str) -> None:
    """Also over the beginnings of windows and of segments."""
    lm, text = make_lm(name), some_tokens(33)
    reader = WindowReader(lm, window=16, context=5)
    _, past = reader.read([[]])
    for token in text:
        _, past = reader.read([[token]], past)
    for count in range(len(text) + 1):
        left = text[: len(text) - count]
        read, cropped = reader.read([[1]], past.crop(count))
        check(lm, read, [[*left, 1]], [len(left) + 1], (16, 5))
        assert cropped.lengths == (len(left) + 1,)


@pytest.mark.parametrize("name", MODELS)
def test_texts_join(name: str) -> None:
    """Texts that were read apart, to different lengths, are read on together; for every model, also a recurrent one."""
    lm, counts = make_lm(name), (3, 0, 20, 11)
    reader = WindowReader(lm, window=16, context=5)
    texts = [some_tokens(count + 9, seed) for seed, count in enumerate(counts)]
    first, *others = [reader.read([text[:count]])[1] for text, count in zip(texts, counts, strict=True)]
    past = first.join([others[0].join(others[1:])])
    assert past.lengths == counts
    for _ in range(3):
        before = past.lengths
        parts = [text[length : length + 3] for text, length in zip(texts, before, strict=True)]
        read, past = reader.read(parts, past)
        whole = [text[: length + 3] for text, length in zip(texts, before, strict=True)]
        check(lm, read, whole, [length + 1 for length in before], (16, 5))


@given(data=st.data())
@settings(max_examples=15)
@pytest.mark.parametrize("name", MODELS)
def test_any_reading_is_encoding(name: str, data: st.DataObject) -> None:
    """Batches, cuts, crops over window starts, reorders, repeats, and several continuations of one past."""
    lm = make_lm(name)
    shape = data.draw(st.sampled_from([(16, 0), (16, 4), (20, 19), (32, 5), (48, 16)]), "window and context")
    reader = WindowReader(lm, *shape)
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


@pytest.mark.parametrize("name", MODELS)
def test_keys(name: str) -> None:
    """What the last feed-forward reads, beside the states; a model without one says so."""
    lm, texts = make_lm(name), [some_tokens(50), some_tokens(9, seed=1)]
    reader = WindowReader(lm, 24, 7, key="ffn_input")
    if name in ("mamba", "mamba2", "recurrent-gemma"):
        with pytest.raises(ModelError, match="last feed-forward layer has none of the names"):
            reader.read(texts)
        return
    parts: list[list[torch.Tensor]] = [[], []]
    past = None
    for begin in range(0, 50, 5):
        read, past = reader.read([text[begin : begin + 5] for text in texts], past)
        assert read.keys_BTD is not None
        for row, part in enumerate(parts):
            part.append(read.keys_BTD[row, read.real_BT[row]])
    for text, part in zip(texts, parts, strict=True):
        torch.testing.assert_close(torch.cat(part), encoded(lm, text, 24, 7, "ffn_input"), rtol=1e-5, atol=1e-5)
    read, _ = reader.read([[], []], past)
    assert read.keys_BTD is not None
    assert read.keys_BTD.shape == (2, 0, parts[0][0].shape[-1])
    assert WindowReader(lm, 24, 7).read([[1]])[0].keys_BTD is None


def test_texts_of_different_length_are_one_forward_pass() -> None:
    lm = make_lm("llama")
    reader = WindowReader(lm, 48, 16)
    _, past = reader.read([some_tokens(n) for n in (3, 40, 17, 0, 22, 9, 30, 11)])
    with Calls(lm) as calls:
        _, past = reader.read([[1]] * 8, past)
        _, past = reader.read([[1] * n for n in (1, 2, 3, 4, 4, 3, 2, 1)], past.crop([0, 3, 2, 1, 0, 1, 2, 3]))
        assert len(calls) == 2
        _, past = reader.read([[1]] * 7 + [[]], past)  # who reads nothing waits apart
        _, past = reader.read([[1]] * 7 + [[]], past)
        assert [len(call["input_ids"]) for call in calls[2:]] == [7, 7]


def test_a_window_that_begins_anew_is_read_apart_and_joins_the_others() -> None:
    lm = make_lm("llama")
    reader = WindowReader(lm, 48, 16)
    texts = [some_tokens(47), some_tokens(20, seed=1)]
    _, past = reader.read(texts)
    with Calls(lm) as calls:
        _, past = reader.read([[1], [2]], past)
        assert [tuple(call["input_ids"].shape) for call in calls] == [(1, 1), (1, 17)]
        read, past = reader.read([[3], [4]], past)
        assert tuple(calls[2]["input_ids"].shape) == (2, 1)
    check(lm, read, [[*texts[0], 1, 3], [*texts[1], 2, 4]], [49, 22], (48, 16))


def test_nothing_is_masked_copied_or_placed_without_need() -> None:
    lm = make_lm("llama")
    reader = WindowReader(lm, 48, 16)
    _, past = reader.read([some_tokens(10), some_tokens(10, seed=1)])
    _, past = reader.read([[1], [2]], past)
    with Calls(lm) as calls:
        for _ in range(5):
            before, past = past, reader.read([[1], [2]], past)[1]
            assert keys_of(past).data_ptr() == keys_of(before).data_ptr()
        assert keys_of(past.select([0, 1])) is keys_of(past)
        assert keys_of(past.crop(3)).data_ptr() == keys_of(past).data_ptr()
        assert not any({"attention_mask", "position_ids"} & call.keys() for call in calls)


def keys_of(past: LMPast) -> torch.Tensor:
    """The keys of the first layer, with the room behind them."""
    (group,) = past.groups
    assert isinstance(group.past, KeyValues)
    return group.past.layers[0][0]


def test_two_threads_read_on_from_one_past() -> None:
    """Only one of them may write behind it."""
    lm = make_lm("llama")
    reader = WindowReader(lm, 48, 16)
    text = some_tokens(10)
    _, past = reader.read([[*text, 1]], reader.read([[]])[1])
    _, past = reader.read([[2]], past)  # now there is room behind
    with ThreadPoolExecutor(4) as pool:
        pasts = list(pool.map(lambda token: reader.read([[token]], past)[1], range(16)))
    for token, own in enumerate(pasts):
        read, _ = reader.read([[3]], own)
        check(lm, read, [[*text, 1, 2, token, 3]], [14], (48, 16))


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "adaptive"])
def test_memory_is_bounded_by_the_window(name: str) -> None:
    lm, window = make_lm(name), 24
    reader = WindowReader(lm, window, 7)
    rng = np.random.default_rng(0)
    _, past = reader.read([[]] * 4)
    most = 0
    for _ in range(120):
        counts = rng.integers(0, 20 if rng.random() < 0.2 else 3, size=4)
        _, past = reader.read([some_tokens(count) for count in counts], past)
        past = past.crop([int(rng.integers(0, min(3, length) + 1)) for length in past.lengths])
        held = [group.past for group in past.groups]
        most = max(keys.shape[-2] for past in held if isinstance(past, KeyValues) for keys, _ in past.layers)
        assert most <= window + BLOCK
        assert sum(len(group.rows) for group in past.groups) <= 4
    assert min(past.lengths) > 3 * window


@pytest.mark.parametrize("name", ["llama", "mistral", "adaptive", "transformer-xl"])
def test_bfloat16_arithmetic(name: str) -> None:
    lm, text = make_lm(name, "bf16"), some_tokens(40)
    reader = WindowReader(lm, 24, 7)
    (first, past), want = reader.read([text[:5], text]), encoded(lm, text, 24, 7)
    read, _ = reader.read([text[5:], []], past)
    assert read.states_BTD.dtype == torch.float32
    got = torch.cat([first.states_BTD[0, :6], read.states_BTD[0]])
    assert (got - want).norm() < 0.03 * want.norm()
    assert not torch.equal(want, encoded(make_lm(name), text, 24, 7))


def test_a_text_may_be_as_long_as_it_likes() -> None:
    """Many windows at once, and an absolute position for every slot."""
    lm, texts = make_lm("gpt2"), [some_tokens(400), some_tokens(130, seed=1)]
    reader = WindowReader(lm, 48, 16)
    read, past = reader.read(texts)
    check(lm, read, texts, [0, 0], (48, 16))
    read, _ = reader.read([[1], [2] * 40], past.crop([3, 0]))
    check(lm, read, [[*texts[0][:-3], 1], texts[1] + [2] * 40], [398, 131], (48, 16))


def test_no_texts() -> None:
    read, past = WindowReader(make_lm("llama"), 24, 7).read([])
    assert read.states_BTD.shape == (0, 0, 32)
    assert len(past) == 0
    _, past = WindowReader(make_lm("llama"), 24, 7).read([[1], [2]])
    assert past.select([]).lengths == ()


def test_what_makes_no_sense_is_refused() -> None:
    lm = make_lm("llama")
    with pytest.raises(ConfigError, match="expected a context from 0 to 15"):
        WindowReader(lm, 16, 16)
    with pytest.raises(ConfigError, match="expected a key among state, ffn_input; got value"):
        WindowReader(lm, 16, 4, key="value")
    reader = WindowReader(lm, 16, 4)
    _, past = reader.read([[1, 2], [3]])
    for wrong in (2, [0], [0, 2], [-1, 0]):
        with pytest.raises(ConfigError, match="expected a number of tokens to drop for each of 2 texts"):
            past.crop(wrong)
    with pytest.raises(ConfigError, match=r"expected numbers of texts from 0 to 1, got \[0, 2\]"):
        past.select([0, 2])
    with pytest.raises(ConfigError, match="expected tokens for each of the 2 texts of the past, got 1"):
        reader.read([[1]], past)
