"""The base class of config sections, and the fields that all kinds of training share."""

from __future__ import annotations

import copy
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from gnnlm.config.messages import MAX_INT_BITS, show

MAX_STEPS = 10_000_000  # ten times the longest training of the paper
MAX_K = 65_536
MAX_TOKENS = 10**12
Beta = Annotated[float, Field(ge=0, lt=1)]


class ConfigSection(BaseModel):
    """A group of fields: frozen, without unknown keys, its numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _usable(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what Pydantic would accept: true for 1, and text that is empty or cannot be written to a file."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        takes_bool = bool in (annotation, *get_args(annotation))
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, bool) and not takes_bool:
                raise PydanticCustomError("bool_for_another", "true or false")
            if isinstance(item, int) and item.bit_length() > MAX_INT_BITS:
                raise PydanticCustomError("too_large", "too large")
            if isinstance(item, str):
                _check_string(item)
        return value


def _check_string(text: str) -> None:
    if not text:
        raise ValueError("expected text that is not empty (got ''); give some, or remove the field")
    if "\0" in text:
        raise ValueError(f"expected text without NUL characters (got {show(text)})")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"expected text that can be written as UTF-8 (got {show(text)}); rename the file") from None


class TrainingSection(ConfigSection):
    """The fields that all kinds of training share; their defaults differ."""

    lr: float = Field(
        2.5e-4,
        gt=0,
        le=1000,
        description="Peak learning rate. Lower it when the loss diverges.",
    )
    weight_decay: float = Field(
        0.0, ge=0, le=1000, description="Weight decay. It applies to matrices, not to biases and other vectors."
    )
    warmup: int = Field(
        200, ge=0, le=MAX_STEPS, description="Steps over which the learning rate rises linearly to its peak."
    )
    clip: float = Field(
        0.25,
        gt=0,
        le=1e12,
        description="Gradients with a larger norm than this are scaled down to it. 1e12 turns clipping off.",
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=100_000,
        description="Forward passes per optimizer step. Raise it for a larger batch in the same memory.",
    )
    validate_every: int = Field(
        500, ge=1, le=MAX_STEPS, description="Steps between validations. Each validation also saves a checkpoint."
    )
    valid_tokens: int = Field(
        16_384, ge=1, le=MAX_TOKENS, description="Tokens of the valid split that each validation scores."
    )
    patience: int = Field(
        5, ge=1, le=MAX_STEPS, description="Training stops after this many validations in a row without improvement."
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="Adam's two decay rates, beta1 and beta2.")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Arithmetic of training: `fp32`, or `bf16`, which is faster on most GPUs and less exact."
    )


def default(section: type[ConfigSection], name: str, value: Any) -> Any:
    """Return a field of a section with another default, for a section that derives from it."""
    field = copy.copy(section.model_fields[name])
    field.default = value
    return field
