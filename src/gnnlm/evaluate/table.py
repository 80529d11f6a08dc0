"""Tables of figures: what a column shows of a row, for the terminal, Markdown, HTML and CSV.

A cell is a text, a number or None (unknown). How a number is shown is decided by its column, so that CSV and JSON keep
all digits.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable

from gnnlm.evaluate.change import PerplexityChange, short

Cell = str | float | int | None


class MarkedText(str):
    """A text with a marked part. As a plain string it has the marks of Markdown; a page may style the part instead.

    >>> MarkedText("a ", "gold", " token"), MarkedText("a ", "next", " token", "_")
    ('a **gold** token', 'a _next_ token')
    """

    before: str
    part: str
    after: str
    mark: str

    def __new__(cls, before: str, part: str, after: str, mark: str = "**") -> MarkedText:
        marked = super().__new__(cls, f"{before}{mark}{part}{mark}{after}")
        marked.before = before
        marked.part = part
        marked.after = after
        marked.mark = mark
        return marked


@dataclass(frozen=True)
class Column:
    """A column: its name, the value that it takes from a row, and how its numbers are shown (text is shown as is)."""

    name: str
    value: Callable[[Any], Cell]
    shown: Callable[[Any], str] = str

    def show(self, cell: Cell) -> str:
        if cell is None:
            return "-"
        return cell if isinstance(cell, str) else self.shown(cell)

    @property
    def is_text(self) -> bool:
        return self.shown is str


def text(name: str, value: Callable[[Any], Cell]) -> Column:
    return Column(name, value)


def number(name: str, value: Callable[[Any], Cell], digits: int = 2) -> Column:
    """
    >>> column = number("x", lambda row: row, 1)
    >>> column.show(1234.56), column.show(None)
    ('1,234.6', '-')
    """
    return Column(name, value, lambda value: f"{value:,.{digits}f}")


def percent(name: str, value: Callable[[Any], Cell], digits: int = 1, sign: bool = False) -> Column:
    """A share, shown in percent."""
    return Column(name, value, lambda share: f"{100 * share:{'+' if sign else ''}.{digits}f}%")


def perplexity(name: str, value: Callable[[Any], Cell]) -> Column:
    return Column(name, value, short)


def change_columns(name: str, value: Callable[[Any], PerplexityChange], heading: str = "change, 95%") -> list[Column]:
    """A perplexity of a row and its change."""
    return [perplexity(name, lambda row: value(row).ppl), text(heading, lambda row: value(row).words)]


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; `name` is the CSV file's. `sorts`: the rows mean something in any order."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sorts: bool = True

    @classmethod
    def of(cls, name: str, caption: str, rows: Iterable[Any], *columns: Column, sorts: bool = True) -> Table:
        """Take the value of every column from every row."""
        return cls(name, caption, columns, [[column.value(row) for column in columns] for row in rows], sorts)

    def cells(self) -> list[list[str]]:
        """Every cell as it is shown."""
        return [[column.show(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]

    def csv(self) -> str:
        """
        >>> Table.of("t", "", [("x", 1.25)], text("a", lambda row: row[0]), number("b", lambda row: row[1], 0)).csv()
        'a,b\\r\\nx,1.25\\r\\n'
        """
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow([column.name for column in self.columns])
        writer.writerows([["" if cell is None else cell for cell in row] for row in self.rows])
        return file.getvalue().encode("utf-8", "backslashreplace").decode()  # names of files may hold what is no text

    def rich(self, title: str) -> RichTable:
        """The table for a terminal: the first column on the left, figures on the right."""
        table = RichTable(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for place, column in enumerate(self.columns):
            table.add_column(column.name, justify="right" if place else "left", no_wrap=True)
        for cells in self.cells():
            table.add_row(*cells)
        return table

    def markdown(self) -> list[str]:
        """The lines of the table in Markdown, its text taken as it is: the first column left, figures right."""
        lines = ["| " + " | ".join(cells) + " |" for cells in self.cells()]
        head = "| " + " | ".join(column.name for column in self.columns) + " |"
        return [head, "|---" + "|--:" * (len(self.columns) - 1) + "|", *lines]
