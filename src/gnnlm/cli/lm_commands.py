"""The commands for base models: train, fine-tune, describe, score an n-gram, convert."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnlm.cli.options import AsJson, ConfigPath, DataDir, Finish, Overrides, Rebuild, one_stage, open_config, out
from gnnlm.config import SCRATCH
from gnnlm.errors import ConfigError
from gnnlm.evaluate.ngram import score_ngram
from gnnlm.progress import say, warn
from gnnlm.run import Run

# Modules that load torch are imported by the commands that need them: the others, and --help, start at once.

lm = typer.Typer(help="Base models: train, fine-tune, convert, describe.", no_args_is_help=True, rich_markup_mode=None)
convert = typer.Typer(help="Convert checkpoints of other programs.", no_args_is_help=True, rich_markup_mode=None)
lm.add_typer(convert, name="convert")


@lm.command(name="train")
def lm_train(
    config: ConfigPath,
    set_: Overrides = None,
    data_dir: DataDir = None,
    rebuild: Rebuild = False,
    finish: Finish = False,
) -> None:
    """Train the base model of a config (lm.model: scratch) on its corpus."""
    made = open_config(config, set_, data_dir)
    if made.config.lm.model != SCRATCH:
        raise ConfigError(
            f"lm.model is {made.config.lm.model}, which is already trained; set lm.model to scratch, or use gnnlm lm "
            "finetune"
        )
    _train_lm(made, rebuild, finish)


@lm.command()
def finetune(
    config: ConfigPath,
    set_: Overrides = None,
    data_dir: DataDir = None,
    rebuild: Rebuild = False,
    finish: Finish = False,
) -> None:
    """Fine-tune the base model of a config (lm.finetune) on its corpus."""
    made = open_config(config, set_, data_dir)
    if made.config.lm.finetune.kind == "none":
        raise ConfigError("lm.finetune.kind is none; set it to full or lora")
    _train_lm(made, rebuild, finish)


def _train_lm(made: Run, rebuild: bool, finish: bool) -> None:
    made.build("corpus")
    made.finish_training = finish
    one_stage(made, "lm", rebuild)


@lm.command(name="describe")
def lm_describe(config: ConfigPath, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Show the sizes of a config's base model and graph network."""
    from gnnlm.run.planning import model_sizes

    made = open_config(config, set_)
    sizes = model_sizes(made)
    gnn_width = made.config.gnn.width or sizes.width
    together = sizes.parameters + sizes.gnn_parameters
    say(f"base model: {sizes.parameters:,} parameters, width {sizes.width}, vocabulary {sizes.vocabulary:,}")
    say(f"graph network: {sizes.gnn_parameters:,} parameters, width {gnn_width}; together {together:,}")
    say(f"receptive field: {sizes.receptive_field:,} tokens")
    if as_json:
        print(json.dumps({**asdict(sizes), "gnn_width": gnn_width}))


@lm.command()
def ngram(
    config: ConfigPath,
    set_: Overrides = None,
    order: Annotated[int, typer.Option(min=1, help="Length of the n-grams, in tokens.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Score the test split with an interpolated n-gram model, the baseline that a base model has to beat."""
    made = open_config(config, set_)
    found = score_ngram(made.snapshot.streams, made.config.lm.continuous, made.artifact("corpus").facts, order)
    say(
        f"interpolated {order}-gram (Kneser-Ney): perplexity {found.ppl:.2f}, {found.bits_per_byte:.3f} bits per "
        f"byte on {found.test_tokens:,} test tokens"
    )
    if as_json:
        print(json.dumps(asdict(found)))


Checkpoint = Annotated[Path, typer.Argument(metavar="MODEL", help="The checkpoint, .pt or .safetensors.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The directory to write.")]


@convert.command()
def fairseq(
    model: Checkpoint,
    out_: Out,
    dictionary: Annotated[Path | None, typer.Option("--dict", metavar="FILE", help="fairseq's dict.txt.")] = None,
    heads: Annotated[
        int | None, typer.Option(help="Number of attention heads, if the checkpoint does not record it.")
    ] = None,
) -> None:
    """Convert an adaptive-input language model of fairseq (adaptive_lm_wiki103.v2, adaptive_lm_gbw_huge)."""
    from gnnlm.lm.convert_fairseq import convert_fairseq

    _save_converted(convert_fairseq(model, dictionary, heads), out_)


@convert.command(name="transformer-xl")
def transformer_xl(
    model: Checkpoint,
    out_: Out,
    segment: Annotated[int, typer.Option(help="Tokens read at once.")] = 512,
    memory: Annotated[int, typer.Option(help="Earlier tokens that each layer attends to.")] = 512,
    vocabulary: Annotated[
        Path | None,
        typer.Option("--vocab", metavar="FILE", help="The vocabulary: one symbol per line, in the order of ids."),
    ] = None,
    same_length: Annotated[bool, typer.Option("--same-length", help="All tokens attend equally far back.")] = False,
    clamp: Annotated[int | None, typer.Option(help="Clamp relative distances to this value (-1: no limit).")] = None,
    pre_norm: Annotated[bool, typer.Option("--pre-norm", help="Layer norms come before the sublayers.")] = False,
) -> None:
    """Convert a state dict with the tensor names of the original Transformer-XL, or of its port to transformers."""
    from gnnlm.lm.convert_transformer_xl import convert_transformer_xl

    _save_converted(convert_transformer_xl(model, segment, memory, vocabulary, same_length, clamp, pre_norm), out_)


def _save_converted(made: Any, folder: Path) -> None:
    made.lm.save(folder)
    for theirs, ours in made.mapped.items():
        out.print(f"{theirs} -> {ours}", markup=False, soft_wrap=True)
    for name in made.without_weight:
        out.print(f"{name}: not a weight, skipped", markup=False, soft_wrap=True)
    for name in made.unused:
        warn(f"not used: {name}")
    say(f"{folder}: {len(made.mapped)} tensors mapped, {len(made.unused)} not used, none missing")
