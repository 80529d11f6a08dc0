"""Converting fairseq's adaptive-input models (transformer_lm with adaptive inputs and adaptive softmax)."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnlm.corpus.vocabulary import WordVocabulary
from gnnlm.errors import ModelError
from gnnlm.lm.foreign_checkpoint import CheckpointTensors, Conversion, read_checkpoint, state_dict
from gnnlm.lm.native_lm import make_model, options_of

FAIRSEQ_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
FAIRSEQ_KNOWN = {
    "activation_fn": "relu",
    "decoder_normalize_before": True,
    "decoder_learned_pos": False,
    "no_scale_embedding": False,
    "no_token_positional_embeddings": False,
}
FAIRSEQ_UNKNOWN = ("layernorm_embedding", "project_in_dim", "project_out_dim", "bias_k", "bias_v")
OVERWRITE = " #fairseq:overwrite"


def convert_fairseq(path: Path, dictionary: Path | None = None, heads: int | None = None) -> Conversion:
    """Convert a checkpoint; `dictionary` is the dict.txt it came with, `heads` is needed if it does not record them."""
    checkpoint = read_checkpoint(path)
    args = _fairseq_args(checkpoint)
    theirs = state_dict(checkpoint)
    _only_what_is_known(path, args, theirs)
    embedding, softmax = "decoder.embed_tokens.embeddings", "decoder.adaptive_softmax"
    bands, layers = theirs.count(f"{embedding}."), theirs.count("decoder.layers.")
    if not bands or not layers:
        lacking = f"{embedding}.0.0.weight" if not bands else "decoder.layers.0"
        raise ModelError(f"{path} is not a fairseq transformer_lm with adaptive inputs (it has no {lacking})")
    if layers != args.get("decoder_layers", layers):
        raise ModelError(
            f"{path} has tensors of {layers} layers, its settings say {args['decoder_layers']}: it is incomplete"
        )
    words = [theirs.peek(f"{embedding}.{band}.0.weight") for band in range(bands)]
    width = theirs.peek(f"{embedding}.0.1.weight").shape[0]
    cutoffs = list(itertools.accumulate(len(band) for band in words))
    tie_words = f"{softmax}.head.class_proj.weight" in theirs
    for band in range(bands):
        theirs.put(f"inputs.words.{band}", f"{embedding}.{band}.0.weight")
        theirs.put(f"inputs.projections.{band}", f"{embedding}.{band}.1.weight")
    tails = [(f"{softmax}.tail.{band - 1}.0.weight", f"inputs.projections.{band}") for band in range(1, bands)]
    tie_projections = all(  # a file may leave out what is tied
        name not in theirs or (ours in theirs.filled and torch.equal(theirs.tensors[name], theirs.filled[ours]))
        for name, ours in tails
    )
    options = {
        "vocab_size": cutoffs[-1],
        "width": width,
        "layers": layers,
        "heads": _fairseq_heads(path, args.get("decoder_attention_heads"), heads, width),
        "ffn": theirs.peek("decoder.layers.0.fc1.weight").shape[0],
        "cutoffs": cutoffs[:-1],
        "widths": [band.shape[1] for band in words],
        "tie_words": tie_words,
        "tie_projections": tie_projections,
        "final_norm": "decoder.layer_norm.weight" in theirs,
        "dropout": float(args.get("dropout", 0.1)),
        "attention_dropout": float(args.get("attention_dropout", 0.0)),
        "activation_dropout": float(args.get("activation_dropout", args.get("relu_dropout", 0.0)) or 0.0),
        "softmax_dropout": float(args.get("adaptive_softmax_dropout", 0.0)),
    }
    _fairseq_head(theirs, softmax, bands, cutoffs[0], tie_words, tie_projections)
    for number in range(layers):
        _fairseq_layer(theirs, f"decoder.layers.{number}", f"layers.{number}")
    if options["final_norm"]:
        for part in ("weight", "bias"):
            theirs.put(f"norm.{part}", f"decoder.layer_norm.{part}")
    vocabulary = None if dictionary is None else read_fairseq_dictionary(dictionary, cutoffs[-1])
    return theirs.finish(make_model(options_of("adaptive", options)), vocabulary, FAIRSEQ_SPECIAL.index("</s>"))


def _fairseq_args(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the model's settings: under `args`, or in newer checkpoints under `cfg`."""
    newer = checkpoint.get("cfg")
    for stored in (checkpoint.get("args"), newer.get("model") if isinstance(newer, dict) else None):
        if isinstance(stored, argparse.Namespace):
            return vars(stored)
        if isinstance(stored, dict):
            return stored
    return {}


