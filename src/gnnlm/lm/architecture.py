"""The paper's base models by name, and smaller ones like them."""

from __future__ import annotations

from typing import Any

from gnnlm.config import SCRATCH, ArchitectureConfig, LMConfig
from gnnlm.errors import ConfigError
from gnnlm.lm.native_lm import NativeModel, NativeOptions, make_model, options_of
from gnnlm.progress import warn

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "wikitext103": ("adaptive", {}),  # the defaults of AdaptiveOptions are this model
    "one-billion-word": (
        "adaptive",
        {
            "width": 1536,
            "layers": 24,
            "ffn": 8192,
            "cutoffs": (60_000, 160_000),
            "dropout": 0.1,
            "activation_dropout": 0.0,
            "softmax_dropout": 0.0,
        },
    ),
    "enwik8": ("transformer-xl", {}),  # the defaults of TransformerXLOptions are this model
}
ONLY_XL = ("segment", "memory")
ONLY_ADAPTIVE = ("activation_dropout", "softmax_dropout")


def build_model(config: ArchitectureConfig, vocab_size: int) -> NativeModel:
    """Return a model of the configured architecture, with initial weights."""
    return make_model(resolve_architecture(config, vocab_size)[1])


def resolve_architecture(config: ArchitectureConfig, vocab_size: int) -> tuple[str, NativeOptions]:
    """Return the kind of the configured model and its options; the preset fills fields that are left open."""
    kind, preset = PRESETS[config.preset]
    chosen = config.model_dump(exclude={"preset"}, exclude_none=True)
    wrong = [name for name in (ONLY_ADAPTIVE if kind == "transformer-xl" else ONLY_XL) if name in chosen]
    if wrong:
        raise ConfigError(f"lm.architecture.{wrong[0]} is not a field of preset {config.preset}, a {kind} model")
    options = options_of(kind, {**preset, **chosen, "vocab_size": vocab_size})
    if options.width % options.heads:
        raise ConfigError(f"lm.architecture.heads must divide its width {options.width} (got {options.heads})")
    if options.width % 2 and kind == "transformer-xl":
        raise ConfigError(f"lm.architecture.width must be even, for sines and cosines (got {options.width})")
    if list(options.cutoffs) != sorted(set(options.cutoffs)) or (options.cutoffs and options.cutoffs[0] < 1):
        raise ConfigError(f"lm.architecture.cutoffs must increase, from at least 1 (got {list(options.cutoffs)})")
    if options.width < options.factor ** (len(options.bands) - 1):
        raise ConfigError(
            f"lm.architecture.factor {options.factor:g} leaves no width for the last of {len(options.bands)} bands "
            f"(the model's width is {options.width}); lower the factor, or give fewer cutoffs"
        )
    if len(options.bands) > 1 and options.factor == 1 and kind == "transformer-xl":
        raise ConfigError("lm.architecture.cutoffs need a factor above 1 in a transformer-xl")
    return kind, options


def warn_of_positions(config: LMConfig) -> None:
    """Warn if a model with absolute positions would be read at positions that it was not trained on."""
    absolute = config.model == SCRATCH and PRESETS[config.architecture.preset][0] == "adaptive"
    if absolute and config.window > config.train.block:
        warn(
            f"lm.window is {config.window}, longer than lm.train.block: the model will be read at positions that it "
            f"has never seen, and predict badly there; set lm.window to at most {config.train.block}"
        )
