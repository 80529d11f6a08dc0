"""head(state) is the model's own log-softmax, for the families that do something special at the end."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gnnlm.config import LMConfig
from gnnlm.errors import ModelError
from gnnlm.lm import hf_model as hf
from gnnlm.lm.adaptive_softmax import load_head
from gnnlm.lm.head import SoftmaxHead
from gnnlm.lm.hf_model import HFModel
from gnnlm.lm.load_lm import load_lm
from gnnlm.lm.model_files import model_fingerprint, resolve_model
from tests.conftest import make_tokenizer, save_tiny_lm

SMALL: dict[str, Any] = {"vocab_size": 300, "max_position_embeddings": 64}
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "opt": lambda: transformers.OPTConfig(
        **SMALL, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=1.5,
    ),
    "phi": lambda: transformers.PhiConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ),
    "cohere": lambda: transformers.CohereConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, logit_scale=0.25
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, logits_scaling=4.0
    ),
}  # fmt: skip


def random_model(family: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_state_is_the_models_log_softmax(family: str) -> None:
    model = random_model(family)
    lm = HFModel(model, make_tokenizer())
    tokens = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        want = model(tokens).logits.log_softmax(-1)
    states = lm.encode(tokens)
    torch.testing.assert_close(lm.head.log_probs(states), want, rtol=1e-4, atol=1e-5)
    targets = torch.randint(0, 256, (18,))
    got = lm.head.target_log_probs(states.flatten(0, 1), targets)
    torch.testing.assert_close(got, want.flatten(0, 1).gather(1, targets[:, None])[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_and_keys(family: str) -> None:
    """Token by token gives the states of one pass; the last feed-forward's input is found in every family."""
    lm = HFModel(random_model(family), make_tokenizer())
    tokens = torch.randint(0, 256, (2, 7))
    states, keys = lm.encode_keys(tokens)
    torch.testing.assert_close(states, lm.encode(tokens))
    assert keys.shape[:2] == (2, 7)
    assert not torch.allclose(keys[:, 1:], keys[:, :-1])
    parts, past = [], None
    for part in tokens.split([3, 1, 3], dim=1):
        out = lm.stream(part, past, keys=True)
        parts.append((out.states, out.keys))
        past = out.past
    for got, want in zip(zip(*parts, strict=True), (states, keys), strict=True):
        torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-3, atol=1e-4)


def test_keys_of_two_threads_do_not_mix() -> None:
    lm = HFModel(random_model("llama"), make_tokenizer())
    texts = [torch.randint(0, 256, (2, 7)), torch.randint(0, 256, (2, 7))]
    want = [lm.encode_keys(text)[1] for text in texts]

    def read(number: int) -> bool:
        return all(torch.equal(lm.encode_keys(texts[number])[1], want[number]) for _ in range(100))

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(read, range(2))) == [True, True]
    finally:
        sys.setswitchinterval(switching)


def test_keys_of_an_unknown_feed_forward_layer() -> None:
    model = random_model("llama")
    lm = HFModel(model, make_tokenizer())
    for layer in model.model.layers:
        layer.strange = layer.mlp
        del layer.mlp
        layer.forward = lambda states, *_, **__: states
    other = HFModel(model, make_tokenizer())
    assert other.encode(torch.arange(5)[None]).shape == (1, 5, 32)
    with pytest.raises(ModelError, match=r"none of the names mlp, .*; use store\.key: state"):
        other.encode_keys(torch.arange(5)[None])
    assert copy.deepcopy(lm.model) is not lm.model  # LoRA copies models, hooks and all


def test_a_model_with_unknown_logits_is_refused() -> None:
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.pow(3)
            return out

    torch.manual_seed(0)
    model = Odd(FAMILIES["llama"]())
    nn.init.normal_(model.lm_head.weight)
    with pytest.raises(ModelError, match="changes its logits in a way not known here"):
        HFModel(model, make_tokenizer())


@pytest.mark.parametrize(("scale", "cap", "bias"), [(1.0, None, False), (0.5, 2.0, True)])
def test_chunked_gradient(scale: float, cap: float | None, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnlm.lm.head.CHUNK_LOGITS", 14)
    head = SoftmaxHead(torch.randn(7, 4), torch.randn(7) if bias else None, scale, cap).double()
    states = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])
    want = head.log_probs(states).gather(1, targets[:, None])[:, 0]
    got = head.target_log_probs(states, targets)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.randn(5, dtype=torch.float64)
    (a,) = torch.autograd.grad((got * weights).sum(), states)
    (b,) = torch.autograd.grad((want * weights).sum(), states)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_head_survives_saving(tmp_path: Path) -> None:
    head = SoftmaxHead(torch.randn(7, 4), torch.randn(7), 0.5, 30.0)
    head.save(tmp_path / "h.safetensors")
    again = load_head(tmp_path / "h.safetensors")
    states = torch.randn(3, 4)
    torch.testing.assert_close(again.log_probs(states), head.log_probs(states))
    assert (again.scale, again.soft_cap) == (0.5, 30.0)


def test_start_token() -> None:
    tokenizer = make_tokenizer()
    assert hf._start_token(tokenizer, "auto", 300) == tokenizer.bos_token_id
    assert hf._start_token(tokenizer, "</s>", 300) == tokenizer.eos_token_id
    with pytest.raises(ModelError, match="'nope' is not a token"):
        hf._start_token(tokenizer, "nope", 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    assert hf._start_token(tokenizer, "auto", 300) == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_tokenize_gives_offsets(tiny_lm_dir: Path) -> None:
    lm = load_lm(LMConfig(model=str(tiny_lm_dir), window=32, context=8))
    ids, offsets = lm.tokenize("a é.")
    assert len(ids) == len(offsets) == 5  # é is two bytes
    assert offsets == [0, 1, 2, 2, 3]
    assert lm.piece(ids[0]) == "a"


def test_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="could not be downloaded from the hub"):
        resolve_model("no-such-org/no-such-model")
    with pytest.raises(ModelError, match="expected a model directory"):
        resolve_model(str(tmp_path / "missing"))
    with pytest.raises(ModelError, match=r"expected config\.json"):
        resolve_model(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs its wheel"):
        resolve_model("smollm2")


def test_damaged_model_is_one_line(tiny_lm_dir: Path, tmp_path: Path) -> None:
    import shutil

    broken = shutil.copytree(tiny_lm_dir, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        load_lm(LMConfig(model=str(broken), window=32, context=8))


def test_window_longer_than_the_model(tiny_lm_dir: Path) -> None:
    with pytest.raises(ModelError, match="reads at most 256"):
        load_lm(LMConfig(model=str(tiny_lm_dir)))


def test_fingerprint_tells_models_apart(tiny_lm_dir: Path, tmp_path: Path) -> None:
    other = save_tiny_lm(tmp_path / "other", seed=1)
    assert model_fingerprint(str(tiny_lm_dir)) == model_fingerprint(str(tiny_lm_dir))
    assert model_fingerprint(str(tiny_lm_dir)) != model_fingerprint(str(other))
