"""Converted models give the probabilities of the programs their weights came from."""

from __future__ import annotations

import argparse
import pickle
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import gnnlm
from gnnlm.errors import ModelError
from gnnlm.lm.convert_fairseq import convert_fairseq, read_fairseq_dictionary
from gnnlm.lm.convert_transformer_xl import convert_transformer_xl
from tests.cli import error_line
from tests.cli import gnnlm as run_gnnlm

FIXTURES = Path(__file__).parent.parent / "fixtures"
FAIRSEQ, XL = FIXTURES / "fairseq", FIXTURES / "transformer_xl"


@pytest.mark.parametrize("name", ["wiki103", "gbw", "untied"])
def test_fairseq(name: str, tmp_path: Path) -> None:
    made = convert_fairseq(FAIRSEQ / f"{name}.pt", FAIRSEQ / "dict.txt")
    assert made.unused == []
    assert made.mapped["decoder.layers.0.self_attn.q_proj.weight"] == "layers.0.attention.weight"
    made.lm.save(tmp_path / "lm")
    lm, want = gnnlm.load_lm(tmp_path / "lm"), torch.load(FAIRSEQ / f"{name}.expected.pt")
    torch.testing.assert_close(lm.log_probs(lm.encode(want["tokens"])), want["log_probs"], rtol=1e-5, atol=1e-5)
    assert (lm.vocab_size, lm.receptive_field) == (30, None)
    assert lm.tokenize("word3 strange\nword0") == ([7, 3, 2, 4, 2], [0, 6, 13, 14, 19])


def test_fairseqs_older_names(tmp_path: Path) -> None:
    """Attention in one matrix and numbered norms, as checkpoints of 2018 have them."""
    checkpoint = torch.load(FAIRSEQ / "wiki103.pt", weights_only=False)
    state = checkpoint["model"]
    for layer in ("decoder.layers.0", "decoder.layers.1"):
        for part in ("weight", "bias"):
            joint = torch.cat([state.pop(f"{layer}.self_attn.{name}_proj.{part}") for name in "qkv"])
            state[f"{layer}.self_attn.in_proj_{part}"] = joint
            state[f"{layer}.layer_norms.0.{part}"] = state.pop(f"{layer}.self_attn_layer_norm.{part}")
            state[f"{layer}.layer_norms.2.{part}"] = state.pop(f"{layer}.final_layer_norm.{part}")
    torch.save(checkpoint, tmp_path / "old.pt")
    lm, want = convert_fairseq(tmp_path / "old.pt").lm, torch.load(FAIRSEQ / "wiki103.expected.pt")
    torch.testing.assert_close(lm.log_probs(lm.encode(want["tokens"])), want["log_probs"], rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="without a vocabulary"):
        lm.tokenize("word3")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("enwik8", {}),
        ("same-length", {"same_length": True, "clamp": 3}),
        ("wt103", {}),
        ("hugging-face", {}),
    ],
)
def test_transformer_xl(name: str, options: dict[str, int], tmp_path: Path) -> None:
    made = convert_transformer_xl(XL / f"{name}.pt", segment=4, memory=6, **options)
    assert made.unused == []
    made.lm.save(tmp_path / "lm")
    lm, want = gnnlm.load_lm(tmp_path / "lm"), torch.load(XL / f"{name}.expected.pt")
    torch.testing.assert_close(lm.log_probs(lm.encode(want["tokens"])), want["log_probs"], rtol=1e-5, atol=1e-5)
    assert lm.receptive_field == 2 * 8 + 4


def test_byte_symbols(tmp_path: Path) -> None:
    (tmp_path / "symbols.txt").write_text("\n".join(["<eos>", *(str(value) for value in range(65, 94))]))
    lm = convert_transformer_xl(XL / "enwik8.pt", 4, 6, tmp_path / "symbols.txt").lm
    assert lm.tokenize("AB\nA") == ([1, 2, 0, 1], [0, 1, 2, 3])
    assert lm.start_token == 0


