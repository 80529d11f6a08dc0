"""The parts of a run as a generation serves them: what was trained stays, the segments are the generation's."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from gnnlm.artifact import Artifact
from gnnlm.artifact.manifest import erased_files
from gnnlm.datastore.codec import open_codec
from gnnlm.datastore.store import Store
from gnnlm.engine import Place
from gnnlm.errors import ArtifactError
from gnnlm.generation import Generation, Segment
from gnnlm.generation.place import FOLDER
from gnnlm.gnn.model import GnnModel
from gnnlm.lm.head import Head
from gnnlm.lm.protocol import BaseLM
from gnnlm.retrieval.index import Index, open_index
from gnnlm.retrieval.live import without_removed
from gnnlm.retrieval.segmented import SegmentedIndex
from gnnlm.run.parts import Parts

if TYPE_CHECKING:
    from gnnlm.run.run import Run


def segment_kinds(run: Run) -> dict[str, str]:
    """The stages of a run that have a part of each segment, and the folder of that part."""
    return {name: stage.part for name, stage in run.stages.items() if stage.part}


def trained_of(run: Run) -> dict[str, str]:
    """The fingerprints of the artifacts that the parts of a segment are made with."""
    return {name: run.artifact(name).fingerprint for name in segment_kinds(run)}


def as_built(run: Run) -> Generation:
    """Generation 0: the segments that the stages of a run have built."""
    if any(name.startswith("train.") for name in run.artifact("corpus").manifest["files"]):
        raise ArtifactError(
            f"{run.root} was made before there were segments, so its store cannot change; build it again: gnnlm run "
            f"{shlex.quote(str(run.root))} --rebuild"
        )
    parts: list[dict[str, str]] = [{} for _ in run.artifact("corpus").parts]
    for name, kind in segment_kinds(run).items():
        for number, part in enumerate(run.artifact(name).parts):
            parts[number][kind] = part.fingerprint
    texts = run.artifact("corpus").parts
    segments = [
        Segment(str(text.path.parent.relative_to(run.root)), found, documents, text.facts["positions"])
        for text, found, documents in zip(texts, parts, _documents(run), strict=True)
    ]
    return Generation(segments=tuple(segments), trained=trained_of(run))


def _documents(run: Run) -> list[int]:
    """How many documents each segment of the corpus has."""
    left, counts = int(run.artifact("corpus").facts["train"]["documents"]), []
    for text in run.artifact("corpus").parts:
        count: int | None = text.facts.get("documents")
        if count is None:  # an older run
            erased = "starts.npy" in erased_files(text.path)
            count = left if erased else len(text.array("starts.npy")) - 1  # if erased, only their sum is known
        counts.append(count)
        left -= count
    return counts


class Serving(Parts):
    """The parts of a run at a generation."""

    def __init__(self, run: Run, generation: Generation | None, before: Serving | None = None) -> None:
        """`generation` None: the run as it was built. `before`: what is open of an earlier generation is used again."""
        super().__init__(run)
        self.served, self._views = generation, dict[str, Artifact]()
        self.generation = 0 if generation is None else generation.number
        self._indexes: dict[tuple[str, ...], Index] = {}
        if before is not None:
            names = set(self._segment_names)
            self._indexes = {name: index for name, index in before._indexes.items() if name in names}

    def artifact(self, name: str) -> Artifact:
        """The artifact of a stage, with the generation's segments for parts."""
        made, kind = self._run.artifact(name), segment_kinds(self._run).get(name)
        if self.served is None or not kind:
            return made
        if name not in self._views:
            root, record = self._run.root, self._run.root / FOLDER / f"{self.generation}.json"
            found = [
                Artifact.open_part(root / segment.name / kind, segment.parts[kind], record)
                for segment in self.served.segments
                if kind in segment.parts
            ]
            self._views[name] = replace(made, parts=tuple(found))
        return self._views[name]

    def open_all(self) -> None:
        """Open the files of every segment: what is open stays readable, whatever a writer removes later."""
        for name in segment_kinds(self._run):
            self.artifact(name)

    @cached_property
    def _segment_names(self) -> list[tuple[str, ...]]:
        """What tells the index of each segment from all others, also of other generations."""
        if self.served is not None:
            segments = self.served.segments
        elif self._run.artifact("corpus").parts:
            segments = as_built(self._run).segments
        else:
            return [("made before there were segments",)]
        return [tuple(each.parts.get(kind, "") for kind in ("text", "states", "index")) for each in segments]

    # what no generation changes is loaded once

    @cached_property
    def source_lm(self) -> BaseLM:
        return self._run.parts.source_lm

    @cached_property
    def lm(self) -> BaseLM:
        return self._run.parts.lm

    @cached_property
    def head(self) -> Head:
        return self._run.parts.head

    @cached_property
    def gnn(self) -> GnnModel | None:
        return self._run.parts.gnn

    @cached_property
    def store(self) -> Store:
        """The store of the generation."""
        tables = open_codec(self.artifact("codec"), self.device)
        store = self.encoded["train"] if tables is None else self.encoded["train"].coded(tables)
        if self.served is None:
            return store
        named = zip(store.segments, self.served.segments, strict=True)
        return Store([replace(one, removed=frozenset(record.removed), tags=record.tags) for one, record in named])

    @cached_property
    def segment_indexes(self) -> SegmentedIndex:
        """The index of every segment, without removed documents; those of segments that stay are opened once."""
        made, encoded, probes = self.artifact("index"), self.artifact("encode"), self._run.config.index.probes
        whole = open_index(made, encoded, self.streams["train"], probes, self.device)
        names = self._segment_names

        def opened(number: int) -> Index:
            if names[number] not in self._indexes:
                self._indexes[names[number]] = whole.segment(number)
            return self._indexes[names[number]]

        shared = SegmentedIndex(whole.bases, whole.rows, whole.metric, opened, whole.assign)
        if self.served is None:
            return shared
        live = [segment.live_P for segment in self.store.segments]
        return without_removed(shared, live, [segment.rows for segment in self.served.segments])

    @property
    def place(self) -> Place:
        """What a process elsewhere needs to open the index."""
        place = super().place
        if self.served is None:
            return place
        kinds = [kind for name, kind in segment_kinds(self._run).items() if name in ("corpus", "encode", "index")]
        added = [segment for segment in self.served.segments if segment.is_added]
        names = [f"{segment.name}/{kind}" for segment in added for kind in kinds if kind in segment.parts]
        return Place(place.root, (*place.needs, f"{FOLDER}/{self.generation}.json", *names))


def check_trained(run: Run, generation: Generation) -> None:
    """Refuse a generation whose segments were made with other trained parts than the run has now."""
    now = trained_of(run)
    other = [name for name in {**generation.trained, **now} if generation.trained.get(name) != now.get(name)]
    if other:
        raise ArtifactError(
            f"generation {generation.number} of {run.root} was made with another {' and '.join(other)}, rebuilt since; "
            f"make its segments again from their text: gnnlm renew {shlex.quote(str(run.root))}"
        )
