"""The values that `gnn.preset` sets, by section. A field that the config sets itself overrides the preset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnlm.config.config_model import Config

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "gnn": {
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "neighbour_dropout": 0.0,
            "typed_input": False,
            "inter": "window",
            "neighbour_updates": True,
            "self_loops": False,
            "combine": "sum",
            "norm": "none",
            "bias": False,
            "scale": "width",
            "mu": "type",
            "zero_start": True,
            "edge_bias": False,
            "token_features": False,
            "copying": False,
        },
        "search": {"exclude": "receptive-field"},
        "tune": {"buckets": 1, "gate": False},
    },
    "released": {
        "gnn": {
            "dropout": 0.3,
            "attention_dropout": 0.1,
            "neighbour_dropout": 0.3,
            "typed_input": True,
            "inter": "centre",
            "neighbour_updates": True,
            "self_loops": True,
            "combine": "mean",
            "norm": "post",
            "bias": True,
            "scale": "head",
            "mu": "head",
            "zero_start": False,
            "edge_bias": False,
            "token_features": False,
            "copying": False,
        },
        "search": {"exclude": "receptive-field"},
        "tune": {"buckets": 1, "gate": False},
    },
    "default": {
        "gnn": {
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "neighbour_dropout": 0.0,
            "typed_input": False,
            "inter": "window",
            "neighbour_updates": False,
            "self_loops": True,
            "combine": "sum",
            "norm": "pre",
            "bias": False,
            "scale": "head",
            "mu": "head",
            "zero_start": True,
            "edge_bias": True,
            "token_features": True,
            "copying": True,
        },
        "search": {"exclude": "document"},
        "tune": {"buckets": 8, "gate": True},
    },
}


def preset_words(config: Config) -> list[str]:
    """Return a line on what the preset of a config sets, and one on what the config overrides."""
    followed, overridden = [], []
    for section, values in PRESETS[config.gnn.preset].items():
        for name, value in values.items():
            own = getattr(getattr(config, section), name)
            if own is None or own == value:
                followed.append(f"{section}.{name} {_word(value)}")
            else:
                overridden.append(f"{section}.{name} {_word(own)} (preset: {_word(value)})")
    lines = [f"gnn.preset {config.gnn.preset} sets: {', '.join(followed) or 'nothing'}"]
    return [*lines, f"overridden by the config: {', '.join(overridden)}"] if overridden else lines


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
