"""A run that is open for reading at one of its generations."""

from __future__ import annotations

from dataclasses import dataclass

from gnnlm.engine import HERE, Engine
from gnnlm.errors import ArtifactError
from gnnlm.generation import Lease, current_number, pinned
from gnnlm.predict.open_book import OpenBook, Reading
from gnnlm.run.run import Run
from gnnlm.run.serving import Serving, check_trained, outdated


@dataclass(frozen=True)
class Opened:
    """The parts of a run at a generation, and the lease on it, which ends with this object."""

    run: Run
    parts: Serving
    lease: Lease

    @classmethod
    def open(cls, run: Run, engine: Engine = HERE) -> Opened:
        """Open a finished run at its current generation; an unfinished or stale one is refused before it is loaded."""
        generation, lease = pinned(run.root)
        try:
            run.open_all()
            run.use(engine)
            if generation is not None:
                check_trained(run, generation)
            parts = Serving(run, generation)
            parts.open_all()
        except BaseException:
            lease.release()
            raise
        return cls(run, parts, lease)

    @property
    def generation(self) -> int:
        return self.parts.generation

    def moved_on(self) -> Opened | None:
        """The same run at its current generation; None if that is the one which is open."""
        if current_number(self.run.root) == self.generation:
            return None
        generation, lease = pinned(self.run.root)
        try:
            if generation is not None and outdated(self.run, generation):
                raise ArtifactError(f"{self.run.root} was rebuilt since it was opened; open it again")
            parts = Serving(self.run, generation, before=self.parts)
            parts.open_all()
        except BaseException:
            lease.release()
            raise
        return Opened(self.run, parts, lease)

    def model(self) -> OpenBook:
        config, parts = self.run.config, self.parts
        lm, store = config.lm, config.store
        reading = Reading(lm.window, lm.context, store.key, store.dtype, lm.whole_lines)
        return OpenBook(parts.lm, parts.store, parts.index, parts.predictor, reading)
