"""The parts of a run, loaded from its artifacts when first needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact
from gnnlm.corpus.stream import SPLITS, Stream
from gnnlm.datastore.codec import open_codec
from gnnlm.datastore.encode import Encoder
from gnnlm.datastore.store import Store
from gnnlm.engine import Place
from gnnlm.gnn.model import GnnModel
from gnnlm.lm.adaptive_softmax import load_head
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.head import Head
from gnnlm.lm.load_lm import load_lm
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import Predictor
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.predict.window_cache import WindowCache, open_cache
from gnnlm.progress import say
from gnnlm.retrieval.index import Ids, Index, keys_of
from gnnlm.retrieval.open_index import open_index
from gnnlm.retrieval.search import LeakageRule, Queries, open_table
from gnnlm.retrieval.segmented import SegmentedIndex, SpreadIndex
from gnnlm.run.inputs import READ
from gnnlm.run.shards import open_group, place_of
from gnnlm.train.train_gnn import block_order, read_lines

if TYPE_CHECKING:
    from gnnlm.run.run import Run


class Parts:
    """Models, texts, store, index and predictor of a run, as its stages built them."""

    generation = 0
    splits: Sequence[str] = SPLITS  # those whose neighbours a search stage looks up

    def __init__(self, run: Run) -> None:
        self._run = run

    def artifact(self, name: str) -> Artifact:
        """The artifact of a stage, with the segments that these parts are of."""
        return self._run.artifact(name)

    # -- base model and text -------------------------------------------------------------------------------

    @cached_property
    def source_lm(self) -> BaseLM:
        """The model that the config names."""
        say(f"loading {self._run.config.lm.model}")
        return load_lm(self._run.config.lm)

    @cached_property
    def lm(self) -> BaseLM:
        """The frozen base model: the one that the config names, or the one trained in this run."""
        if "lm" not in self._run.stages:
            return self.source_lm
        made = self.artifact("lm")
        lm = load_lm(self._run.config.lm.model_copy(update={"model": str(made.path)}))
        made.check_in_place()  # it was read by path: refuse if another build has replaced it
        return lm

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.lm, self._run.config.lm, self._run.config.store)

    @cached_property
    def streams(self) -> dict[str, Stream]:
        return {split: self.held_out.get(split) or Stream(self.artifact("corpus"), split) for split in SPLITS}

    @cached_property
    def held_out(self) -> dict[str, Stream]:
        """The text that the run is evaluated on, which is there also where train text was erased."""
        return {split: Stream(self.artifact("corpus"), split) for split in SPLITS if split != "train"}

    @cached_property
    def device(self) -> str:
        """The device on which the softmax and the GNN run."""
        return "cuda" if self._run.config.train.device == "auto" and torch.cuda.is_available() else "cpu"

    @cached_property
    def head(self) -> Head:
        return load_head(self.artifact("encode").file("head.safetensors")).on(self.device)

    # -- store and neighbours ------------------------------------------------------------------------------

    @cached_property
    def encoded(self) -> dict[str, Store]:
        """Every split as it was encoded."""
        encoded = self.artifact("encode")
        return {split: Store.open(encoded, stream) for split, stream in self.streams.items()}

    @cached_property
    def store(self) -> Store:
        """The store: the train text, with coded states where there is a codec."""
        tables = open_codec(self.artifact("codec"), self.device)
        train = self.encoded["train"]
        return train if tables is None else train.coded(tables)

    @cached_property
    def index(self) -> Index:
        """The index over all segments, which the engine may hold elsewhere."""
        count = len(self.streams["train"].segments)
        if not (groups := self._run.engine.groups(count)):
            return self.segment_indexes
        cuts = [count * number // groups for number in range(groups + 1)]
        opened = partial(open_group, generation=self.generation)
        openers = [partial(opened, first=first, last=last) for first, last in itertools.pairwise(cuts)]
        return SpreadIndex(self.segment_indexes, cuts, self._run.engine.hold(self.place, openers))

    @cached_property
    def segment_indexes(self) -> SegmentedIndex:
        """The index of every segment, in this process."""
        made, encoded, probes = self.artifact("index"), self.artifact("encode"), self._run.config.index.probes
        return open_index(made, encoded, self.streams["train"], probes, self.device)

    @property
    def place(self) -> Place:
        """What a process elsewhere needs to open the index."""
        return place_of(self._run, "search")

    @cached_property
    def queries(self) -> list[Queries]:
        """The queries of every split that is searched; those of train under the leakage rule."""
        encoded, k = self.artifact("encode"), min(self._run.config.search.k, len(self.index))

        def plain(split: str) -> Queries:
            stream = self.streams[split]
            return Queries(stream, keys_of(encoded, split), np.arange(len(stream)), k)

        return [self._train_queries if split == "train" else plain(split) for split in self.splits]

    @property
    def _train_queries(self) -> Queries:
        config, encoded, streams = self._run.config, self.artifact("encode"), self.streams
        rule: LeakageRule | None = LeakageRule.of(config, encoded.facts["receptive_field"])
        rule = None if config.exclude == "none" else rule
        unread, rows, positions = self.unread_states, len(self.index), self.train_positions
        if (batches := (self._run.inputs(self._run.stages["search"]) or {}).get(READ)) is not None:
            order = block_order(config.train, len(positions), config.seed)
            scored = min(config.train.valid_tokens, len(streams["valid"]))
            positions = positions[read_lines(order, batches, scored).numpy()]
        keys = keys_of(encoded, "train") if unread is None else unread
        return Queries(streams["train"], keys, positions, min(config.search.graph_k, rows), rule, config.lm.continuous)

    @property
    def live(self) -> Sequence[Tensor | None]:
        """Which positions of each segment may be found; none is removed from a run as it was built."""
        return [None] * len(self.streams["train"].segments)

    @property
    def train_positions(self) -> Ids:
        """The train positions that the network may learn from."""
        some = self.unread_positions
        every = np.arange(len(self.streams["train"])) if some is None else some
        return every[: self._run.config.search.max_train]

    @cached_property
    def graphs(self) -> GraphBuilder:
        return GraphBuilder(self.store, self._run.config.gnn.left, self._run.config.gnn.right)

    def searched(self, split: str) -> SearchedText:
        """A split with its neighbours; for train, with the states of the first reading if they were kept."""
        text = self.encoded[split]
        if split == "train" and (unread := self.unread_states) is not None:
            text = text.with_states(unread)
        table = open_table(self.artifact("search"), split)
        return SearchedText(text, table, self._run.config.lm.continuous)

    @property
    def unread_states(self) -> Array | None:
        """The base model's states of train text from before it was trained on it, by position; None if not kept."""
        return self._first_reading("states")

    def _first_reading(self, what: str) -> Array | None:
        lm = self.artifact("lm") if "lm" in self._run.stages else None
        files = lm.facts.get("first_reading") if lm is not None else None
        return None if lm is None or files is None else lm.array(files[what])

    @property
    def has_unread(self) -> bool:
        """Whether the base model was trained on train text, so that the network learns from what it had not read."""
        return "lm" in self._run.stages and any(
            self.artifact("lm").facts.get(name) for name in ("first_reading", "unread")
        )

    @property
    def unread_positions(self) -> Ids | None:
        """Train positions whose states predate any training on them; None if there are none."""
        first = self._first_reading("positions")
        if first is not None:
            return np.array(first)
        unread = self.artifact("lm").facts.get("unread") if "lm" in self._run.stages else None
        if not unread:
            return None
        stream = self.streams["train"]
        return np.flatnonzero(np.isin(stream.document_of(np.arange(len(stream))), unread))

    # -- network and prediction ----------------------------------------------------------------------------

    @cached_property
    def gnn(self) -> GnnModel | None:
        """The trained graph network; None in a run without one."""
        return self.load_gnn()

    def load_gnn(self) -> GnnModel | None:
        if "train" not in self._run.stages:
            return None
        path = self.artifact("train").file("model.safetensors")
        return GnnModel.load(path, self.head).to(self.device).freeze()

    @cached_property
    def cache(self) -> WindowCache | None:
        """Cached neighbour states of the trained network; None if there is no cache."""
        if self.gnn is None:
            return None
        return open_cache(self.artifact("cache"), self.gnn, self.store, self.device)

    def predictor_with(self, mixes: dict[str, Mix]) -> Predictor:
        return Predictor(self.head, self.graphs, self.gnn, self._run.graph_k, mixes, self.cache)

    @cached_property
    def predictor(self) -> Predictor:
        """The tuned predictor."""
        chosen = self.artifact("tune").facts["mix"]
        return self.predictor_with({name: Mix.of(values) for name, values in chosen.items()})
