"""Model directories that are damaged, incomplete or would run code: refused, in one line that says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gnnlm.config import LMConfig
from gnnlm.errors import ModelError
from gnnlm.lm.adaptive_transformer import AdaptiveOptions
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.load_lm import load_lm
from gnnlm.lm.model_files import resolve_model
from gnnlm.lm.native_lm import NativeLM, make_model
from tests.cli import Process, error_line, finished
from tests.conftest import WriteConfig, make_tokenizer, save_tiny_lm

ADVICE = ("`", "report", "trust_remote_code", "weights_only", "from_pretrained(pre", "https://", "Traceback")


def load(folder: Path) -> BaseLM:
    return load_lm(LMConfig(model=str(folder), window=32, context=8))


def refusal(folder: Path) -> str:
    """The one line that refuses a model."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert not any(words in message for words in ADVICE), message
    return message.removeprefix(f"lm.model {folder}: ")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama and a GPT-2, tied and not, in one file and in shards."""
    root = tmp_path_factory.mktemp("models")
    llama = save_tiny_lm(root / "llama")
    made = {"llama": llama, "gpt2": root / "gpt2", "untied": root / "untied", "shards": root / "shards"}
    torch.manual_seed(0)
    small = {"vocab_size": 258, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**small)).save_pretrained(made["gpt2"])
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, tie_word_embeddings=False)).save_pretrained(
        made["untied"]
    )
    transformers.LlamaForCausalLM.from_pretrained(llama).save_pretrained(made["shards"], max_shard_size="20KB")
    for name in ("gpt2", "untied", "shards"):
        make_tokenizer().save_pretrained(made[name])
    return made


@pytest.fixture
def copied(whole: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(whole[name], tmp_path / name)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# -- weights that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "untied", "shards"])
def test_whole_models_load_and_two_loads_agree(name: str, whole: dict[str, Path]) -> None:
    tokens = torch.arange(12)[None]
    one, two = load(whole[name]), load(whole[name])
    assert torch.equal(one.log_probs(one.encode(tokens)), two.log_probs(two.encode(tokens)))


NORM = {"llama": "model.layers.1.input_layernorm.weight", "gpt2": "transformer.h.1.ln_1.weight"}
WORDS = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_that_do_not_fit_are_named(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    tensors = load_file(folder / "model.safetensors")
    layers = "num_hidden_layers" if name == "llama" else "n_layer"

    def damaged(change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        change_tensors(folder, change)
        return refusal(folder)

    assert f"missing (1): {NORM[name]}; get" in damaged(lambda t: t.pop(NORM[name]))
    assert f"missing (2): lm_head.weight, {WORDS[name]}; get" in damaged(lambda t: t.pop(WORDS[name]))
    renamed = damaged(lambda t: t.update({f"x.{key}": t.pop(key) for key in list(t)}))
    assert f"missing ({len(tensors) + 1}): " in renamed  # the tied lm_head too
    assert "not in the model (" in renamed
    assert ", ...;" in renamed
    extra = damaged(lambda t: t.update({"value_head.weight": torch.zeros(3)}))
    assert "not in the model (1): value_head.weight; get" in extra
    shape = damaged(lambda t: t.update({NORM[name]: torch.zeros(5)}))
    assert f"wrong shape (1): {NORM[name]} [5] instead of [32]; get" in shape
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, **{layers: 3})
    assert "missing (" in refusal(folder)
    change_config(folder, **{layers: 1})
    assert "not in the model (" in refusal(folder)


def test_a_head_that_is_not_tied_must_be_there(copied: Callable[[str], Path]) -> None:
    folder = copied("untied")
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing (1): lm_head.weight; get" in refusal(folder)


def test_old_buffers_are_no_weights(copied: Callable[[str], Path]) -> None:
    """Checkpoints of old versions hold masks and rotary frequencies, which are computed today."""
    folder = copied("llama")
    want = load(folder).encode(torch.arange(9)[None])
    change_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    assert torch.equal(load(folder).encode(torch.arange(9)[None]), want)


def test_shards(copied: Callable[[str], Path]) -> None:
    folder = copied("shards")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    second = sorted(set(listed["weight_map"].values()))[1]
    data = (folder / second).read_bytes()
    (folder / second).unlink()
    assert refusal(folder) == f"{second} is missing, which {index.name} lists; get the file"
    (folder / second).write_bytes(data[:-9])
    assert refusal(folder).startswith(f"{second} is damaged or cut short")
    (folder / second).write_bytes(data)
    left = {name: file for name, file in listed["weight_map"].items() if file != second}
    index.write_text(json.dumps({**listed, "weight_map": left}))
    assert f"missing ({len(listed['weight_map']) - len(left)}): model.layers.0." in refusal(folder)
    for text, why in (("{", "cannot be read"), ("{}", "lists no weights"), ("[]", "holds no settings")):
        index.write_text(text)
        assert f"{index.name} {why}" in refusal(folder)


def test_incomplete_weights_stop_a_run(copied: Callable[[str], Path], write_config: WriteConfig) -> None:
    folder = copied("llama")
    change_tensors(folder, lambda tensors: tensors.pop(NORM["llama"]))
    line = error_line("run", write_config(lm={"model": str(folder)}))
    assert f"missing (1): {NORM['llama']}" in line


# -- code and pickles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["config", "tokenizer"])
def test_code_in_a_model_directory_never_runs(
    place: str, copied: Callable[[str], Path], write_config: WriteConfig, tmp_path: Path
) -> None:
    """Not even for a user who would say yes: nothing is asked."""
    folder, marker = copied("llama"), tmp_path / "ran"
    (folder / "custom.py").write_text(f"open({str(marker)!r}, 'w')\nclass A: pass\n")
    if place == "config":
        names = {"AutoConfig": "custom.A", "AutoModelForCausalLM": "custom.A"}
        change_config(folder, model_type="custom", auto_map=names)
    else:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.A"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = write_config(lm={"model": str(folder)})
    done = finished(Process("gnnlm", "run", config, given="y\n" * 9), code=1)
    assert not marker.exists()
    lines = done.stderr.splitlines()
    assert "Python code from its own files, which is never run here" in lines[-1]
    assert "[y/N]" not in done.stdout + done.stderr
    assert "never run here" in refusal(folder)


def test_code_that_is_not_needed_is_ignored(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder, marker = copied("llama"), tmp_path / "ran"
    (folder / "custom.py").write_text(f"open({str(marker)!r}, 'w')\nclass A: pass\n")
    change_config(folder, auto_map={"AutoConfig": "custom.A", "AutoModelForCausalLM": "custom.A"})
    load(folder)
    assert not marker.exists()


def test_pickled_weights_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    folder = copied("llama")
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == "it has no weights: expected model.safetensors or model.safetensors.index.json; get them"
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    message = refusal_with_code(folder)
    assert "pickled (pytorch_model.bin)" in message
    assert not (tmp_path / "ran").exists()


def refusal_with_code(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    return str(caught.value)


def test_the_advice_on_pickles_works(copied: Callable[[str], Path], whole: dict[str, Path]) -> None:
    folder = copied("llama")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    advice = refusal_with_code(folder).split("with transformers: ")[1]
    eval(advice, {"AutoModelForCausalLM": transformers.AutoModelForCausalLM})
    tokens = torch.arange(9)[None]
    assert torch.equal(load(folder).encode(tokens), load(whole["llama"]).encode(tokens))


def test_adapters_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    (folder / "adapter_config.json").write_text("{}")
    assert "merge it into the model first" in refusal(folder)


# -- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "its config.json names no model_type"),
        ({"model_type": "novel"}, "does not know model_type novel; a newer version may"),
        ({"model_type": "vit"}, "model_type vit is not a causal language model"),
        ({"hidden_size": "wide"}, "its config.json cannot be used (TypeError: Field 'hidden_size' expected int"),
        ({"num_attention_heads": 5}, "its config.json cannot be used (ValueError: The hidden size (32) is not a mult"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights cannot be loaded ("),
    ],
)
def test_configs_that_cannot_be_used(changes: dict[str, Any], message: str, copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    change_config(folder, **changes)
    assert message in refusal(folder)


def test_damaged_files_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    data = (folder / "model.safetensors").read_bytes()
    for size in (0, 100, len(data) // 2):
        (folder / "model.safetensors").write_bytes(data[:size])
        assert refusal(folder).startswith("model.safetensors is damaged or cut short (")
    for text, why in (("{", "cannot be read"), ("[]", "holds no settings"), ("7", "holds no settings")):
        (folder / "config.json").write_text(text)
        assert f"config.json {why}" in refusal(folder)


def test_missing_and_damaged_tokenizers(copied: Callable[[str], Path]) -> None:
    folder = copied("gpt2")
    (folder / "tokenizer.json").write_text("{")
    assert refusal(folder).startswith("its tokenizer cannot be loaded; expected tokenizer.json, ")
    (folder / "tokenizer.json").unlink()
    assert refusal(folder).endswith("(there are none)")
    (folder / "tokenizer_config.json").unlink()  # now transformers makes up a tokenizer that knows no word
    assert "its files are missing" in refusal(folder)


def test_paths_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="got another kind of file"):
        resolve_model(str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").touch()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"\(the repository has no safetensors weights\); check the spelling"):
        resolve_model("some/model")


def test_saved_models_of_the_paper(tmp_path: Path) -> None:
    options = AdaptiveOptions(vocab_size=40, width=16, layers=1, heads=2, ffn=32, cutoffs=(8, 20), factor=2)
    NativeLM(make_model(options)).save(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    described, data = json.loads(config.read_text()), weights.read_bytes()
    weights.write_bytes(data[:-9])
    assert "is damaged or cut short" in refusal(tmp_path)
    weights.unlink()
    assert "is missing; make it again" in refusal(tmp_path)
    weights.write_bytes(data)
    change_tensors(tmp_path, lambda tensors: tensors.pop("layers.0.ffn_norm.weight"))
    assert "1 tensors differ (layers.0.ffn_norm.weight has shape none, expected (16,))" in refusal(tmp_path)
    weights.write_bytes(data)
    change_tensors(tmp_path, lambda tensors: tensors.update({"layers.0.ffn_norm.weight": torch.zeros(4)}))
    assert "layers.0.ffn_norm.weight has shape (4,), expected (16,)" in refusal(tmp_path)
    weights.write_bytes(data)
    for changes, why in (
        ({"options": {**described["options"], "layers": "two"}}, "does not describe a model"),
        ({"options": {"colour": 1}}, "colour"),
        ({"options": None}, "does not describe a model"),
        ({"start_token": None}, "does not describe a model"),
    ):
        config.write_text(json.dumps({**described, **changes}))
        assert why in refusal(tmp_path)
    config.write_text(json.dumps({key: described[key] for key in described if key != "options"}))
    assert "it lacks 'options'" in refusal(tmp_path)
