"""What every section of a config has in common, and what every training has."""

from __future__ import annotations

import copy
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A group of fields; frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Training(Section):
    """What every training has in common; its kinds differ in defaults."""

    lr: float = Field(2.5e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, on parameters of two or more dimensions.")
    warmup: int = Field(200, ge=0, description="Steps of linear warm-up.")
    clip: float = Field(0.25, gt=0, description="Gradient norm is clipped to this.")
    accumulate: int = Field(1, gt=0, description="Forward passes in a step.")
    validate_every: int = Field(500, gt=0, description="Steps between validations, which are also checkpoints.")
    valid_tokens: int = Field(16_384, gt=0, description="Valid tokens looked at while training.")
    patience: int = Field(5, gt=0, description="Stop after this many validations without a better one.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's betas.")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of training.")

    @model_validator(mode="after")
    def _betas_in_range(self) -> Training:
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in 0..1, 1 excluded (got {self.betas})")
        return self


def default(section: type[Section], name: str, value: Any) -> Any:
    """A field of a section with another default, for a section that derives from it."""
    field = copy.copy(section.model_fields[name])
    field.default = value
    return field
