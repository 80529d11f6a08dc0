"""The parts of a run as a generation serves them: its segments, and what was trained, unless it has its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.artifact.manifest import erased_files
from gnnlm.corpus.stream import SPLITS
from gnnlm.datastore.codec import open_codec
from gnnlm.datastore.store import Store
from gnnlm.engine import Place
from gnnlm.errors import ArtifactError
from gnnlm.generation import Generation, Segment
from gnnlm.generation.current import FOLDER
from gnnlm.gnn.model import GnnModel
from gnnlm.layout import SEGMENTS
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.head import Head
from gnnlm.retrieval.index import Ids, Index
from gnnlm.retrieval.open_index import open_index
from gnnlm.retrieval.segmented import SegmentedIndex
from gnnlm.retrieval.tombstones import without_removed
from gnnlm.run.parts import Parts

if TYPE_CHECKING:
    from gnnlm.run.run import Run


def segment_kinds(run: Run) -> dict[str, str]:
    """The stages of a run that have a part of each segment, and the folder of that part."""
    return {name: stage.part for name, stage in run.stages.items() if stage.part}


def trained_of(run: Run, refitted: Iterable[str] = ()) -> dict[str, str]:
    """The fingerprints of the artifacts that the parts of a segment are made with, and of those that were refitted."""
    wanted = {*segment_kinds(run), *refitted}
    return {name: run.artifact(name).fingerprint for name in run.stages if name in wanted}


def as_built(run: Run) -> Generation:
    """Generation 0: the segments that the stages of a run have built."""
    if any(name.startswith("train.") for name in run.artifact("corpus").manifest.files):
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

    def __init__(
        self,
        run: Run,
        generation: Generation | None,
        before: Serving | None = None,
        splits: Sequence[str] = SPLITS,
    ) -> None:
        """`generation` None: the run as it was built. `before`: what is open of an earlier generation is used again.

        `splits` are those that a search stage looks up.
        """
        super().__init__(run)
        self.served, self.splits = generation, splits
        self._trained, self._views = dict[str, Artifact](), dict[str, Artifact]()
        self.generation = 0 if generation is None else generation.number
        self._indexes: dict[tuple[str, ...], Index] = {}
        self._networks: dict[str, GnnModel | None] = {}
        if before is not None:
            names, own = set(self._segment_names), self.served.refitted.get("train") if self.served else None
            self._indexes = {name: index for name, index in before._indexes.items() if name in names}
            self._networks = {one: it for one, it in before._networks.items() if own and one == own.fingerprint}

    def trained(self, name: str) -> Artifact:
        """What stands for a stage at this generation, without segments: its artifact, or what was refitted since."""
        made = None if self.served is None else self.served.refitted.get(name)
        if made is None:
            return self._run.artifact(name)
        if name not in self._trained:
            self._trained[name] = self._part(made.path, made.fingerprint)
        return self._trained[name]

    def artifact(self, name: str) -> Artifact:
        """What stands for a stage at this generation, with the generation's segments for parts."""
        kind = segment_kinds(self._run).get(name)
        if self.served is None or not kind:
            return self.trained(name)
        if name not in self._views:
            held = [segment for segment in self.served.segments if kind in segment.parts]
            found = [self._part(segment.path_of(kind), segment.parts[kind]) for segment in held]
            self._views[name] = replace(self.trained(name), parts=tuple(found))
        return self._views[name]

    def _part(self, path: str, fingerprint: str) -> Artifact:
        root = self._run.root
        return Artifact.open_part(root / path, fingerprint, root / FOLDER / f"{self.generation}.json")

    def open_all(self) -> None:
        """Open the files of every segment: what is open stays readable, whatever a writer removes later."""
        for name in (*segment_kinds(self._run), *(() if self.served is None else self.served.refitted)):
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
        """The graph network: the run's, which all generations share, or the generation's own."""
        own = None if self.served is None else self.served.refitted.get("train")
        if own is None:
            return self._run.parts.gnn
        if own.fingerprint not in self._networks:
            self._networks[own.fingerprint] = self.load_gnn()
        return self._networks[own.fingerprint]

    @cached_property
    def store(self) -> Store:
        """The store of the generation."""
        tables = open_codec(self.artifact("codec"), self.device)
        return self._train if tables is None else self._train.coded(tables)

    @cached_property
    def _train(self) -> Store:
        """The train text as it was encoded, with what the generation says of its documents."""
        store = self.encoded["train"]
        if self.served is None:
            return store
        named = zip(store.segments, self.served.segments, strict=True)
        return Store([replace(one, removed=frozenset(record.removed), tags=record.tags) for one, record in named])

    @property
    def live(self) -> list[Tensor | None]:
        """Which positions of each segment are not of removed documents; None if none is."""
        return [segment.live_P for segment in self._train.segments]  # a process that only searches has no codes

    @property
    def train_positions(self) -> Ids:
        """The positions of documents that are not removed; of more than `search.max_train`, those that came last."""
        if self.served is None:
            return super().train_positions
        whole = zip(self.live, self._train.segments, strict=True)
        live = [np.ones(len(one), bool) if live_P is None else live_P.numpy() for live_P, one in whole]
        every, most = np.flatnonzero(np.concatenate(live)), self._run.config.search.max_train
        return every if most is None else every[-most:]

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
        return without_removed(shared, self.live, [segment.rows for segment in self.served.segments])

    @property
    def place(self) -> Place:
        """What a process elsewhere needs to open the index."""
        place = super().place
        if self.served is None:
            return place
        kinds = [kind for name, kind in segment_kinds(self._run).items() if name in ("corpus", "encode", "index")]
        held = self.served.segments
        names = [segment.path_of(kind) for segment in held for kind in kinds if kind in segment.parts]
        own = [made.path for name, made in self.served.refitted.items() if name == "index"]
        more = [name for name in (*own, *names) if not name.startswith(f"{SEGMENTS}/")]
        return Place(place.root, (*place.needs, f"{FOLDER}/{self.generation}.json", *more))


def check_trained(run: Run, generation: Generation) -> None:
    """Refuse a generation whose segments were made with other trained parts than the run has now."""
    if other := outdated(run, generation):
        raise ArtifactError(
            f"generation {generation.number} of {run.root} was made with another {' and '.join(other)}, rebuilt since; "
            f"make its segments again from their text: gnnlm renew {shlex.quote(str(run.root))}"
        )


def outdated(run: Run, generation: Generation) -> list[str]:
    """The stages that were rebuilt since a generation was made with them."""
    now = trained_of(run, generation.refitted)
    return [name for name in {**generation.trained, **now} if generation.trained.get(name) != now.get(name)]


def without_overlap(run: Run, generation: Generation) -> Generation:
    """The generation as it may be measured on valid: without the documents that share text with valid or test."""
    if all(set(one.removed).issuperset(one.overlapping) for one in generation.segments):
        return generation
    texts = Serving(run, generation).streams["train"].segments
    segments = []
    for segment, text in zip(generation.segments, texts, strict=True):
        more = [number for number in segment.overlapping if number not in set(segment.removed)]
        positions = sum(int(text.starts[number + 1] - text.starts[number]) for number in more)
        segments.append(segment.without(more, positions))
    return replace(generation, segments=tuple(segments))
