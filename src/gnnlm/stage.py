"""A stage of the pipeline: what its artifact depends on, how it is built, and how it is read.

Each stage is one object beside the code that does its work, in a module named `..._stage.py`. `gnnlm.run.stages` lists
them in order; nothing else in `gnnlm.run` knows a stage by name. Stage modules import what they need when a stage is
built or read, so that listing the stages imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import Config
from gnnlm.engine import Spread, Work

if TYPE_CHECKING:
    from gnnlm.corpus.stream import Stream
    from gnnlm.retrieval.index import Ids
    from gnnlm.run.snapshot import Snapshot


@dataclass(frozen=True)
class LastBuild:
    """The inputs and facts that a stage has recorded when it was last built; empty if it was not."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InputFacts:
    """What a stage's inputs depend on beside the config.

    `parents` has the facts of the stages before it, `identify` identifies the files of a model. With `reading`, the run
    is only read, and its source text and model may be gone.
    """

    parents: Mapping[str, Mapping[str, Any]]
    last: LastBuild
    reading: bool
    identify: Callable[[str], str]


@dataclass(frozen=True)
class BuildContext:
    """What a stage is built with.

    `snapshot` has the artifacts and components of the stages before it. `spread` runs the stage's tasks. `splits` are
    those whose neighbours a search looks up. Training writes its curves to `curves`; with `finish_training` it ends
    now, with the best step so far.
    """

    snapshot: Snapshot
    stages: Sequence[Stage]
    spread: Spread
    curves: Path
    splits: Sequence[str]
    finish_training: bool = False

    @property
    def config(self) -> Config:
        return self.snapshot.config


@dataclass(frozen=True)
class SegmentSource:
    """One segment that parts are made for: its text, and the parts that are there, by kind."""

    stream: Stream
    parts: Mapping[str, Artifact]


NO_NETWORK = "this run has no graph network, and so no {} stage; set gnn.layers to 1 or more"


class Stage:
    """A stage: `folder` holds its artifact, and `part` names the folder of its part of each segment, if it has any."""

    name: str
    folder: str
    parents: tuple[str, ...] = ()
    help: str
    part: str = ""
    part_is_copied: bool = True  # by compaction, row by row; otherwise the part is written anew
    reads_text: bool = False  # from the places that the config names
    reads_model: bool = False  # its tasks read with the base model
    trains: bool = False  # several processes of a launcher may build it together
    tasks: tuple[str, ...] = ()  # the kinds of tasks that its work is cut into, which an engine may run elsewhere

    def is_in(self, config: Config) -> bool:
        """Return whether a run with this config has the stage."""
        return True

    def absence(self, config: Config) -> str:
        """Say why a run does not have the stage, and which setting would change that."""
        raise AssertionError(f"every run has the stage {self.name}")

    def command(self, config: Config) -> str:
        """Return the command that builds the stage, without `gnnlm`."""
        return self.name

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        """Return every resolved config value that determines the artifact; the parents are added by the run.

        A field that the config leaves open is recorded with the value that a preset or a parent gives it, so that a
        changed default makes a stage stale. Text and models are identified by their content, so that paths may change.
        Choices made during the build (`lm.start: auto`, `cache.form: auto`) are recorded as written.
        """
        raise NotImplementedError

    def check(self, config: Config, width: int, rows: int) -> None:
        """Refuse settings that cannot work with this many states of this width, before the first is computed."""

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        """Build the artifact, from where an interrupted build stopped."""
        raise NotImplementedError

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        """Return the function that does the stage's tasks of a kind, made from the artifacts of its parents.

        A process that has nothing but the run directory calls this; `inputs` are the stage's.
        """
        raise NotImplementedError

    def part_inputs(self, snapshot: Snapshot, source: SegmentSource) -> dict[str, Any] | None:
        """Return what determines the part of a new segment; None if the stage has no part of segments in this run."""
        return None

    def write_part(self, snapshot: Snapshot, source: SegmentSource, draft: Draft) -> Mapping[str, Any]:
        """Write the part of a new segment with what the stage has trained, and return its facts."""
        raise NotImplementedError

    def train_positions_read(self, snapshot: Snapshot, search_inputs: Mapping[str, Any]) -> Ids | None:
        """Return the train positions whose neighbours the stage reads; None if it does not know or reads all."""
        return None

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        """Say what of the artifact was learned from text and outlives its erasure; empty if nothing was."""
        return ""


def ancestors(stages: Mapping[str, Stage], name: str) -> list[str]:
    """Return the stages that a stage depends on, directly or not, in the order in which they are built."""
    wanted = set(stages[name].parents)
    for other in reversed(list(stages)):
        if other in wanted:
            wanted |= set(stages[other].parents)
    return [other for other in stages if other in wanted]


def section_inputs(section: Any, prefix: str, skip: Iterable[str] = ()) -> dict[str, Any]:
    """Return the values of a config section by their full names, without some fields."""
    from gnnlm.config import flat

    left_out = set(skip)
    values = {key: value for key, value in section.model_dump(mode="json").items() if key not in left_out}
    return flat(values, f"{prefix}.")
