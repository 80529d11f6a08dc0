"""The options of writing: one model that Python, the command line, HTTP and lm-eval fill in.

A new option is a field here: the command line derives its options from the model, HTTP's bodies inherit it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gnnlm.config.messages import expected, show
from gnnlm.errors import ConfigError

SHOWN_SOURCES = 4  # sources of a token
LARGEST_SEED = 2**63 - 1
OWN_PAST = "Look up what the text itself said before, where the base model no longer sees it."


def _stop_strings(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) and one for one in strings):
        raise ValueError(f"expected strings that are not empty, got {show(value)}")
    return tuple(strings)


class TextOptions(BaseModel):
    """How a text is written: the options that mean the same to every caller."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the likeliest token each time.")
    top_k: int = Field(0, ge=0, le=2**31, description="Sample among the k likeliest tokens only; 0: all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample among the likeliest tokens with this total probability.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Drop tokens below this share of the likeliest one's probability."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="Above 1: tokens that have appeared become less likely."
    )
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = Field((), description="End before this text.")
    n: int = Field(1, ge=1, le=1024, description="Texts for each prompt.")
    draft: bool = Field(True, description="Drafts from the book make writing faster and never change the text.")
    own_past: bool = Field(False, description=OWN_PAST)


class GenerateOptions(TextOptions):
    """The options of `Book.generate`."""

    predictor: str | None = Field(None, description="base, knn, gnn or gnn_knn. Default: the best.")
    max_tokens: int = Field(64, ge=1, le=1_000_000, description="The most tokens to write.")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Equal seeds write equal texts.")
    sources: int = Field(SHOWN_SOURCES, ge=0, description="The most sources listed for each token.")

    @classmethod
    def checked(cls, **values: Any) -> GenerateOptions:
        """Return options from values by name; refuse the first bad one in one line.

        >>> GenerateOptions.checked(top_p=2.0)
        Traceback (most recent call last):
        ...
        gnnlm.errors.ConfigError: top_p: expected a number above 0 and at most 1, got 2.0
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                known = ", ".join(sorted(cls.model_fields))
                message = f"no option named {name!r}; there are {known}, only, exclude, chat and attach"
            elif first["type"] == "value_error":  # raised by a check of ours
                message = f"{name}: {first['ctx']['error']}"
            else:
                message = f"{name}: expected {expected(cls, (name,))}, got {show(first['input'])}"
            raise ConfigError(message) from error
