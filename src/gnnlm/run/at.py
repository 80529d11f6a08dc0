"""A run at one of its generations, so that stages can be built from what is served instead of what was built."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from gnnlm.artifact import Artifact
from gnnlm.corpus.stream import SPLITS
from gnnlm.engine import Spread, here
from gnnlm.generation import Generation
from gnnlm.run.run import Run
from gnnlm.run.serving import Serving


class RunAt(Run):
    """A run whose parts and trained artifacts are those of a generation, which need not be committed yet.

    A stage that is built with it reads the generation's store; its tasks run in this process, since no other knows the
    generation.
    """

    def __init__(self, run: Run, generation: Generation, splits: Sequence[str] = SPLITS) -> None:
        super().__init__(run.config, reading=True)
        self.engine, self.generation = run.engine, generation
        self._run, self.splits = run, splits

    @cached_property
    def parts(self) -> Serving:
        return Serving(self._run, self.generation, splits=self.splits)

    def artifact(self, name: str) -> Artifact:
        """What stands for a stage at the generation, without segments."""
        return self.parts.trained(name)

    def spread(self, stage: str) -> Spread:
        return here

    @property
    def curves(self) -> Path:
        return self.root / "tensorboard" / f"refit-{self.generation.number + 1}"
