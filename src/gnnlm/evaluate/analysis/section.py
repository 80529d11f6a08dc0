"""What a part of the analysis has measured, and what is shown of it: sentences, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from gnnlm.evaluate.table import Table


class PartResult(BaseModel):
    """What a part has measured, kept as JSON; tables and figures are made of it alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


@dataclass(frozen=True)
class Figure:
    """A matplotlib figure, the name of its files, its caption, and what it shows in words."""

    name: str
    caption: str
    alternative: str
    figure: Any


@dataclass(frozen=True)
class AnalysisSection:
    """A part as it is shown. `summary`: sentences that the page's summary may take, the most telling first.

    A part leaves `name` and `title` open; they are added from its `AnalysisPart`.
    """

    sentences: Sequence[str]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    summary: Sequence[str] = ()
    name: str = ""
    title: str = ""
