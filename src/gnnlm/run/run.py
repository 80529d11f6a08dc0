"""A run: a config, its directory, and which of its stages are done.

A stage is done when its artifact is whole and was made from the same inputs; a stage made from other inputs is
refused, never silently remade. What the stages are is in `stages.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft, State, differences, link_directory, read_manifest, state_of
from gnnlm.artifact import manifest_fingerprint as fingerprint_of
from gnnlm.config import Config, default_values, dump_config
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.progress import say
from gnnlm.run.stages import OWN_INPUTS, STAGES, Stage

if TYPE_CHECKING:
    from gnnlm.run.parts import Parts


class Run:
    """A config and its run directory."""

    config: Config
    root: Path

    def __init__(self, config: Config, reading: bool = False) -> None:
        """`reading`: the run is only used, so its source text may have changed or gone since."""
        self.config = config
        self.reading = reading
        self.root = Path(config.run)
        self.finish_training = False  # a half-done training ends here, with its best step so far
        self._open: dict[str, Artifact] = {}
        self._own_inputs: dict[str, dict[str, Any]] = {}

    @cached_property
    def stages(self) -> dict[str, Stage]:
        """The stages of this run, in order: no base model is trained, and no network, unless the config asks for it."""
        left_out = set() if self.config.lm.is_trained else {"lm"}
        left_out |= set() if self.config.gnn.layers else {"train", "cache"}
        return {
            name: replace(stage, parents=tuple(parent for parent in stage.parents if parent not in left_out))
            for name, stage in STAGES.items()
            if name not in left_out
        }

    # -- state ---------------------------------------------------------------------------------------------

    def inputs(self, stage: Stage) -> dict[str, Any] | None:
        """What the stage would be made from now; None while a parent is not there."""
        if stage.name not in self._own_inputs:
            self._own_inputs[stage.name] = OWN_INPUTS[stage.name](self)
        made_from = dict(self._own_inputs[stage.name])
        for parent in stage.parents:
            try:
                made_from[f"artifact {parent}"] = fingerprint_of(read_manifest(self.path(parent)))
            except ArtifactError:
                return None
        return self._known(stage, made_from)

    def _known(self, stage: Stage, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs without fields that were not there when the artifact was made, where they are as by default."""
        try:
            was = read_manifest(self.path(stage.name))["inputs"]
        except ArtifactError:
            return inputs
        defaults = default_values()
        return {k: v for k, v in inputs.items() if k in was or k not in defaults or v != defaults[k]}

    def state(self, stage: Stage) -> State:
        """Stale is what was made from other inputs, or hangs on something that is not done."""
        inputs = self.inputs(stage)
        if inputs is not None and all(self.state(self.stages[parent]) == "done" for parent in stage.parents):
            return state_of(self.path(stage.name), inputs)
        there = state_of(self.path(stage.name), {})
        return "stale" if there == "done" else there

    def path(self, name: str) -> Path:
        return self.root / STAGES[name].folder

    def artifact(self, name: str) -> Artifact:
        """The whole, verified and current artifact of a stage, everything it hangs on included."""
        if name not in self._open:
            stage = self._stage(name)
            for parent in stage.parents:
                self.artifact(parent)
            state = self.state(stage)
            if state in ("missing", "half-done"):
                raise ArtifactError(
                    f"{self.path(name)} is {state}; make it first: gnnlm {stage.command}, with the same config"
                )
            artifact = Artifact.open(self.path(name))
            if state != "done":
                raise ArtifactError(self._mismatch(stage))
            self._open[name] = artifact
        return self._open[name]

    def why_stale(self, stage: Stage) -> str:
        """What a stale stage's inputs were and are; empty for any other."""
        if self.state(stage) != "stale":
            return ""
        inputs = self.inputs(stage)
        if inputs is None:
            return "what it hangs on is not there"
        found = differences(read_manifest(self.path(stage.name))["inputs"], inputs)
        return found or "hangs on what is stale"

    def _mismatch(self, stage: Stage) -> str:
        found = self.why_stale(stage)
        return (
            f"{self.path(stage.name)} was made from other inputs: {found}; gnnlm run with the same config and "
            "--rebuild replaces all that is stale, another run directory (run: in the config) keeps both"
        )

    # -- building ------------------------------------------------------------------------------------------

    def build(self, name: str, rebuild: bool = False) -> Artifact:
        """Make one stage, or find it done. With `rebuild`, make it even so."""
        stage = self._stage(name)
        for parent in stage.parents:
            self.artifact(parent)
        state = self.state(stage)
        if state == "done" and not rebuild:
            artifact = self.artifact(name)
            say(f"{name}: done already")
            return artifact
        if state in ("stale", "damaged") and not rebuild:
            Artifact.open(self.path(name))  # says what is wrong with it, if anything is
            raise ArtifactError(self._mismatch(stage))
        inputs = self.inputs(stage)
        assert inputs is not None
        with self._alone(), Draft(self.path(name), name, inputs, rebuild=rebuild) as draft:
            self._write_config()
            if draft.resumed:
                say(f"{name}: resuming where it was interrupted")
            self._open[name] = stage.build(self, draft)
        return self._open[name]

    def _stage(self, name: str) -> Stage:
        if name not in self.stages:
            if name != "lm":
                raise ConfigError(f"this run has no graph network, so no {name} stage: set gnn.layers to 1 or more")
            raise ConfigError("this run uses its model as it came: set lm.model to scratch, or lm.finetune.kind")
        return self.stages[name]

    def build_all(self, rebuild: bool = False) -> Artifact:
        """Make every stage that is not done, and the report. With `rebuild`, replace what is stale or damaged."""
        for name in self.stages:
            artifact = self.build(name, rebuild=rebuild and not self._is_whole(name))
        return artifact

    def fork(self, config: Config) -> list[str]:
        """Begin the run of another config with the stages of this one that it leaves valid; their names.

        Files are linked where the file system can, else copied. Artifacts are replaced, never written to, so runs
        that share files do not disturb each other.
        """
        new, kept = Run(config), []
        if new.root.exists() and any(new.root.iterdir()):
            raise ArtifactError(f"{new.root} is there already; name a directory that is not")
        for name, stage in self.stages.items():
            if name not in new.stages or new.stages[name].parents != stage.parents:
                continue
            if self.state(stage) != "done" or not all(parent in kept for parent in stage.parents):
                continue
            was = read_manifest(self.path(name))["inputs"]
            if self._known(stage, new.inputs(stage) or {}) == was:
                link_directory(self.path(name), new.path(name))
                kept.append(name)
        new.root.mkdir(parents=True, exist_ok=True)
        new._write_config()
        return kept

    def _is_whole(self, name: str) -> bool:
        try:
            self.artifact(name)
        except ArtifactError:
            return False
        return True

    def _write_config(self) -> None:
        beside = self.root / "config.yaml.new"
        beside.write_text(dump_config(self.config), encoding="utf-8")
        beside.replace(self.root / "config.yaml")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two processes that build in one run directory would tread on each other."""
        import fcntl

        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ArtifactError(
                    f"another gnnlm is building in {self.root}; wait for it, or choose another run directory"
                ) from None
            yield

    # -- parts ---------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> Parts:
        """What the finished stages left, loaded when first needed."""
        from gnnlm.run.parts import Parts

        return Parts(self)

    @property
    def graph_k(self) -> int:
        """Neighbours per position in the graph when predicting."""
        return self.config.eval.graph_k or self.config.search.graph_k