def _fairseq_heads(path: Path, told: int | None, given: int | None, width: int) -> int:
    if told is None and given is None:
        raise ModelError(f"{path} does not say how many attention heads it has; give the number with --heads")
    if told is not None and given is not None and told != given:
        raise ModelError(f"{path} has {told} attention heads, --heads says {given}; leave --heads out")
    heads = int(told or given or 0)
    if heads < 1 or width % heads:
        raise ModelError(
            f"{heads} attention heads do not divide the model's width of {width}; give the right number with --heads"
        )
    return heads


def _only_what_is_known(path: Path, args: dict[str, Any], theirs: CheckpointTensors) -> None:
    """Refuse a checkpoint whose model computes something else than ours."""
    for name, ours in FAIRSEQ_KNOWN.items():
        if args.get(name, ours) != ours:
            raise ModelError(f"{path} was made with {name} {args[name]}; only {ours} is supported")
    for name in theirs.tensors:
        if any(part in FAIRSEQ_UNKNOWN for part in name.split(".")):
            raise ModelError(f"{path} has {name}, which is not supported")


def _fairseq_head(
    theirs: CheckpointTensors, softmax: str, bands: int, shortlist: int, tie_words: bool, tie_projections: bool
) -> None:
    if tie_words:
        theirs.put("head.classes", f"{softmax}.head.class_proj.weight")
        theirs.same(f"{softmax}.head.word_proj.weight", "inputs.words.0")
        if f"{softmax}.head.word_proj.0.weight" in theirs:
            theirs.put("head.head_projection", f"{softmax}.head.word_proj.0.weight", make=Tensor.t)
            theirs.same(f"{softmax}.head.word_proj.1.weight", "inputs.words.0")
    else:
        theirs.put("head.words.0", f"{softmax}.head.weight", make=lambda both: both[:shortlist])
        theirs.put("head.classes", f"{softmax}.head.weight", make=lambda both: both[shortlist:])
    for band in range(1, bands):
        tail = f"{softmax}.tail.{band - 1}"
        if tie_projections:
            theirs.same(f"{tail}.0.weight", f"inputs.projections.{band}")
        else:
            theirs.put(f"head.projections.{band - 1}", f"{tail}.0.weight", make=Tensor.t)
        if tie_words:
            theirs.same(f"{tail}.2.weight", f"inputs.words.{band}")
        else:
            theirs.put(f"head.words.{band}", f"{tail}.2.weight")


def _fairseq_layer(theirs: CheckpointTensors, layer: str, ours: str) -> None:
    attention = f"{layer}.self_attn"
    joint = f"{attention}.in_proj_weight" in theirs  # older checkpoints have one matrix
    for part in ("weight", "bias"):
        split = [f"{attention}.{name}_proj.{part}" for name in "qkv"]
        theirs.put(f"{ours}.attention.{part}", *([f"{attention}.in_proj_{part}"] if joint else split))
        theirs.put(f"{ours}.output.{part}", f"{attention}.out_proj.{part}")
        theirs.put(f"{ours}.widen.{part}", f"{layer}.fc1.{part}")
        theirs.put(f"{ours}.narrow.{part}", f"{layer}.fc2.{part}")
        for norm, number, name in (("attention_norm", 0, "self_attn_layer_norm"), ("ffn_norm", 2, "final_layer_norm")):
            oldest = f"{layer}.layer_norms.{number}.{part}"
            theirs.put(f"{ours}.{norm}.{part}", oldest if oldest in theirs else f"{layer}.{name}.{part}")


def read_fairseq_dictionary(path: Path, size: int) -> WordVocabulary:
    """Read fairseq's dict.txt: a word and its count on each line, after four special tokens that it does not list."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as a fairseq dictionary: {error}") from error
    listed = [line.removesuffix(OVERWRITE).rsplit(" ", 1)[0] for line in lines if line]
    words = [*FAIRSEQ_SPECIAL, *listed]
    if len(words) != size:
        raise ModelError(
            f"{path} has {len(words) - 4} words, which with 4 special tokens makes {len(words)}; the model has {size}; "
            "give the dict.txt that the checkpoint came with"
        )
    return WordVocabulary(words, eos="</s>", unk="<unk>")