class Own:
    """A class that only the program which made a checkpoint has."""


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model": {}, "args": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ModelError, match=r"holds more than tensors and plain values \(it needs getattr\)"):
        convert_fairseq(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_files_that_torch_would_load_only_unsafely(tmp_path: Path) -> None:
    """torch advises to load them with weights_only=False; we say what to save instead."""
    torch.save({"model": {}, "args": Own()}, tmp_path / "own.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": Own()}, protocol=5))
    whole = (tmp_path / "own.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.safetensors").write_bytes(b"\0" * 20)
    for name, why in (
        ("own.pt", "(it needs tests.lm.test_convert.Own), which is not loaded; save its state_dict()"),
        ("module.pt", "(it needs torch.nn.modules.linear.Linear), which is not loaded; save its state_dict()"),
        ("script.pt", "is a TorchScript archive, which is not loaded; save the model's state_dict()"),
        ("pickle.pt", "cannot be read as a checkpoint: it is damaged or cut short"),
        ("cut.pt", "cannot be read as a checkpoint: it is damaged or cut short"),
        ("cut.safetensors", "cannot be read as a checkpoint: it is damaged or cut short"),
    ):
        with pytest.raises(ModelError) as caught:
            convert_fairseq(tmp_path / name)
        assert why in str(caught.value)
        assert "weights_only" not in str(caught.value)
        assert "\n" not in str(caught.value)
    line = error_line("lm", "convert", "fairseq", tmp_path / "script.pt", "--out", tmp_path / "out")
    assert line.startswith(f"error: {tmp_path / 'script.pt'} is a TorchScript archive")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        convert_fairseq(tmp_path / "none.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(ModelError, match="is not a checkpoint"):
        convert_fairseq(tmp_path / "junk.pt")
    with pytest.raises(ModelError, match="is not a fairseq transformer_lm"):
        convert_fairseq(XL / "enwik8.pt")
    with pytest.raises(ModelError, match="is not a Transformer-XL state dict"):
        convert_transformer_xl(FAIRSEQ / "wiki103.pt")
    (tmp_path / "dict.txt").write_text("a 1\n")
    with pytest.raises(ModelError, match="has 1 words, which with 4 special tokens makes 5; the model has 30"):
        convert_fairseq(FAIRSEQ / "wiki103.pt", tmp_path / "dict.txt")
    checkpoint = torch.load(FAIRSEQ / "wiki103.pt", weights_only=False)
    torch.save({"model": checkpoint["model"], "args": argparse.Namespace()}, tmp_path / "no-heads.pt")
    with pytest.raises(ModelError, match="--heads"):
        convert_fairseq(tmp_path / "no-heads.pt")
    with pytest.raises(ModelError, match="3 attention heads do not divide"):
        convert_fairseq(tmp_path / "no-heads.pt", heads=3)
    with pytest.raises(ModelError, match="has 2 attention heads, --heads says 4"):
        convert_fairseq(FAIRSEQ / "wiki103.pt", heads=4)
    torch.save({**checkpoint, "args": argparse.Namespace(activation_fn="gelu")}, tmp_path / "gelu.pt")
    with pytest.raises(ModelError, match="activation_fn gelu; only relu is supported"):
        convert_fairseq(tmp_path / "gelu.pt")
    del checkpoint["model"]["decoder.layers.1.fc2.weight"], checkpoint["model"]["decoder.layers.1.fc1.weight"]
    torch.save(checkpoint, tmp_path / "missing.pt")
    with pytest.raises(ModelError, match=r"lacks 2 tensors: decoder\.layers\.1\.fc1\.weight, decoder\.layers\.1\.fc2"):
        convert_fairseq(tmp_path / "missing.pt")
    checkpoint = torch.load(FAIRSEQ / "gbw.pt", weights_only=False)
    checkpoint["model"]["decoder.layers.1.fc2.weight"] = torch.zeros(16, 21)
    torch.save(checkpoint, tmp_path / "wrong.pt")
    with pytest.raises(ModelError, match=r"\(16, 21\), expected \(16, 20\)"):
        convert_fairseq(tmp_path / "wrong.pt")


def test_a_hole_makes_no_shallower_model(tmp_path: Path) -> None:
    state = torch.load(XL / "enwik8.pt")
    del state["layers.1.dec_attn.qkv_net.weight"]
    torch.save(state, tmp_path / "hole.pt")
    with pytest.raises(ModelError, match=r"lacks .*layers\.1\.dec_attn\.qkv_net\.weight"):
        convert_transformer_xl(tmp_path / "hole.pt", 4, 6)


def changed(tmp_path: Path, **changes: object) -> Path:
    """A fairseq checkpoint with other settings."""
    checkpoint = torch.load(FAIRSEQ / "wiki103.pt", weights_only=False)
    args = argparse.Namespace(**{**vars(checkpoint["args"]), **changes})
    torch.save({**checkpoint, "args": args}, tmp_path / "changed.pt")
    return tmp_path / "changed.pt"


@pytest.mark.parametrize("name", ["no_scale_embedding", "no_token_positional_embeddings"])
def test_what_computes_something_else_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"made with {name} True"):
        convert_fairseq(changed(tmp_path, **{name: True}))


def test_a_norm_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    checkpoint = torch.load(FAIRSEQ / "wiki103.pt", weights_only=False)
    checkpoint["model"]["decoder.layernorm_embedding.weight"] = torch.ones(16)
    torch.save(checkpoint, tmp_path / "norm.pt")
    with pytest.raises(ModelError, match=r"layernorm_embedding\.weight, which is not supported"):
        convert_fairseq(tmp_path / "norm.pt")
    with pytest.raises(ModelError, match="2 layers, its settings say 3"):
        convert_fairseq(changed(tmp_path, decoder_layers=3))


