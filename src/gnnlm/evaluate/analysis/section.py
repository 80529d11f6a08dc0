"""What a part of the analysis shows: sentences, tables and figures, whatever they are written to.

A cell of a table is a text, a number or None (not known). How a number is shown is the column's business, so that
CSV and JSON keep all its digits.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnnlm.evaluate.report_tables import change_words, short

Cell = str | float | int | None


class Marked(str):
    """A text with a marked part: as a plain string, with the marks that Markdown shows; a page may style the part.

    >>> Marked("a ", "gold", " token"), Marked("a ", "next", " token", "_")
    ('a **gold** token', 'a _next_ token')
    """

    before: str
    part: str
    after: str
    mark: str

    def __new__(cls, before: str, part: str, after: str, mark: str = "**") -> Marked:
        made = super().__new__(cls, f"{before}{mark}{part}{mark}{after}")
        made.before, made.part, made.after, made.mark = before, part, after, mark
        return made


@dataclass(frozen=True)
class Column:
    """A column's name and how its numbers are shown; text is shown as it is."""

    name: str
    shown: Callable[[Any], str] = str

    def show(self, cell: Cell) -> str:
        if cell is None:
            return "-"
        return cell if isinstance(cell, str) else self.shown(cell)

    @property
    def is_text(self) -> bool:
        return self.shown is str


def text(name: str) -> Column:
    return Column(name)


def number(name: str, digits: int = 2) -> Column:
    """
    >>> number("x", 1).show(1234.56), number("x").show(None)
    ('1,234.6', '-')
    """
    return Column(name, lambda value: f"{value:,.{digits}f}")


def perplexity(name: str = "ppl") -> Column:
    return Column(name, short)


def percent(name: str, digits: int = 1, sign: bool = False) -> Column:
    """A share, shown in percent."""
    return Column(name, lambda value: f"{100 * value:{'+' if sign else ''}.{digits}f}%")


def change(point: float | None, low: float | None, high: float | None) -> str:
    """A change of perplexity with its 95% interval, as everywhere in the project."""
    return change_words(point, low, high)


def change_of(row: Mapping[str, Any]) -> str:
    """The change of a row as `Subject.changed` gives it."""
    return change(row["change"], row["change_low"], row["change_high"])


@dataclass(frozen=True)
class Table:
    """Rows under columns; `name` is the file that the CSV is written to. `sorts`: rows mean something in any order."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sorts: bool = True

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.name

    def cells(self) -> list[list[str]]:
        """Every cell as it is shown."""
        return [[column.show(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]

    def csv(self) -> str:
        """
        >>> Table("t", "", [text("a"), number("b", 0)], [["x", 1.25]]).csv()
        'a,b\\r\\nx,1.25\\r\\n'
        """
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow([column.name for column in self.columns])
        writer.writerows([["" if cell is None else cell for cell in row] for row in self.rows])
        return file.getvalue().encode("utf-8", "backslashreplace").decode()  # names of files may hold what is no text


@dataclass(frozen=True)
class Figure:
    """A matplotlib figure, the name of its files, its caption, and what it shows in words."""

    name: str
    caption: str
    alternative: str
    figure: Any


@dataclass(frozen=True)
class Section:
    """A part as it is shown. `summary` are sentences that the page's summary may take, the most telling first."""

    name: str
    title: str
    sentences: Sequence[str]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    summary: Sequence[str] = field(default=())
