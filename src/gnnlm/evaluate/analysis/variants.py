"""The changes that the part `components` makes to a run, one at a time; forks of the run train them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnnlm.config import Config
from gnnlm.config.presets import PRESETS
from gnnlm.errors import ConfigError
from gnnlm.evaluate.compare import ComparableRun

CODE_SIZES = (16, 32, 64, 128)  # bytes of a state under product quantization, about
CONTEXTS = (32, 64, 128, 256, 512)
GROUPS = {
    "presets": "preset",
    "window": "l = r",
    "layers": "layers",
    "inter": "inter edges",
    "updates": "neighbour updates",
    "context": "context",
    "codec": "neighbour states",
    "copying": "copying",
    "leakage": "leakage rule",
}


@dataclass(frozen=True)
class Variant:
    """One thing changed: config fields and their values, in words, and the name of the fork that has them."""

    name: str
    group: str
    words: str
    changes: Mapping[str, Any]

    def is_run(self, config: Config) -> bool:
        """Whether the run has these values already."""
        return all(resolved(config, field) == value for field, value in self.changes.items())


@dataclass(frozen=True)
class ForkResult:
    """A fork that has been trained and evaluated: its figures, and the seconds that training took."""

    run: ComparableRun
    parameters: int
    seconds: float


@dataclass(frozen=True)
class ForkTraining:
    """The variants to train, each for so many steps; `train` trains a fork, or finds it trained."""

    variants: Sequence[Variant]
    steps: int
    train: Callable[[Variant], ForkResult]


BASELINE = Variant("baseline", "", "as the run", {})
UNFAIR = "leakage-none"  # a demonstration, not something that one might choose


def resolved(config: Config, field: str) -> Any:
    """A field's value, or the preset's where the config leaves it open."""
    section, name = field.split(".")
    own = getattr(getattr(config, section), name)
    return own if own is not None else PRESETS[config.gnn.preset].get(section, {}).get(name)


def variants_of(config: Config, width: int) -> list[Variant]:
    """All variants, including those that equal the run; `width` is the base model's."""
    found = [
        *(Variant(f"preset-{name}", "presets", name, {"gnn.preset": name}) for name in PRESETS),
        *(Variant(f"window-{n}", "window", str(n), {"gnn.left": n, "gnn.right": n}) for n in (0, 1, 2)),
        *(Variant(f"layers-{n}", "layers", str(n), {"gnn.layers": n}) for n in (1, 2, 3, 4)),
        Variant("inter-centre", "inter", "from the centre", {"gnn.inter": "centre"}),
        Variant("inter-window", "inter", "from the whole window", {"gnn.inter": "window"}),
        Variant("updates-on", "updates", "on", {"gnn.neighbour_updates": True}),
        Variant("updates-off", "updates", "off", {"gnn.neighbour_updates": False}),
        *(Variant(f"context-{n}", "context", f"{n} tokens", {"gnn.context": n}) for n in CONTEXTS),
        Variant("codec-fp16", "codec", "fp16", {"codec.kind": "fp16"}),
        *(
            Variant(f"codec-pq{size}", "codec", f"pq, {size} bytes", {"codec.kind": "pq", "codec.bytes": size})
            for size in code_sizes(width)
        ),
        Variant("copying-on", "copying", "on", _copying(config)),
        Variant("copying-off", "copying", "off", {"gnn.copying": False}),
        Variant("leakage-document", "leakage", "document", {"search.exclude": "document"}),
        Variant("leakage-field", "leakage", "receptive-field", {"search.exclude": "receptive-field"}),
        Variant(UNFAIR, "leakage", "none", {"search.exclude": "none"}),
    ]
    assert {variant.group for variant in found} == GROUPS.keys()
    return found


def _copying(config: Config) -> dict[str, Any]:
    """Copying and the settings that it needs; only copying itself if the run has it on already."""
    if resolved(config, "gnn.copying"):
        return {"gnn.copying": True}
    return {"gnn.copying": True, "gnn.token_features": True, "gnn.edge_bias": True}


def code_sizes(width: int) -> list[int]:
    """Sizes of codes to try: divisors of the width near the usual ones.

    >>> code_sizes(576), code_sizes(32)
    ([16, 32, 64, 144], [16, 32])
    """
    divisors = [size for size in range(1, width + 1) if width % size == 0]
    return sorted({min(divisors, key=lambda size: (abs(size - wanted), size)) for wanted in CODE_SIZES})


def select_variants(variants: Sequence[Variant], named: Sequence[str]) -> list[Variant]:
    """The variants of some groups, or those named one by one; all, if none is named."""
    known = {*GROUPS, *(variant.name for variant in variants)}
    for name in named:
        if name not in known:
            names = ", ".join(variant.name for variant in variants)
            raise ConfigError(f"no component named {name!r}; expected one of {', '.join(GROUPS)}, or of {names}")
    return [variant for variant in variants if not named or variant.group in named or variant.name in named]
