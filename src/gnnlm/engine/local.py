"""The local engine: tasks one after the other in this process, with all its threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnnlm.engine.engine_protocol import Held, Place, Recipe, Spread
from gnnlm.engine.shard_task import here


class LocalEngine:
    """This process. It has all it needs at hand, so it needs no recipe."""

    @property
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def check(self, root: Path, models: Mapping[str, Callable[[], str]]) -> None:
        pass

    def spread(self, place: Place, recipe: Recipe) -> Spread:
        return here

    def groups(self, count: int) -> int:
        return 0

    def hold(self, place: Place, openers: Sequence[Callable[[Path], Any]]) -> Held:
        raise AssertionError("this process opens its segments itself")


HERE = LocalEngine()
