"""Weights people have: fairseq's adaptive-input checkpoints and Transformer-XL's state dicts, as models of ours.

Files are loaded without running anything in them. Every tensor is accounted for: it is mapped, or known to hold no
weight, or reported as unused; one that is missing is refused.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gnnlm.corpus.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from gnnlm.errors import ModelError
from gnnlm.lm.native import NativeLM, NativeModel, make_model, options_of

FAIRSEQ_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
WITHOUT_WEIGHT = ("*.version", "*_float_tensor", "*pos_emb.inv_freq", "*.training_step")


@dataclass
class Conversion:
    """A converted model and what became of each tensor of the file."""

    lm: NativeLM
    mapped: dict[str, str]
    unused: list[str]


@dataclass
class _Tensors:
    """The tensors of a file, taken one by one."""

    tensors: dict[str, Tensor]
    mapped: dict[str, str] = field(default_factory=dict)
    filled: dict[str, Tensor] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def peek(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ModelError(f"the checkpoint has no tensor {name}: it is not of the layout that was asked for")
        return self.tensors[name]

    def put(self, ours: str, *names: str, turn: bool = False) -> None:
        """Our tensor is these of theirs, one below the other, or one transposed."""
        parts = [self.peek(name) for name in names]
        self.filled[ours] = parts[0].T if turn else parts[0] if len(parts) == 1 else torch.cat(parts)
        self.mapped.update(dict.fromkeys(names, ours))

    def same(self, name: str, ours: str) -> None:
        """A tensor of theirs that repeats one of ours; refused where it does not."""
        if name in self and torch.equal(self.tensors[name], self.filled[ours]):
            self.mapped[name] = ours
        elif name in self:
            raise ModelError(f"{name} should be tied to the tensor that {ours} was taken from, and differs from it")

    def count(self, pattern: str) -> int:
        """How many numbers {} can be counted through, from 0."""
        number = 0
        while pattern.format(number) in self.tensors:
            number += 1
        return number

    def finish(self, model: NativeModel, vocabulary: Vocabulary | None, start: int | None) -> Conversion:
        """Fill the model; what it needs and nothing was put for is refused."""
        state = model.state_dict()
        there = {state[name].data_ptr() for name in self.filled if name in state}  # tied tensors are one
        missing = [name for name, tensor in state.items() if tensor.numel() and tensor.data_ptr() not in there]
        wrong = [
            f"{name} {tuple(tensor.shape)}, expected {tuple(state[name].shape)}"
            for name, tensor in self.filled.items()
            if name not in state or tensor.shape != state[name].shape
        ]
        if missing or wrong:
            raise ModelError(f"the checkpoint does not make a whole model: {'; '.join([*missing[:5], *wrong[:5]])}")
        model.load_state_dict({name: tensor.float() for name, tensor in self.filled.items()}, strict=False)
        unused = [
            name
            for name in self.tensors
            if name not in self.mapped and not any(fnmatch.fnmatch(name, pattern) for pattern in WITHOUT_WEIGHT)
        ]
        return Conversion(NativeLM(model, vocabulary, start), self.mapped, unused)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A .pt or .safetensors file as plain values; nothing in it is run."""
    if not path.is_file():
        raise ModelError(f"{path} does not exist; expected a checkpoint, .pt or .safetensors")
    with path.open("rb") as file:
        first = file.read(2)
    if path.suffix != ".safetensors" and first != b"PK" and first[:1] != b"\x80":  # a zip archive, or an older pickle
        raise ModelError(f"{path} is not a checkpoint; expected what torch.save writes, or .safetensors")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), "a class of its own")
        raise ModelError(
            f"{path} holds more than tensors and plain values ({' '.join(reason.split())[:120]}), which is not loaded; "
            "save its state_dict() (and fairseq's args as an argparse.Namespace) and convert that"
        ) from error
    except Exception as error:  # torch and safetensors raise many kinds for a damaged file, none of them ours
        raise ModelError(f"{path} cannot be read as a checkpoint: {' '.join(str(error).split())[:160]}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a dictionary of tensors, got {type(found).__name__}")
    return found


def _state_dict(checkpoint: dict[str, Any]) -> _Tensors:
    inner = next((checkpoint[key] for key in ("model", "state_dict") if isinstance(checkpoint.get(key), dict)), None)
    tensors = {k: v for k, v in (inner or checkpoint).items() if isinstance(v, Tensor)}
    return _Tensors({name.removeprefix("module."): tensor for name, tensor in tensors.items()})


# -- fairseq ----------------------------------------------------------------------------------------------------


