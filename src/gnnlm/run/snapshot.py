"""A snapshot: what can be read of a run at one of its generations.

A snapshot is immutable. It opens artifacts and loads components (texts, base model, store, index, network, predictor)
when they are first needed. How a component is loaded stands with the stage that makes it. Another generation of the
same run is another snapshot, which shares every component that both have.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact
from gnnlm.corpus.corpus_stage import CORPUS
from gnnlm.corpus.stream import SPLITS, Stream
from gnnlm.datastore.codec_stage import CODEC
from gnnlm.datastore.encode import Encoder
from gnnlm.datastore.encode_stage import ENCODE
from gnnlm.datastore.store import Store
from gnnlm.engine import Place
from gnnlm.errors import ArtifactError
from gnnlm.evaluate.tune_stage import TUNE
from gnnlm.generation import Generation, Lease, SegmentRecord, current_number, pinned, read_generation
from gnnlm.generation.current import FOLDER, generation_file
from gnnlm.gnn.model import GnnModel
from gnnlm.layout import SEGMENTS
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.head import Head
from gnnlm.predict.cache_stage import CACHE
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.knn import Mix
from gnnlm.predict.open_book import OpenBook, ReadingRule
from gnnlm.predict.predictor import Predictor
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.predict.window_cache import WindowCache
from gnnlm.retrieval.index import Ids, Index
from gnnlm.retrieval.index_stage import INDEX
from gnnlm.retrieval.search_stage import SEARCH
from gnnlm.retrieval.segmented import SegmentedIndex, SpreadIndex
from gnnlm.retrieval.tombstones import without_removed
from gnnlm.stage import Stage, ancestors
from gnnlm.train.lm_stage import LM
from gnnlm.train.train_stage import TRAIN

if TYPE_CHECKING:
    from gnnlm.run.run import Run

Component = TypeVar("Component")
Key = tuple[str, ...]  # a component's name, and the fingerprints of what it is loaded from


class Snapshot:
    """A run directory at a generation, its artifacts and its components."""

    def __init__(
        self,
        run: Run,
        generation: Generation | None = None,
        lease: Lease | None = None,
        shared: Snapshot | None = None,
    ) -> None:
        """Without a generation, the run is read as its stages have built it so far.

        `lease` keeps what is open from being erased. Components of the snapshot `shared` are used again.
        """
        self.run, self.config, self.root, self.lease = run, run.config, run.root, lease
        self._changed = generation if generation is not None and generation.number else None  # since it was built
        self._artifacts: dict[str, Artifact] = {}
        self._components: dict[Key, Any] = {} if shared is None else shared._components
        self._indexes: dict[Key, Index] = {}
        if shared is not None and shared._indexes:
            own = set(self._segment_names)
            self._indexes = {key: index for key, index in shared._indexes.items() if key in own}

    def at(self, generation: Generation, lease: Lease | None = None) -> Snapshot:
        """Return the snapshot of another generation."""
        return Snapshot(self.run, generation, lease, shared=self)

    def newer(self) -> Snapshot | None:
        """Return a snapshot of the generation that the run serves now, with a lease; None if that is this one."""
        if current_number(self.root) == self.number:
            return None
        generation, lease = pinned(self.root)
        try:
            newer = self.at(generation, lease)
            if newer.rebuilt_stages:
                raise ArtifactError(f"{self.root} was rebuilt since it was opened; open it again")
            newer.open_all()
        except BaseException:
            lease.release()
            raise
        return newer

    # -- the generation ------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the generation; 0 is the run as it was built."""
        return 0 if self._changed is None else self._changed.number

    @cached_property
    def generation(self) -> Generation:
        """The generation; generation 0 has the segments that the stages have built."""
        if self._changed is not None:
            return self._changed
        texts = self.built(CORPUS.name).parts
        parts: list[dict[str, str]] = [{} for _ in texts]
        for name, kind in self.segment_kinds.items():
            for number, part in enumerate(self.built(name).parts):
                parts[number][kind] = part.fingerprint
        segments = [
            SegmentRecord(
                str(text.path.parent.relative_to(self.root)), own, text.facts["documents"], text.facts["positions"]
            )
            for text, own in zip(texts, parts, strict=True)
        ]
        return Generation(segments=tuple(segments), trained=self.fingerprints())

    @property
    def segment_kinds(self) -> dict[str, str]:
        """The stages that have a part of each segment, and the kind of that part."""
        return {name: stage.part for name, stage in self.stages.items() if stage.part}

    def fingerprints(self, refitted: Iterable[str] = ()) -> dict[str, str]:
        """Return the fingerprints of the artifacts that segments are made with, and of those that were refitted."""
        wanted = {*self.segment_kinds, *refitted}
        return {name: self.built(name).fingerprint for name in self.stages if name in wanted}

    @property
    def rebuilt_stages(self) -> list[str]:
        """The stages that were rebuilt since the generation was made with them."""
        if self._changed is None:
            return []
        then, now = self._changed.trained, self.fingerprints(self._changed.refitted)
        return [name for name in {**then, **now} if then.get(name) != now.get(name)]

    def check_current(self) -> None:
        """Refuse a generation whose segments were made with artifacts that were rebuilt since."""
        if rebuilt := self.rebuilt_stages:
            raise ArtifactError(
                f"generation {self.number} of {self.root} was made with another {' and '.join(rebuilt)}, rebuilt "
                f"since; make its segments again from their text: gnnlm renew {shlex.quote(str(self.root))}"
            )

    def without_overlap(self) -> Snapshot:
        """Return the snapshot as it may be measured: without documents that share text with valid or test."""
        now = self.generation
        if all(set(segment.removed).issuperset(segment.overlapping) for segment in now.segments):
            return self
        segments = []
        for segment, text in zip(now.segments, self.streams["train"].segments, strict=True):
            more = [number for number in segment.overlapping if number not in set(segment.removed)]
            positions = sum(int(text.starts[number + 1] - text.starts[number]) for number in more)
            segments.append(segment.without(more, positions))
        return self.at(replace(now, segments=tuple(segments)))

    # -- artifacts -----------------------------------------------------------------------------------------

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages of the run, in order."""
        return self.run.stages

    def built(self, name: str) -> Artifact:
        """Return the artifact of a stage as it was built."""
        return self.run.artifact(name)

    def has(self, name: str) -> bool:
        """Return whether the run has a stage."""
        return name in self.stages

    def path(self, name: str) -> Path:
        """Return the folder of a stage's artifact."""
        return self.root / self.stages[name].folder

    def trained(self, name: str) -> Artifact:
        """Return the artifact of a stage, or what was refitted in its place, without the generation's segments."""
        refit = None if self._changed is None else self._changed.refitted.get(name)
        if refit is None:
            return self.built(name)
        return self._once(("refit", refit.path, refit.fingerprint), lambda: self._part(refit.path, refit.fingerprint))

    def artifact(self, name: str) -> Artifact:
        """Return the artifact of a stage with the generation's segments as its parts."""
        kind = self.stages[name].part
        if self._changed is None or not kind:
            return self.trained(name)
        if name not in self._artifacts:
            parts = [self.part(segment, kind) for segment in self._changed.segments if kind in segment.parts]
            self._artifacts[name] = replace(self.trained(name), parts=tuple(parts))
        return self._artifacts[name]

    def part(self, segment: SegmentRecord, kind: str) -> Artifact:
        """Return a part of a segment of the generation."""
        return self._part(segment.path_of(kind), segment.parts[kind])

    def _part(self, path: str, fingerprint: str) -> Artifact:
        return Artifact.open_part(self.root / path, fingerprint, generation_file(self.root, self.number))

    def open_all(self) -> None:
        """Open the files of every segment, so that they stay readable whatever a writer removes later."""
        for name in self.segment_kinds:
            self.artifact(name)
        for name in self.generation.refitted:
            self.artifact(name)

    def place(self, stage: str) -> Place:
        """Return the run directory and the paths in it that tasks of a stage read."""
        before = ancestors(self.stages, stage)
        kinds = [kind for name in before if (kind := self.stages[name].part)]
        paths = [self.path(name) for name in before]
        paths += [path for kind in kinds for path in sorted(self.root.glob(f"{SEGMENTS}/*/{kind}"))]
        needs = ["config.yaml", "config.json", *(str(path.relative_to(self.root)) for path in paths)]
        if self._changed is not None:
            needs.append(f"{FOLDER}/{self.number}.json")
            needs += [made.path for name, made in self._changed.refitted.items() if name in before]
            held = self._changed.segments
            own = [segment.path_of(kind) for segment in held for kind in kinds if kind in segment.parts]
            needs += [path for path in own if not path.startswith(f"{SEGMENTS}/")]
        return Place(self.root.absolute(), tuple(needs))

    def _once(self, key: Key, load: Callable[[], Component]) -> Component:
        """Return a component, loaded at its first use by any snapshot of the run."""
        if key not in self._components:
            self._components[key] = load()
        found: Component = self._components[key]
        return found

    # -- base model and text -------------------------------------------------------------------------------

    @cached_property
    def device(self) -> str:
        """The device on which the softmax and the GNN run."""
        return "cuda" if self.config.train.device == "auto" and torch.cuda.is_available() else "cpu"

    @property
    def source_lm(self) -> BaseLM:
        """The model that the config names."""
        return self._once(("source",), lambda: LM.load_source(self))

    @property
    def lm(self) -> BaseLM:
        """The frozen base model: the one that the config names, or the one trained in this run."""
        trained = self.built(LM.name).fingerprint if self.has(LM.name) else ""
        return self._once(("lm", trained), lambda: LM.load(self))

    @property
    def head(self) -> Head:
        """The frozen softmax."""
        return self._once(("head", self.built(ENCODE.name).fingerprint), lambda: ENCODE.load_head(self))

    @cached_property
    def encoder(self) -> Encoder:
        return ENCODE.load_encoder(self)

    @cached_property
    def streams(self) -> dict[str, Stream]:
        """The text of every split; that of train is the generation's."""
        return {split: self.held_out.get(split) or CORPUS.load(self, split) for split in SPLITS}

    @cached_property
    def held_out(self) -> dict[str, Stream]:
        """The text that the run is evaluated on, readable also where train text was erased."""
        return {split: CORPUS.load(self, split) for split in SPLITS if split != "train"}

    @property
    def unread_states(self) -> Array | None:
        """The base model's states of train text from before it was trained on that text; None if not kept."""
        return LM.first_reading(self, "states")

    @property
    def unread_positions(self) -> Ids | None:
        """The train positions whose states predate any training on them; None where there are none."""
        first = LM.first_reading(self, "positions")
        if first is not None:
            return np.array(first)
        unread, stream = LM.unread_documents(self), self.streams["train"]
        if not unread:
            return None
        return np.flatnonzero(np.isin(stream.document_of(np.arange(len(stream))), unread))

    @property
    def has_unread(self) -> bool:
        """Whether the base model was trained on train text, so that the network learns from unread text only."""
        return LM.first_reading(self, "states") is not None or bool(LM.unread_documents(self))

    # -- store and neighbours ------------------------------------------------------------------------------

    @cached_property
    def encoded(self) -> dict[str, Store]:
        """Every split as it was encoded."""
        return ENCODE.load(self)

    @cached_property
    def train(self) -> Store:
        """The train text as it was encoded, with the generation's removals and tags."""
        store = self.encoded["train"]
        if self._changed is None:
            return store
        pairs = zip(store.segments, self._changed.segments, strict=True)
        segments = [replace(one, removed=frozenset(record.removed), tags=record.tags) for one, record in pairs]
        return Store(segments)

    @cached_property
    def store(self) -> Store:
        """The store: the train text, with coded states where there is a codec."""
        return CODEC.load(self)

    @property
    def live(self) -> list[Tensor | None]:
        """Which positions of each segment are not of removed documents; None if none was removed."""
        return [segment.live_P for segment in self.train.segments]

    @property
    def train_positions(self) -> Ids:
        """The train positions that the network may learn from.

        Of a changed store with more than `search.max_train`, those that came last.
        """
        most = self.config.search.max_train
        if self._changed is None:
            unread = self.unread_positions
            every = np.arange(len(self.streams["train"])) if unread is None else unread
            return every[:most]
        pairs = zip(self.live, self.train.segments, strict=True)
        live = [np.ones(len(segment), bool) if live_P is None else live_P.numpy() for live_P, segment in pairs]
        every = np.flatnonzero(np.concatenate(live))
        return every if most is None else every[-most:]

    @cached_property
    def index(self) -> Index:
        """The index over all segments, which the engine may hold elsewhere."""
        count = len(self.streams["train"].segments)
        groups = self.run.engine.groups(count)
        if not groups:
            return self.segment_indexes
        cuts = [count * number // groups for number in range(groups + 1)]
        opened = partial(open_index_group, reopen=self.run.reopen, generation=self.number)
        openers = [partial(opened, first=first, last=last) for first, last in itertools.pairwise(cuts)]
        held = self.run.engine.hold(self.place(SEARCH.name), openers)
        return SpreadIndex(self.segment_indexes, cuts, held)

    @cached_property
    def segment_indexes(self) -> SegmentedIndex:
        """The index of every segment, in this process, without removed documents."""
        whole, names = INDEX.load(self), self._segment_names
        indexes = self._indexes  # not through `self`: a cycle would keep the lease until a garbage collection

        def opened(number: int) -> Index:
            if names[number] not in indexes:
                indexes[names[number]] = whole.segment(number)
            return indexes[names[number]]

        shared = SegmentedIndex(whole.bases, whole.rows, whole.metric, opened, whole.assign)
        if self._changed is None:
            return shared
        return without_removed(shared, self.live, [segment.rows for segment in self._changed.segments])

    @property
    def _segment_names(self) -> list[Key]:
        """The fingerprints of what the index of each segment is opened from."""
        texts = self.artifact(CORPUS.name).parts
        states, indexes = self.artifact(ENCODE.name).parts, self.artifact(INDEX.name).parts
        trained = self.trained(INDEX.name).fingerprint
        return [
            (trained, text.fingerprint, states[number].fingerprint, indexes[number].fingerprint if indexes else "")
            for number, text in enumerate(texts)
        ]

    def searched(self, split: str) -> SearchedText:
        """Return a split with its neighbours; for train, with the states of the first reading if they were kept."""
        text = self.encoded[split]
        if split == "train" and (unread := self.unread_states) is not None:
            text = text.with_states(unread)
        return SearchedText(text, SEARCH.load(self, split), self.config.lm.continuous)

    # -- network and prediction ----------------------------------------------------------------------------

    @cached_property
    def graphs(self) -> GraphBuilder:
        return GraphBuilder(self.store, self.config.gnn.left, self.config.gnn.right)

    @property
    def gnn(self) -> GnnModel | None:
        """The trained graph network; None in a run without one."""
        if not self.has(TRAIN.name):
            return None
        return self._once(("gnn", self.trained(TRAIN.name).fingerprint), lambda: TRAIN.load(self))

    @cached_property
    def cache(self) -> WindowCache | None:
        """Cached neighbour states of the trained network; None if there is no cache."""
        return CACHE.load(self)

    def predictor_with(self, mixes: dict[str, Mix]) -> Predictor:
        """Return a predictor with other kNN mixes than the tuned ones."""
        return Predictor(self.head, self.graphs, self.gnn, self.config.graph_k, mixes, self.cache)

    @cached_property
    def predictor(self) -> Predictor:
        """The tuned predictor."""
        return TUNE.load(self)

    def model(self) -> OpenBook:
        """Return the open-book model of this snapshot."""
        lm, store = self.config.lm, self.config.store
        reading = ReadingRule(lm.window, lm.context, store.key, store.dtype, lm.whole_lines)
        return OpenBook(self.lm, self.store, self.index, self.predictor, reading)


def open_index_group(
    root: Path, reopen: Callable[[Path], Snapshot], generation: int, first: int, last: int
) -> SegmentedIndex:
    """Open the index of the segments first..last-1 of a generation, in a process that has only the run directory."""
    snapshot = reopen(root).at(read_generation(root, generation))
    return snapshot.segment_indexes.between(first, last)
