"""Converting state dicts of Transformer-XL, with the original names or those of its port to transformers."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from gnnlm.corpus.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from gnnlm.errors import ModelError
from gnnlm.lm.foreign_checkpoint import CheckpointTensors, Conversion, read_checkpoint, state_dict
from gnnlm.lm.native_lm import make_model, options_of


def convert_transformer_xl(
    path: Path,
    segment: int = 512,
    memory: int = 512,
    vocabulary: Path | None = None,
    same_length: bool = False,
    clamp: int | None = None,
    pre_norm: bool = False,
) -> Conversion:
    """Convert a state dict, given what its tensors do not show.

    That is the lengths of segment and memory, whether all tokens attend equally far (`same_length`), the largest
    distance that counts (`clamp`), and whether the norms come before the sublayers (`pre_norm`).
    """
    if segment < 1 or memory < 0:
        raise ModelError(f"expected a segment of at least 1 and a memory of at least 0 (got {segment} and {memory})")
    if same_length and memory < 1:
        raise ModelError("with --same-length every token attends to --memory tokens, so --memory cannot be 0")
    theirs = state_dict(read_checkpoint(path))
    hugging_face = "transformer.word_emb.emb_layers.0.weight" in theirs
    theirs = CheckpointTensors({name.removeprefix("transformer."): tensor for name, tensor in theirs.tensors.items()})
    bands, layers = theirs.count("word_emb.emb_layers."), theirs.count("layers.")
    if not bands or not layers:
        lacking = "word_emb.emb_layers.0.weight" if not bands else "layers.0"
        raise ModelError(f"{path} is not a Transformer-XL state dict (it has no {lacking})")
    words = [theirs.peek(f"word_emb.emb_layers.{band}.weight") for band in range(bands)]
    projected = "word_emb.emb_projs.0" in theirs
    if bands == 1 and "crit.cluster_weight" in theirs:
        raise ModelError(f"{path}: an adaptive softmax with div_val 1 is not supported")
    width = theirs.peek("layers.0.dec_attn.o_net.weight").shape[0]
    shared = "r_w_bias" in theirs
    heads, head_width = theirs.peek("r_w_bias" if shared else "layers.0.dec_attn.r_w_bias").shape
    cutoffs = list(itertools.accumulate(len(band) for band in words))
    out, into = "crit.out_projs.{}", "word_emb.emb_projs.{}"
    tied = all(  # a file may leave out what is tied
        out.format(band) not in theirs or torch.equal(theirs.peek(out.format(band)), theirs.peek(into.format(band)))
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
        "widths": [band.shape[1] for band in words],
        "segment": segment,
        "memory": memory,
        "same_length": same_length,
        "clamp": clamp if clamp is not None and clamp > 0 else None,  # the original writes -1 for none
        "shared_biases": shared,
        "pre_norm": pre_norm,
        "tie_projections": tied,
    }
    for band in range(bands):
        theirs.put(f"inputs.words.{band}", f"word_emb.emb_layers.{band}.weight")
        theirs.put(f"head.biases.{band}", f"crit.out_layers.{band}.bias")
        theirs.same(f"crit.out_layers.{band}.weight", f"inputs.words.{band}")
        if projected:
            theirs.put(f"inputs.projections.{band}", into.format(band))
            ours = "head.head_projection" if band == 0 else f"head.projections.{band - 1}"
            theirs.put(ours, (into if out.format(band) not in theirs else out).format(band))
    if bands > 1:
        # the original scores classes after the first projection, and numbers them from the last to the first
        order = slice(None) if hugging_face else torch.arange(bands - 2, -1, -1)
        first = (out if out.format(0) in theirs else into).format(0)
        theirs.put("head.classes", "crit.cluster_weight", first, make=lambda rows, wide: (rows @ wide.T)[order])
        theirs.put(f"head.biases.{bands}", "crit.cluster_bias", make=lambda biases: biases[order])
    else:
        theirs.filled["head.classes"] = torch.empty(0, width)
        theirs.filled["head.biases.1"] = torch.empty(0)
    for number in range(layers):
        _xl_layer(theirs, f"layers.{number}", number, shared)
    if shared:
        _xl_biases(theirs, "", 0)
    symbols = None if vocabulary is None else read_symbols(vocabulary, cutoffs[-1])
    return theirs.finish(make_model(options_of("transformer-xl", options)), symbols, None)


def _xl_layer(theirs: CheckpointTensors, layer: str, number: int, shared: bool) -> None:
    joint = f"{layer}.dec_attn.qkv_net.weight"
    theirs.put(f"{layer}.query.weight", joint, make=lambda qkv: qkv.chunk(3)[0])
    theirs.put(f"{layer}.key_value.weight", joint, make=lambda qkv: torch.cat(qkv.chunk(3)[1:]))
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
        if repeated in theirs and name in theirs and torch.equal(theirs.tensors[repeated], theirs.tensors[name]):
            theirs.mapped[repeated] = "biases.0"


def _xl_biases(theirs: CheckpointTensors, place: str, number: int) -> None:
    names = [f"{place}r_w_bias", f"{place}r_r_bias"]
    theirs.put(f"biases.{number}", *names, make=lambda *both: torch.stack(both))


def read_symbols(path: Path, size: int) -> Vocabulary:
    """Read one symbol per line, in the order of ids: words, or byte values in decimal with `<eos>` for the newline."""
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
        values = [10 if symbol == "<eos>" else int(symbol) for symbol in symbols]
        if max(values) > 255 or len(set(values)) < len(values):
            raise ModelError(f"{path}: expected byte values, each once, from 0 to 255 (got {len(set(values))} up to "
                             f"{max(values)})")  # fmt: skip
        return ByteVocabulary(values)
    return WordVocabulary(symbols)
