"""The options of a GNN, resolved from the config and its preset.

`paper` follows the equations as printed, `released` the public code, and `default` is what measured best here. A field
set in the config overrides the preset.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.config import GnnConfig
from gnnlm.config.presets import PRESETS
from gnnlm.errors import ConfigError

COSINE_UNIT = 0.01  # the usual tuned temperature of kNN-LMs


@dataclass(frozen=True)
class GnnOptions:
    """All options with their final values, as a checkpoint stores them."""

    base_width: int
    width: int
    layers: int
    heads: int
    left: int
    right: int
    context: int
    dropout: float
    inter: str
    neighbour_updates: bool
    self_loops: bool
    combine: str
    norm: str
    bias: bool
    scale: str
    mu: str
    zero_start: bool
    edge_bias: bool
    token_features: bool
    similarity_unit: float
    copying: bool
    similarity_best: float
    attention_dropout: float
    neighbour_dropout: float
    typed_input: bool

    @property
    def window(self) -> int:
        return self.left + 1 + self.right

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def inter_slots(self) -> slice:
        """The window slots that inter edges lead from."""
        return slice(0, self.window) if self.inter == "window" else slice(self.left, self.left + 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def similarity_unit(metric: str, similarity: npt.NDArray[np.float32]) -> float:
    """Return the scale on which differences of similarity matter.

    It is `COSINE_UNIT` for cosine, and measured on a neighbour table for metrics without a natural scale.
    """
    if metric == "cosine":
        return COSINE_UNIT
    nearest = -similarity[:, 0]
    nearest = nearest[np.isfinite(nearest)]
    return max(1e-6, 0.1 * float(np.median(nearest))) if len(nearest) else 1.0


def similarity_best(metric: str) -> float:
    """Return the similarity of a state with itself."""
    return 1.0 if metric == "cosine" else 0.0


def resolve_options(config: GnnConfig, base_width: int, unit: float = COSINE_UNIT, best: float = 1.0) -> GnnOptions:
    """Fill what the config leaves open from the preset and the base model's width.

    >>> resolve_options(GnnConfig(), 576).heads
    9
    """
    width = config.width or base_width
    heads = config.heads or max(h for h in range(1, max(1, width // 64) + 1) if width % h == 0)
    if width % heads:
        raise ConfigError(f"gnn.heads must divide the GNN's width {width} (got {heads})")
    options = {**PRESETS[config.preset]["gnn"], **config.model_dump(exclude={"preset"}, exclude_none=True)}
    can_copy = options["token_features"] and options["edge_bias"] and width == base_width
    if config.copying and not can_copy:
        raise ConfigError("gnn.copying needs gnn.token_features, gnn.edge_bias and the base model's width")
    options |= {
        "base_width": base_width,
        "width": width,
        "heads": heads,
        "similarity_unit": unit,
        "similarity_best": best,
        "copying": options["copying"] and can_copy,
    }
    return GnnOptions(**options)
