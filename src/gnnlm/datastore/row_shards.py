"""Arrays with a line per row, made shard by shard: states, codes or tables of a segment, neighbours of a split.

The shards depend on what is made alone. So the bytes are the same whether the arrays are made at once, resumed, made in
memory or by several processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gnnlm.artifact import Array, Draft
from gnnlm.engine import Arrays, Spread, Task, Work
from gnnlm.progress import Track


class Layout(NamedTuple):
    """The shape and the type of an array."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike


class RowShards(ABC):
    """Arrays with one line per row, and the shards they are made in.

    >>> class Squares(RowShards):
    ...     layouts = {"squares": Layout((5,), np.int64)}
    ...     ends = [2, 4, 5]
    ...     def make(self, shard):
    ...         return {"squares": np.arange(([0] + self.ends)[shard], self.ends[shard]) ** 2}
    >>> Squares().in_memory()["squares"].tolist()
    [0, 1, 4, 9, 16]
    """

    @property
    @abstractmethod
    def layouts(self) -> Mapping[str, Layout]:
        """The arrays by name."""

    @property
    @abstractmethod
    def ends(self) -> Sequence[int]:
        """The row after the last of each shard."""

    @abstractmethod
    def make(self, shard: int) -> Arrays:
        """Return the rows of one shard in every array."""

    def counts(self, made: Arrays) -> Mapping[str, int]:
        """Return what is counted in the rows of a shard; `write` adds it up in the draft's notes."""
        return {}

    @property
    def rows(self) -> int:
        return next(iter(self.layouts.values())).shape[0]

    def in_memory(self) -> dict[str, Array]:
        """Return all rows."""
        shards = [self.make(number) for number in range(len(self.ends))]
        if len(shards) == 1:
            return dict(shards[0])
        return {name: np.concatenate([shard[name] for shard in shards]) for name in self.layouts}

    def write(self, draft: Draft, label: str, unit: str, prefix: str = "", tasks: ShardTasks | None = None) -> float:
        """Write the arrays into a draft, each to `{prefix}{name}.npy`; resumes after the last complete shard.

        The shards are made here, or by `tasks` of an engine. Returns the seconds it took, over all attempts.
        """
        writers = {name: draft.writer(f"{prefix}{name}.npy", *layout) for name, layout in self.layouts.items()}
        done = next(iter(writers.values())).rows
        assert done in (0, *self.ends), "shards must not change between attempts"
        missing = [number for number, end in enumerate(self.ends) if end > done]
        note = f"{prefix}seconds"
        before = draft.notes.get(note, 0.0)
        with Track(label, self.rows, unit, done) as track:
            for shard in map(self.make, missing) if tasks is None else tasks.make(self, draft, missing):
                for name, writer in writers.items():
                    writer.append(shard[name])
                for name, count in self.counts(shard).items():
                    draft.notes[f"{prefix}{name}"] = draft.notes.get(f"{prefix}{name}", 0) + count
                draft.notes[note] = before + track.seconds
                draft.commit()
                track.advance(len(next(iter(shard.values()))))
        return float(draft.notes.get(note, 0.0))


@dataclass(frozen=True)
class ShardTasks:
    """Makes shards as tasks of an engine; `where` names the part in each task, `reads` is what the tasks read."""

    spread: Spread
    kind: str
    where: Mapping[str, Any]
    reads: tuple[str, ...] = ()

    def make(self, part: RowShards, draft: Draft, shards: Sequence[int]) -> Iterator[Arrays]:
        name = ".".join([self.kind, *map(str, self.where.values())])
        tasks = [Task(self.kind, f"{name}.{shard:06d}", {**self.where, "shard": shard}, self.reads) for shard in shards]
        return self.spread.arrays(draft.shards, work_of(lambda **_: part), tasks)


def shards_of_rows(rows: int, size: int) -> list[int]:
    """Return the ends of shards of `size` rows.

    >>> shards_of_rows(5, 2)
    [2, 4, 5]
    """
    return [*range(size, rows, size), rows] if rows else []


def work_of(opened: Callable[..., RowShards]) -> Work:
    """Return the work of tasks that make shards: `opened` returns the part that a task's other arguments name."""
    latest = lru_cache(maxsize=1)(opened)

    def work(shard: int, **where: Any) -> Arrays:
        return latest(**where).make(shard)

    return work