def convert_fairseq(path: Path, dictionary: Path | None = None, heads: int | None = None) -> Conversion:
    """A checkpoint of fairseq's transformer_lm with adaptive inputs and adaptive softmax."""
    checkpoint = read_checkpoint(path)
    stored = checkpoint.get("args", {})
    args = vars(stored) if isinstance(stored, argparse.Namespace) else stored if isinstance(stored, dict) else {}
    _only_what_is_known(path, args)
    theirs = _state_dict(checkpoint)
    embedding, softmax = "decoder.embed_tokens.embeddings", "decoder.adaptive_softmax"
    bands = theirs.count(embedding + ".{}.0.weight")
    layers = theirs.count("decoder.layers.{}.fc1.weight")
    if not bands or not layers:
        raise ModelError(f"{path} is no fairseq transformer_lm with adaptive inputs (no {embedding}.0.0.weight)")
    told = args.get("decoder_attention_heads")
    if told is None and heads is None:
        raise ModelError(f"{path} does not tell its number of attention heads; give it with --heads")
    if told is not None and heads is not None and told != heads:
        raise ModelError(f"{path} has {told} attention heads, --heads says {heads}; leave it out")
    heads = int(told or heads or 0)
    words = [theirs.peek(f"{embedding}.{band}.0.weight") for band in range(bands)]
    width = theirs.peek(f"{embedding}.0.1.weight").shape[0]
    if heads < 1 or width % heads:
        raise ModelError(f"{heads} attention heads do not divide the model's width of {width}")
    cutoffs = list(itertools.accumulate(len(band) for band in words))
    tie_words = f"{softmax}.head.class_proj.weight" in theirs
    tie_projections = all(theirs.peek(f"{softmax}.tail.{band}.0.weight").shape[0] == width for band in range(bands - 1))
    options = {
        "vocab_size": cutoffs[-1],
        "width": width,
        "layers": layers,
        "heads": heads,
        "ffn": theirs.peek("decoder.layers.0.fc1.weight").shape[0],
        "cutoffs": cutoffs[:-1],
        "factor": words[0].shape[1] / words[1].shape[1] if bands > 1 else 1.0,
        "embedding_width": words[0].shape[1],
        "tie_words": tie_words,
        "tie_projections": tie_projections,
        "final_norm": "decoder.layer_norm.weight" in theirs,
        "dropout": float(args.get("dropout", 0.1)),
        "attention_dropout": float(args.get("attention_dropout", 0.0)),
        "activation_dropout": float(args.get("activation_dropout", args.get("relu_dropout", 0.0)) or 0.0),
        "softmax_dropout": float(args.get("adaptive_softmax_dropout", 0.0)),
    }
    for band in range(bands):
        theirs.put(f"inputs.words.{band}", f"{embedding}.{band}.0.weight")
        theirs.put(f"inputs.projections.{band}", f"{embedding}.{band}.1.weight")
    _fairseq_head(theirs, softmax, bands, cutoffs[0], tie_words, tie_projections)
    for number in range(layers):
        _fairseq_layer(theirs, f"decoder.layers.{number}", f"layers.{number}")
    if options["final_norm"]:
        for part in ("weight", "bias"):
            theirs.put(f"norm.{part}", f"decoder.layer_norm.{part}")
    vocabulary = None if dictionary is None else read_fairseq_dictionary(dictionary, cutoffs[-1])
    return theirs.finish(make_model(options_of("adaptive", options)), vocabulary, FAIRSEQ_SPECIAL.index("</s>"))


def _only_what_is_known(path: Path, args: dict[str, Any]) -> None:
    """Refuse what the tensors do not show and our model does not have."""
    for name, ours in (("activation_fn", "relu"), ("decoder_normalize_before", True), ("decoder_learned_pos", False)):
        if args.get(name, ours) != ours:
            raise ModelError(f"{path} was made with {name} {args[name]}; only {ours} is known here")


