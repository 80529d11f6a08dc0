"""A run: a config, its directory, and which of its stages are done.

A stage is done when its artifact is complete and was built from the same inputs. A stage built from other inputs is
refused, never silently rebuilt. What is built is read through a `Snapshot`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft, Manifest, State, bytes_of, differences, plain, read_manifest, state_of
from gnnlm.artifact.ownership import check_place, damage, link_artifact, remove_other_parts, settle
from gnnlm.config import SCRATCH, Config, load_config
from gnnlm.config.paths import portable
from gnnlm.config.save import save_config
from gnnlm.corpus.stream import SPLITS
from gnnlm.engine import HERE, MISSING, Engine, Work
from gnnlm.errors import ArtifactError, ConfigError, ModelError
from gnnlm.generation import commit, current_number, pinned, read_current
from gnnlm.layout import SEGMENTS
from gnnlm.progress import log_to, say
from gnnlm.run.lock import is_locked, locked
from gnnlm.run.stages import STAGES
from gnnlm.stage import BuildContext, InputFacts, LastBuild, Stage

if TYPE_CHECKING:
    from gnnlm.run.snapshot import Snapshot  # imports torch, which a run's state does without

PAUSES = (0.1, 0.3, 1.0)  # seconds before each new attempt to open a run that is being built


class Run:
    """A config and its run directory."""

    def __init__(self, config: Config, reading: bool = False) -> None:
        """With `reading`, the run is only read, so its source text may have changed or been removed since."""
        if "\0" in config.run:
            raise ConfigError(f"run: a directory name cannot contain a NUL character (got {config.run!r})")
        self.config = config
        self.reading = reading
        self.root = Path(config.run)
        self.origin: Run | None = None  # the run whose artifacts are tried for this one
        self.engine: Engine = HERE  # where stages are built, and segments held
        self.finish_training = False  # end a half-done training now, with its best step so far
        self.force = False  # build also what does not fit by the plan
        self._open: dict[str, Artifact] = {}
        self._own_inputs: dict[tuple[str, ...], dict[str, Any]] = {}
        self._snapshot: Snapshot | None = None
        self._alone = False

    @cached_property
    def stages(self) -> dict[str, Stage]:
        """The stages of this run, in order; optional ones are included only if the config asks for them."""
        return {name: stage for name, stage in STAGES.items() if stage.is_in(self.config)}

    def parents(self, stage: Stage) -> tuple[str, ...]:
        """Return the stages of this run that a stage reads."""
        return tuple(name for name in stage.parents if name in self.stages)

    # -- state ---------------------------------------------------------------------------------------------

    def inputs(self, stage: Stage) -> dict[str, Any] | None:
        """Return what the stage would be built from now; None while a parent does not exist."""
        try:
            parents = {parent: self._manifest(parent) for parent in self.parents(stage)}
        except ArtifactError:
            return None
        made_of = {parent: manifest.fingerprint for parent, manifest in parents.items()}
        key = (stage.name, *made_of.values())
        if key not in self._own_inputs:
            facts = {parent: manifest.facts for parent, manifest in parents.items()}
            known = InputFacts(facts, self._last_build(stage.name), self.reading, identify_model)
            own = stage.inputs(self.config, known)
            self._own_inputs[key] = plain(own)
        return {**self._own_inputs[key], **{f"artifact {parent}": found for parent, found in made_of.items()}}

    def _last_build(self, name: str) -> LastBuild:
        """Return what a stage was last built from, here or in the run whose artifacts are tried for this one."""
        try:
            manifest = read_manifest((self.origin or self).path(name))
        except ArtifactError:
            return LastBuild()
        return LastBuild(manifest.inputs, manifest.facts)

    def _manifest(self, name: str) -> Manifest:
        """Return the manifest of the opened artifact, or of the one on disk if none is open."""
        return self._open[name].manifest if name in self._open else read_manifest(self.path(name))

    def state(self, stage: Stage, known: dict[str, State] | None = None) -> State:
        """Return the state of a stage: stale if it was built from other inputs, or if a dependency is not done.

        `known` caches states that were already determined.
        """
        known = {} if known is None else known
        for parent in self.parents(stage):
            if parent not in known:
                known[parent] = "done" if parent in self._open else self.state(self.stages[parent], known)
        inputs = self.inputs(stage)
        current = inputs is not None and all(known[parent] == "done" for parent in self.parents(stage))
        found = state_of(self.path(stage.name), (inputs or {}) if current else {})
        known[stage.name] = "stale" if found == "done" and not current else found
        return known[stage.name]

    def path(self, name: str) -> Path:
        return self.root / STAGES[name].folder

    def bytes_of(self, name: str) -> int:
        """Return the size of a stage's artifact with its parts, unfinished builds included."""
        return bytes_of(self.path(name), *self._parts_of(STAGES[name]))

    def _parts_of(self, stage: Stage) -> list[Path]:
        """Return the folders that may hold parts of a stage's artifact."""
        return [segment / stage.part for segment in (self.root / SEGMENTS).glob("*") if stage.part]

    def artifact(self, name: str) -> Artifact:
        """Open the complete, verified and current artifact of a stage, and everything that it depends on.

        Opened artifacts belong together: one is accepted only if it was built from its opened parents.
        """
        if name not in self._open:
            stage = self._stage(name)
            for parent in self.parents(stage):
                self.artifact(parent)
            state = self.state(stage)
            if state in ("missing", "half-done"):
                command = f"gnnlm {stage.command(self.config)}"
                raise ArtifactError(f"{self.path(name)} is {state}; build it first: {command}, with the same config")
            artifact = Artifact.open(self.path(name))
            if not self.reading:
                artifact.verify()  # what is built on must be whole; a reader finds damage in a part when it reads it
            if artifact.inputs != self.inputs(stage):
                raise ArtifactError(self._mismatch(stage))
            self._open[name] = artifact
        return self._open[name]

    def open_all(self, name: str = "tune") -> Artifact:
        """Open a stage and everything it depends on at once, for reading.

        While another process replaces artifacts, they may not fit together, or may be missing for a moment: opening is
        then tried again, and refused if the problem lasts.
        """
        for pause in (0.0, *PAUSES):
            time.sleep(pause)
            try:
                return self.artifact(name)
            except ArtifactError:
                self._open.clear()
                self._own_inputs.clear()
                if pause and not is_locked(self.root):
                    raise
        raise ArtifactError(f"another gnnlm process is building in {self.root}; open the run when it has finished")

    def why(self, stage: Stage, state: State) -> str:
        """Say what is wrong with a stale or damaged stage; empty for any other."""
        if state not in ("stale", "damaged"):
            return ""
        if found := damage(self.path(stage.name)):
            return found
        inputs = self.inputs(stage)
        if inputs is None:
            return "a stage it depends on is missing"
        return differences(read_manifest(self.path(stage.name)).inputs, inputs) or "depends on a stale stage"

    def _mismatch(self, stage: Stage) -> str:
        found = self.why(stage, "stale")
        return (
            f"{self.path(stage.name)} was made from other inputs: {found}; gnnlm run with the same config and "
            "--rebuild replaces everything that is stale, another run directory (run: in the config) keeps both"
        )

    # -- building ------------------------------------------------------------------------------------------

    def build(self, name: str, rebuild: bool = False) -> Artifact:
        """Build one stage unless it is done; with `rebuild`, build it in any case."""
        stage = self._stage(name)
        for parent in self.parents(stage):
            self.artifact(parent)
        if not rebuild and self.state(stage) == "done":
            return self._found(name)
        with self.building():
            settle(self.path(name))
            state = self.state(stage)
            if not rebuild and state == "done":
                return self._found(name)
            if not rebuild and state in ("stale", "damaged"):
                Artifact.open(self.path(name)).verify()  # says what is wrong with it, if anything is
                raise ArtifactError(self._mismatch(stage))
            inputs = self.inputs(stage)
            assert inputs is not None
            made_with = {"threads": self.engine.threads}
            with Draft(self.path(name), name, inputs, rebuild=rebuild, made_with=made_with) as draft:
                save_config(self.config)
                if draft.resumed:
                    say(f"{name}: resuming where it was interrupted")
                with self._with_others(stage):
                    made = stage.build(self.context(stage), draft)
            remove_other_parts(made.path, self._parts_of(stage))
        self._forget_from(name)
        self._open[name] = made
        return made

    @contextmanager
    def _with_others(self, stage: Stage) -> Iterator[None]:
        """Order the other processes of a launcher, if there are any, to join in a training."""
        if not stage.trains or self.finish_training:
            yield
            return
        from gnnlm.train.processes import here

        if here().count > 1 and here().first:
            here().tell({"stage": stage.name, "config": self.config.model_dump(mode="json")})
            with here().together():
                yield
        else:
            yield

    def context(self, stage: Stage) -> BuildContext:
        """Return what a stage of this run is built with."""
        spread = self.engine.spread(self.snapshot.place(stage.name), StageRecipe(stage.name))
        stages = list(self.stages.values())
        curves = self.root / "tensorboard"
        return BuildContext(self.snapshot, stages, spread, curves, SPLITS, self.finish_training)

    def use(self, engine: Engine) -> None:
        """Build and search with an engine; refused if its machines cannot build this run."""
        if engine is HERE:
            return
        model = portable(self.config).lm.model
        reads_model = [name for name, stage in self.stages.items() if stage.reads_model]
        needed = model != SCRATCH and not all(self._is_whole(name) for name in reads_model)
        self.engine, self._snapshot = engine, None
        engine.check(self.root, {model: partial(identity_of, model)} if needed else {})

    def _found(self, name: str) -> Artifact:
        artifact = self.artifact(name)
        say(f"{name}: already done")
        return artifact

    def _stage(self, name: str) -> Stage:
        if name not in self.stages:
            raise ConfigError(STAGES[name].absence(self.config))
        return self.stages[name]

    def build_all(self, rebuild: bool = False) -> Artifact:
        """Build every stage that is not done, and the report; with `rebuild`, replace what is stale or damaged."""
        if not rebuild:
            self._check_parents()
        whole = all(self._is_whole(name) for name in self.stages)
        with nullcontext() if whole else self.building():
            for name in self.stages:
                settle(self.path(name))
                if not self._is_whole(name):
                    check_place(self.path(name))
            for name in self.stages:
                artifact = self.build(name, rebuild=rebuild and not self._is_whole(name))
                if self.stages[name].reads_text and not whole and not self.force:
                    self._check_fits()
        return artifact

    def _check_fits(self) -> None:
        """Refuse, when the amount of text is known and before the long work, what the machine cannot hold."""
        from gnnlm.run.planning import check_fits

        check_fits(self)

    def _check_parents(self) -> None:
        """Refuse, before a new stage is built, what was made without it."""
        for name, stage in self.stages.items():
            try:
                made = read_manifest(self.path(name)).inputs
            except ArtifactError:  # missing or damaged: the build says so
                continue
            for parent in self.parents(stage):
                if f"artifact {parent}" not in made:
                    raise ArtifactError(
                        f"{self.path(name)} was made without the {parent} stage; gnnlm run with the same config and "
                        "--rebuild replaces everything that is stale, another run directory (run: in the config) keeps "
                        "both"
                    )

    def fork(self, config: Config) -> list[str]:
        """Start the run of another config from the stages that it leaves valid; return their names.

        Files are linked where the file system can, else copied. Artifacts are replaced, never written to, so runs
        that share files do not disturb each other.
        """
        new = Run(config, self.reading)
        new._check_new()
        kept = self.kept_by(Run(config, self.reading))
        if current_number(self.root):
            say(f"fork: {new.root} starts from {self.root} as it was built, without later changes of its store")
        with new.building():
            save_config(config)
            for name in kept:
                link_artifact(self.path(name), new.path(name))
                new.artifact(name)
        return kept

    def kept_by(self, new: Run) -> list[str]:
        """Return the stages of this run that another config leaves valid; `new` is its run, with nothing built."""
        kept: list[str] = []
        new.origin = self
        for name, stage in self.stages.items():
            if name not in new.stages or new.parents(stage) != self.parents(stage):
                continue
            if self.state(stage) != "done" or not all(parent in kept for parent in self.parents(stage)):
                continue
            if new.inputs(stage) == read_manifest(self.path(name)).inputs:
                new._open[name] = self.artifact(name)  # the parent that it would link
                kept.append(name)
        return kept

    def copy(self, root: Path) -> None:
        """Link or copy this finished run into another directory. Its source text may be gone by now."""
        self.open_all()
        new = Run(self.config.model_copy(update={"run": str(root)}), reading=True)
        new._check_new()
        with new.building():
            for name, stage in self.stages.items():
                if name in self._open or self.state(stage) == "done":
                    link_artifact(self.path(name), new.path(name))
            self._link_generation(root)
            save_config(new.config)
        new.open_all()

    def _link_generation(self, root: Path) -> None:
        """Let another run directory serve what this one serves now."""
        now = read_current(self.root)
        if not now.number:
            return
        for name in sorted(name for name in now.paths if not name.startswith(f"{SEGMENTS}/")):
            link_artifact(self.root / name, root / name, parts=False)
        commit(root, now)

    def _check_new(self) -> None:
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise ArtifactError(f"{self.root} already exists; name a new directory")

    def _is_whole(self, name: str) -> bool:
        try:
            self.artifact(name)
        except ArtifactError:
            return False
        return True

    def _forget_from(self, name: str) -> None:
        """Close a replaced stage and all stages after it; the next snapshot opens what has replaced them."""
        order = list(self.stages)
        opened = [later for later in order[order.index(name) :] if self._open.pop(later, None) is not None]
        if opened:
            self._snapshot = None

    @contextmanager
    def building(self) -> Iterator[None]:
        """Lock the run directory against other builders, and log messages to it."""
        if self._alone:
            yield
            return
        with locked(self.root), log_to(self.root / "gnnlm.log"):
            for artifact in self._open.values():
                artifact.check_in_place()
            self._alone = True
            try:
                yield
            finally:
                self._alone = False

    # -- reading -------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The run as its stages have built it so far."""
        from gnnlm.run.snapshot import Snapshot

        if self._snapshot is None:
            self._snapshot = Snapshot(self)
        return self._snapshot

    def open_current(self, engine: Engine = HERE) -> Snapshot:
        """Open a finished run at the generation that it serves now, with a lease on that generation.

        An unfinished or stale run is refused before anything is loaded.
        """
        generation, lease = pinned(self.root)
        try:
            self.open_all()
            self.use(engine)
            opened = self.snapshot.at(generation, lease)
            opened.check_current()
            opened.open_all()
        except BaseException:
            lease.release()
            raise
        return opened

    @staticmethod
    def reopen(root: Path) -> Snapshot:
        """Open a finished run in a process that has nothing but its directory."""
        return _reopened(root, "").snapshot


# -- for processes that have nothing but the run directory -------------------------------------------------------------


@dataclass(frozen=True)
class StageRecipe:
    """Makes the work of a stage's tasks from a run directory."""

    stage: str

    def __call__(self, root: Path, kind: str) -> Work:
        return _work(self.stage, root, kind)


@lru_cache(maxsize=4)
def _work(name: str, root: Path, kind: str) -> Work:
    run = _reopened(root, name)
    stage = run.stages[name]
    assert kind in stage.tasks, kind
    return stage.work(run.snapshot, run.inputs(stage) or {}, kind)


@lru_cache(maxsize=1)  # the next stage reads artifacts that were not there before
def _reopened(root: Path, stage: str) -> Run:
    return Run(load_config(root), reading=True)


def identify_model(model: str) -> str:
    """Identify the files of a model."""
    from gnnlm.lm.model_files import model_fingerprint  # imports torch

    return model_fingerprint(model)


def identity_of(model: str) -> str:
    """Identify the files of a model on this machine, which may have none."""
    try:
        return identify_model(model)
    except ModelError:
        return MISSING