@pytest.mark.parametrize("name", ["wiki103", "gbw"])
def test_other_ways_to_store_the_same(name: str, tmp_path: Path) -> None:
    """Half precision, settings under `cfg`, statistics of fairseq's own, tied tensors left out, as .safetensors."""
    checkpoint = torch.load(FAIRSEQ / f"{name}.pt", weights_only=False)
    want = torch.load(FAIRSEQ / f"{name}.expected.pt")
    plain = convert_fairseq(FAIRSEQ / f"{name}.pt")
    meters = types.ModuleType("fairseq.meters")
    meters.AverageMeter = type("AverageMeter", (), {"__module__": "fairseq.meters"})  # type: ignore[attr-defined]
    sys.modules.update({"fairseq": types.ModuleType("fairseq"), "fairseq.meters": meters})
    try:
        half = {key: value.half() for key, value in checkpoint["model"].items()}
        newer = {"model": half, "args": None, "cfg": {"model": vars(checkpoint["args"])}}
        torch.save({**newer, "extra_state": {"loss": meters.AverageMeter()}}, tmp_path / "newer.pt")
    finally:
        del sys.modules["fairseq"], sys.modules["fairseq.meters"]
    lm = convert_fairseq(tmp_path / "newer.pt").lm
    torch.testing.assert_close(lm.log_probs(lm.encode(want["tokens"])), want["log_probs"], rtol=1e-2, atol=1e-2)
    tied = [n for n in plain.mapped if n.endswith((".2.weight", "word_proj.weight", "word_proj.1.weight"))]
    tied += [n for n, ours in plain.mapped.items() if ".tail." in n and ours.startswith("inputs.")]
    kept = {n: t.clone() for n, t in checkpoint["model"].items() if n not in tied}
    assert len(kept) < len(checkpoint["model"])
    save_file(kept, tmp_path / "tied.safetensors")
    lm = convert_fairseq(tmp_path / "tied.safetensors", heads=checkpoint["args"].decoder_attention_heads).lm
    torch.testing.assert_close(lm.log_probs(lm.encode(want["tokens"])), want["log_probs"], rtol=1e-5, atol=1e-5)


def test_what_the_original_calls_no_clamp(tmp_path: Path) -> None:
    assert convert_transformer_xl(XL / "enwik8.pt", 4, 6, clamp=-1).lm.model.options.clamp is None
    for segment, memory, same_length in ((0, 6, False), (4, -1, False), (4, 0, True)):
        with pytest.raises(ModelError, match=r"at least|cannot be 0"):
            convert_transformer_xl(XL / "enwik8.pt", segment, memory, same_length=same_length)


def test_the_originals_bytes_have_no_newline(tmp_path: Path) -> None:
    (tmp_path / "symbols.txt").write_text("\n".join(str(value) for value in (65, 32, *range(66, 94))))
    lm = convert_transformer_xl(XL / "enwik8.pt", 4, 6, tmp_path / "symbols.txt").lm
    assert lm.tokenize("AB\nA") == ([0, 2, 0], [0, 1, 3])
    assert lm.start_token == 1
    for wrong, why in (("300", "up to 300"), ("65", "got 29")):
        (tmp_path / "symbols.txt").write_text("\n".join([wrong, *(str(value) for value in range(65, 94))]))
        with pytest.raises(ModelError, match=why):
            convert_transformer_xl(XL / "enwik8.pt", 4, 6, tmp_path / "symbols.txt")


def test_odd_checkpoints_are_refused(tmp_path: Path) -> None:
    torch.save({0: torch.zeros(2)}, tmp_path / "numbers.pt")
    with pytest.raises(ModelError, match="is not a fairseq"):
        convert_fairseq(tmp_path / "numbers.pt")
    with pytest.raises(ModelError, match="is a directory"):
        convert_fairseq(tmp_path)
    state = torch.load(XL / "enwik8.pt")
    torch.save({**state, "r_w_bias": torch.zeros(2, 3, 4)}, tmp_path / "three.pt")
    with pytest.raises(ModelError, match="expected 2 dimensions"):
        convert_transformer_xl(tmp_path / "three.pt", 4, 6)
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        gnnlm.load_lm(tmp_path / "lm")
    lm = convert_fairseq(FAIRSEQ / "wiki103.pt").lm
    with pytest.raises(ModelError, match="token ids from 0 to 29, got 2 to 30"):
        lm.encode(torch.tensor([[2, 30]]))


def test_overwritten_specials_of_a_dictionary(tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text("a 3\n<unk> 2 #fairseq:overwrite\n")
    assert read_fairseq_dictionary(tmp_path / "dict.txt", 6).words[4:] == ["a", "<unk>"]


def test_command_line(tmp_path: Path) -> None:
    done = run_gnnlm(
        "lm", "convert", "fairseq", FAIRSEQ / "wiki103.pt", "--dict", FAIRSEQ / "dict.txt", "--out", tmp_path / "a"
    )
    assert "decoder.layers.0.fc1.weight -> layers.0.widen.weight" in done.stdout
    assert "0 not used, none missing" in done.stderr
    run_gnnlm(
        "lm", "convert", "transformer-xl", XL / "enwik8.pt", "--segment", 4, "--memory", 6, "--out", tmp_path / "b"
    )
    assert gnnlm.load_lm(tmp_path / "b").receptive_field == 20
    assert "does not exist" in error_line("lm", "convert", "fairseq", tmp_path / "no.pt", "--out", tmp_path / "c")
