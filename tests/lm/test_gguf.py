"""GGUF files: transformers does not report all that it leaves out of them, so it is checked here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gnnlm.config import LMConfig
from gnnlm.errors import ModelError
from gnnlm.lm.hf_loading import save_hf
from gnnlm.lm.hf_model import HFModel
from gnnlm.lm.load_lm import load_lm
from gnnlm.lm.model_files import resolve_model
from tests.conftest import make_tokenizer, save_tiny_lm

gguf = pytest.importorskip("gguf")
Change = Callable[[dict[str, Any]], None]


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixture() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=256, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=768, norm_topk_prob=True, initializer_range=0.3, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def tensors_of(model: Any) -> dict[str, Any]:
    """A model's tensors by their names in a GGUF file, as llama.cpp converts them."""
    config, made = model.config, {}
    kind = gguf.MODEL_ARCH.LLAMA if config.model_type == "llama" else gguf.MODEL_ARCH.QWEN3MOE
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):  # rotary pairs are neighbours
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if "experts.gate_up_proj" in name:
            block = f"blk.{name.split('.')[2]}"
            made[f"{block}.ffn_gate_exps.weight"], made[f"{block}.ffn_up_exps.weight"] = np.split(value, 2, axis=1)
        else:
            made[f"{names.get_name(name.removesuffix('.weight'))}.weight"] = value
    return made


def write_gguf(path: Path, model: Any, change: Change = lambda tensors: None, blocks: int | None = None) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama" if config.model_type == "llama" else "qwen3moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(blocks or config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if config.model_type != "llama":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    words = sorted(make_tokenizer().get_vocab().items(), key=lambda item: item[1])
    tokens = [word for word, _ in words]
    tokens[1] = "th"  # a file without merges is not read: one character gives way to a pair
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if word in ("<s>", "</s>") else 1 for word in tokens])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    tensors = tensors_of(model)
    change(tensors)
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> HFModel:
    lm = load_lm(LMConfig(model=str(path), window=32, context=8))
    assert isinstance(lm, HFModel)
    return lm


@pytest.mark.parametrize("make", [llama, mixture])
def test_a_whole_file_gives_the_models_probabilities(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make().eval()
    lm = load(write_gguf(tmp_path / "m.gguf", model))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        want = model(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(lm.log_probs(lm.encode(tokens)), want, rtol=1e-4, atol=1e-4)
    ids, offsets = lm.tokenize("the é.")
    assert [lm.piece(token) for token in ids] == ["th", "e", " ", "<0xC3>", "<0xA9>", "."]
    assert offsets == [0, 2, 3, 4, 4, 5]
    assert lm.start_token < lm.vocab_size  # the tokenizer adds <|endoftext|>, which the model does not have


def put(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors.get(name))})


@pytest.mark.parametrize(
    ("change", "blocks", "message"),
    [
        (lambda tensors: tensors.pop("blk.0.ffn_up.weight"), 2, r"missing \(1\): model\.layers\.0\.mlp\.up_proj"),
        (lambda tensors: tensors.pop("token_embd.weight"), 2, r"missing \(2\): lm_head\.weight, model\.embed_tokens"),
        (lambda tensors: None, 3, r"missing \(9\): model\.layers\.2\.input_layernorm\.weight, .*, \.\.\."),
        (lambda tensors: None, 1, r"not in the model \(9\): blk\.1\.attn_k\.weight, "),
        (put("rope_freqs.weight", lambda _: np.ones(4, np.float32)), 2, r"not in the model \(1\): rope_freqs\.weight"),
        (put("blk.0.ffn_up.weight", lambda t: t[:-1]), 2, r"up_proj\.weight \[63, 32\] instead of \[64, 32\]"),
        (put("blk.0.attn_norm.weight", lambda t: t[:1]), 2, r"input_layernorm\.weight \[1\] instead of \[32\]"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(change: Change, blocks: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "m.gguf", llama(), change, blocks))


@pytest.mark.parametrize("half", ["gate", "up"])
def test_half_of_a_stack_of_experts_is_not_made_up(half: str, tmp_path: Path) -> None:
    """transformers fills the other half with zeros."""
    name = f"blk.0.ffn_{half}_exps.weight"
    with pytest.raises(ModelError, match=rf"missing \(1\): blk\.0\.ffn_{half}_exps\.weight"):
        load(write_gguf(tmp_path / "m.gguf", mixture(), lambda tensors: tensors.pop(name)))


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", llama()).read_bytes()
    for name, data in (("cut", whole[: len(whole) // 2]), ("junk", b"junk" * 99), ("empty", b"")):
        (tmp_path / f"{name}.gguf").write_bytes(data)
        with pytest.raises(ModelError, match="the file cannot be read") as caught:
            load(tmp_path / f"{name}.gguf")
        assert "\n" not in str(caught.value)


def test_what_lies_beside_a_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another model's tokenizer or adapter; and not a file of the same name in the working directory."""
    model = llama()
    path = write_gguf(tmp_path / "m.gguf", model)
    want = load(path).encode(torch.arange(9)[None])
    save_tiny_lm(tmp_path / "other", seed=1)
    for file in (tmp_path / "other").iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "cwd").mkdir()
    torch.manual_seed(1)
    write_gguf(tmp_path / "cwd" / "m.gguf", transformers.LlamaForCausalLM(model.config))
    monkeypatch.chdir(tmp_path / "cwd")
    lm = load(path)
    assert torch.equal(lm.encode(torch.arange(9)[None]), want)
    assert lm.tokenize("a") == ([64], [0])


def test_saving_leaves_no_trace_of_the_machine(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama())
    for name in ("a", "b"):
        lm = load(path)
        save_hf(lm.model, lm.tokenizer, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        assert str(tmp_path).encode() not in file.read_bytes()
    torch.testing.assert_close(load(tmp_path / "a").encode(torch.arange(9)[None]), lm.encode(torch.arange(9)[None]))


def test_a_directory_of_several_files_is_ambiguous(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ModelError, match=r"found 2 \.gguf files; name one"):
        resolve_model(str(tmp_path))
    (tmp_path / "b.gguf").unlink()
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