def _fairseq_head(
    theirs: _Tensors, softmax: str, bands: int, shortlist: int, tie_words: bool, tie_projections: bool
) -> None:
    if tie_words:
        theirs.put("head.classes", f"{softmax}.head.class_proj.weight")
        theirs.same(f"{softmax}.head.word_proj.weight", "inputs.words.0")
        if f"{softmax}.head.word_proj.0.weight" in theirs:
            theirs.put("head.head_projection", f"{softmax}.head.word_proj.0.weight", turn=True)
            theirs.same(f"{softmax}.head.word_proj.1.weight", "inputs.words.0")
    else:
        theirs.put("head.words.0", f"{softmax}.head.weight")
        whole = theirs.filled["head.words.0"]
        theirs.filled["head.words.0"], theirs.filled["head.classes"] = whole[:shortlist], whole[shortlist:]
    for band in range(1, bands):
        tail = f"{softmax}.tail.{band - 1}"
        if tie_projections:
            theirs.same(f"{tail}.0.weight", f"inputs.projections.{band}")
        else:
            theirs.put(f"head.projections.{band - 1}", f"{tail}.0.weight", turn=True)
        if tie_words:
            theirs.same(f"{tail}.2.weight", f"inputs.words.{band}")
        else:
            theirs.put(f"head.words.{band}", f"{tail}.2.weight")


def _fairseq_layer(theirs: _Tensors, layer: str, ours: str) -> None:
    attention = f"{layer}.self_attn"
    old = f"{attention}.in_proj_weight" in theirs
    for part in ("weight", "bias"):
        split = [f"{attention}.{name}_proj.{part}" for name in "qkv"]
        theirs.put(f"{ours}.attention.{part}", *([f"{attention}.in_proj_{part}"] if old else split))
        theirs.put(f"{ours}.output.{part}", f"{attention}.out_proj.{part}")
        theirs.put(f"{ours}.widen.{part}", f"{layer}.fc1.{part}")
        theirs.put(f"{ours}.narrow.{part}", f"{layer}.fc2.{part}")
        for norm, number, name in (("attention_norm", 0, "self_attn_layer_norm"), ("ffn_norm", 2, "final_layer_norm")):
            oldest = f"{layer}.layer_norms.{number}.{part}"
            theirs.put(f"{ours}.{norm}.{part}", oldest if oldest in theirs else f"{layer}.{name}.{part}")


