"""A table whose lines are spread over the segments of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnlm.datastore.quantize import CodedTable

Table = Tensor | CodedTable


@dataclass(frozen=True)
class JoinedTable:
    """Tables laid end to end, read by line as one; they are all plain, or all coded with the same quantizer.

    >>> JoinedTable([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]).gather(torch.tensor([[2, 0]]))
    tensor([[[3.],
             [1.]]])
    """

    tables: Sequence[Table]

    @cached_property
    def _bases(self) -> Tensor:
        return torch.tensor([0, *map(len, self.tables)]).cumsum(0)

    @property
    def width(self) -> int:
        first = self.tables[0]
        return first.shape[1] if isinstance(first, Tensor) else first.width

    def __len__(self) -> int:
        return int(self._bases[-1])

    def gather(self, lines: Tensor) -> Tensor:
        """The lines in the space of the tables, [..., C]."""
        flat = lines.flatten()
        bases = self._bases.to(lines.device)
        number_N = torch.searchsorted(bases, flat, right=True) - 1
        out: Tensor | None = None
        for number in number_N.unique().tolist():
            here = torch.nonzero(number_N == number)[:, 0]
            table, rows = self.tables[number], flat[here] - bases[number]
            found = table.index_select(0, rows) if isinstance(table, Tensor) else table.gather(rows)
            if out is None:
                out = found.new_empty(len(flat), self.width)
            out[here] = found
        return torch.empty(*lines.shape, self.width) if out is None else out.view(*lines.shape, -1)

    def enter(self, queries: Tensor) -> Tensor:
        """Queries in the space of `gather`."""
        first = self.tables[0]
        return queries if isinstance(first, Tensor) else first.enter(queries)

    def leave(self, averages: Tensor) -> Tensor:
        """Averages of gathered lines as averages of vectors."""
        first = self.tables[0]
        return averages if isinstance(first, Tensor) else first.leave(averages)


def joined_table(tables: Sequence[Table]) -> Table | JoinedTable:
    return tables[0] if len(tables) == 1 else JoinedTable(tables)
