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
        """Return the lines in the space of the tables, [..., C].

        Everything is read from the table with the most lines, and what belongs to others is put in its place: copying
        some lines takes longer than reading all.
        """
        flat = lines.flatten()
        bases = self._bases.to(lines.device)
        number_N = torch.searchsorted(bases, flat, right=True) - 1
        counts = number_N.bincount(minlength=len(self.tables))
        most = int(counts.argmax())
        out_NC = self._read(most, (flat - bases[most]).clamp(0, len(self.tables[most]) - 1))
        for number in counts.nonzero()[:, 0].tolist():
            if number != most:
                here = torch.nonzero(number_N == number)[:, 0]
                out_NC[here] = self._read(number, flat[here] - bases[number])
        return out_NC.view(*lines.shape, self.width)

    def _read(self, number: int, rows: Tensor) -> Tensor:
        table = self.tables[number]
        return table.index_select(0, rows) if isinstance(table, Tensor) else table.gather(rows)

    def enter(self, queries: Tensor) -> Tensor:
        """Return queries in the space of `gather`."""
        first = self.tables[0]
        return queries if isinstance(first, Tensor) else first.enter(queries)

    def leave(self, averages: Tensor) -> Tensor:
        """Return averages of gathered lines as averages of vectors."""
        first = self.tables[0]
        return averages if isinstance(first, Tensor) else first.leave(averages)


def joined_table(tables: Sequence[Table]) -> Table | JoinedTable:
    return tables[0] if len(tables) == 1 else JoinedTable(tables)