def read_fairseq_dictionary(path: Path, size: int) -> WordVocabulary:
    """fairseq's dict.txt: a word and its count a line, behind four special tokens that it does not list."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as a fairseq dictionary: {error}") from error
    words = [*FAIRSEQ_SPECIAL, *(line.rsplit(" ", 1)[0] for line in lines if line)]
    if len(words) != size:
        raise ModelError(
            f"{path} has {len(words) - 4} words and 4 special tokens make {len(words)}, the model has {size}; "
            "give the dict.txt that the checkpoint came with"
        )
    return WordVocabulary(words, eos="</s>", unk="<unk>")


# -- Transformer-XL -----------------------------------------------------------------------------------------------


def convert_transformer_xl(
    path: Path,
    segment: int = 512,
    memory: int = 512,
    vocabulary: Path | None = None,
    same_length: bool = False,
    clamp: int | None = None,
    pre_norm: bool = False,
) -> Conversion:
    """A state dict with the original names (or those transformers gave them).

    What the tensors do not tell is given: segment and memory lengths, whether all tokens attend equally far, where
    distances are clamped, and where the norms stand.
    """
    theirs = _state_dict(read_checkpoint(path))
    hugging_face = "transformer.word_emb.emb_layers.0.weight" in theirs
    theirs = _Tensors({name.removeprefix("transformer."): tensor for name, tensor in theirs.tensors.items()})
    bands, layers = theirs.count("word_emb.emb_layers.{}.weight"), theirs.count("layers.{}.dec_attn.qkv_net.weight")
    if not bands or not layers:
        raise ModelError(f"{path} is no Transformer-XL state dict (no word_emb.emb_layers.0.weight)")
    words = [theirs.peek(f"word_emb.emb_layers.{band}.weight") for band in range(bands)]
    projected = "word_emb.emb_projs.0" in theirs
    width = theirs.peek("layers.0.dec_attn.o_net.weight").shape[0]
    if bands == 1 and ("crit.cluster_weight" in theirs or projected):
        raise ModelError(
            f"{path}: an adaptive softmax with div_val 1, or embeddings of another width, is not supported"
        )
    shared = "r_w_bias" in theirs
    heads, head_width = theirs.peek("r_w_bias" if shared else "layers.0.dec_attn.r_w_bias").shape
    cutoffs = list(itertools.accumulate(len(band) for band in words))
    tied = all(
        torch.equal(theirs.peek(f"crit.out_projs.{band}"), theirs.peek(f"word_emb.emb_projs.{band}"))
        for band in range(bands if projected else 0)
    )
    options = {
        "vocab_size": cutoffs[-1],
        "width": width,
        "layers": layers,
        "heads": heads,
        "head_width": head_width,
        "ffn": theirs.peek("layers.0.pos_ff.CoreNet.0.weight").shape[0],
        "cutoffs": cutoffs[:-1],
        "factor": words[0].shape[1] / words[1].shape[1] if bands > 1 else 1.0,
        "segment": segment,
        "memory": memory,
        "same_length": same_length,
        "clamp": clamp,
        "shared_biases": shared,
        "pre_norm": pre_norm,
        "tie_projections": tied,
    }
    for band in range(bands):
        theirs.put(f"inputs.words.{band}", f"word_emb.emb_layers.{band}.weight")
        theirs.put(f"head.biases.{band}", f"crit.out_layers.{band}.bias")
        theirs.same(f"crit.out_layers.{band}.weight", f"inputs.words.{band}")
        if projected:
            theirs.put(f"inputs.projections.{band}", f"word_emb.emb_projs.{band}")
            ours = "head.head_projection" if band == 0 else f"head.projections.{band - 1}"
            theirs.put(ours, f"crit.out_projs.{band}")
    if bands > 1:
        theirs.put("head.classes", "crit.cluster_weight")
        theirs.put(f"head.biases.{bands}", "crit.cluster_bias")
        # classes are scored behind the first projection; the original reads them from the last to the first
        classes = theirs.filled["head.classes"] @ theirs.filled["head.head_projection"].T
        order = slice(None) if hugging_face else torch.arange(bands - 2, -1, -1)
        theirs.filled["head.classes"] = classes[order]
        theirs.filled[f"head.biases.{bands}"] = theirs.filled[f"head.biases.{bands}"][order]
    else:
        theirs.filled["head.classes"] = torch.empty(0, width)
        theirs.filled["head.biases.1"] = torch.empty(0)
    for number in range(layers):
        _xl_layer(theirs, f"layers.{number}", number, shared)
    if shared:
        _xl_biases(theirs, "", 0)
    symbols = None if vocabulary is None else read_symbols(vocabulary, cutoffs[-1])
    return theirs.finish(make_model(options_of("transformer-xl", options)), symbols, None)


def _xl_layer(theirs: _Tensors, layer: str, number: int, shared: bool) -> None:
    joint = f"{layer}.dec_attn.qkv_net.weight"
    inner = theirs.peek(joint).shape[0] // 3
    theirs.put(f"{layer}.query.weight", joint)
    theirs.filled[f"{layer}.query.weight"], theirs.filled[f"{layer}.key_value.weight"] = theirs.peek(joint).split(
        [inner, 2 * inner]
    )
    theirs.put(f"{layer}.position.weight", f"{layer}.dec_attn.r_net.weight")
    theirs.put(f"{layer}.output.weight", f"{layer}.dec_attn.o_net.weight")
    for part in ("weight", "bias"):
        theirs.put(f"{layer}.attention_norm.{part}", f"{layer}.dec_attn.layer_norm.{part}")
        theirs.put(f"{layer}.ffn_norm.{part}", f"{layer}.pos_ff.layer_norm.{part}")
        theirs.put(f"{layer}.widen.{part}", f"{layer}.pos_ff.CoreNet.0.{part}")
        theirs.put(f"{layer}.narrow.{part}", f"{layer}.pos_ff.CoreNet.3.{part}")
    if not shared:
        _xl_biases(theirs, f"{layer}.dec_attn.", number)
    for name in ("r_w_bias", "r_r_bias") if shared else ():  # transformers repeats them in every layer
        repeated = f"{layer}.dec_attn.{name}"
        if repeated in theirs and torch.equal(theirs.peek(repeated), theirs.peek(name)):
            theirs.mapped[repeated] = "biases.0"


def _xl_biases(theirs: _Tensors, place: str, number: int) -> None:
    names = [f"{place}r_w_bias", f"{place}r_r_bias"]
    theirs.put(f"biases.{number}", *names)
    theirs.filled[f"biases.{number}"] = torch.stack([theirs.peek(name) for name in names])


def read_symbols(path: Path, size: int) -> Vocabulary:
    """A symbol a line, in the order of ids: words, or byte values in decimal with `<eos>` for the newline."""
    try:
        symbols = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as a list of symbols: {error}") from error
    symbols = symbols[:-1] if symbols[-1] == "" else symbols
    if len(symbols) != size:
        raise ModelError(
            f"{path} lists {len(symbols)} symbols, the model has {size}; give the list it was trained with"
        )
    if all(symbol == "<eos>" or symbol.isdecimal() for symbol in symbols):
        return ByteVocabulary([10 if symbol == "<eos>" else int(symbol) for symbol in symbols])
    return WordVocabulary(symbols)
