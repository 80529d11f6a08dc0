"""The search stage: the neighbours of every position that is read later are looked up once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import Config
from gnnlm.engine import Work
from gnnlm.progress import warn
from gnnlm.stage import BuildContext, InputFacts, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.retrieval.neighbours import NeighbourTable
    from gnnlm.retrieval.search import Queries
    from gnnlm.run.snapshot import Snapshot

BATCHES = "train batches"  # the input that says for how many batches of training the search is; absent if for all


class SearchStage(Stage):
    name = "search"
    folder = "search"
    parents = ("corpus", "encode", "index")
    help = "Look up the neighbours of every position."
    tasks = ("search",)

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        from gnnlm.retrieval.search import LeakageRule

        rule = LeakageRule.of(config, known.parents["encode"]["receptive_field"])
        document_suffices = rule.whole_document and not config.lm.continuous
        span = {} if config.exclude == "none" or document_suffices else {"leakage span": rule.span}
        return {
            **span,
            **_batches_searched(config, known),
            **section_inputs(config.search, "search"),
            "search.exclude": config.exclude,
            "index.probes": config.index.probes,
            "lm.window": config.lm.window,
            "gnn.left": config.gnn.left,
            "gnn.right": config.gnn.right,
        }

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.retrieval.search import build_tables

        config, snapshot = context.config, context.snapshot
        if config.exclude == "none":
            warn(
                "search.exclude is none: train positions retrieve themselves, and the network learns to copy its answer"
            )
        queries = self.queries(snapshot, draft.inputs, context.splits)
        index, rows = snapshot.index, len(snapshot.streams["train"])
        made = build_tables(draft, queries, index, rows, config.search.shard_queries, context.spread)
        for split, found in made.facts["k"].items():
            if found < (config.search.graph_k if split == "train" else config.search.k):
                warn(f"the store has only {len(index)} rows: {found} neighbours per {split} position")
            if made.facts["short_of_k"][split]:
                warn(f"{made.facts['short_of_k'][split]:,} {split} positions found fewer than {found} neighbours")
        return made

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        from gnnlm.corpus.stream import SPLITS
        from gnnlm.retrieval.search import search_work

        queries, shard = self.queries(snapshot, inputs, SPLITS), snapshot.config.search.shard_queries
        return search_work(queries, snapshot.index, len(snapshot.streams["train"]), shard)

    def queries(self, snapshot: Snapshot, inputs: Mapping[str, Any], splits: Sequence[str]) -> list[Queries]:
        """Return the queries of these splits; those of train under the leakage rule."""
        import numpy as np

        from gnnlm.retrieval.index import keys_of
        from gnnlm.retrieval.search import Queries

        encoded, k = snapshot.artifact("encode"), min(snapshot.config.search.k, len(snapshot.index))
        found = []
        for split in splits:
            if split == "train":
                found.append(self._train_queries(snapshot, inputs))
                continue
            stream = snapshot.streams[split]
            found.append(Queries(stream, keys_of(encoded, split), np.arange(len(stream)), k))
        return found

    def _train_queries(self, snapshot: Snapshot, inputs: Mapping[str, Any]) -> Queries:
        from gnnlm.retrieval.index import keys_of
        from gnnlm.retrieval.search import LeakageRule, Queries

        config, encoded = snapshot.config, snapshot.artifact("encode")
        rule: LeakageRule | None = None
        if config.exclude != "none":
            rule = LeakageRule.of(config, encoded.facts["receptive_field"])
        positions = snapshot.train_positions
        for stage in snapshot.stages.values():
            read = stage.train_positions_read(snapshot, inputs)
            positions = positions if read is None else read
        keys = keys_of(encoded, "train") if snapshot.unread_states is None else snapshot.unread_states
        k = min(config.search.graph_k, len(snapshot.index))
        return Queries(snapshot.streams["train"], keys, positions, k, rule, config.lm.continuous)

    def load(self, snapshot: Snapshot, split: str) -> NeighbourTable:
        from gnnlm.retrieval.search import open_table

        return open_table(snapshot.artifact(self.name), split)

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        return "which positions were near which, without text"


def _batches_searched(config: Config, known: InputFacts) -> dict[str, Any]:
    """Return what decides which train positions are searched; nothing where all are.

    A training with fewer batches of the same order reads some of the same positions: what was searched is enough.
    """
    from gnnlm.retrieval.search import searched_positions

    train, text = config.train, known.parents["corpus"]["train"]
    batches = sum(phase.steps for phase in train.curriculum) * train.accumulate
    readable = text["tokens"] + text["documents"]
    if config.search.max_train:
        readable = min(readable, config.search.max_train)
    was = known.last.inputs
    if was and BATCHES not in was:  # all were searched
        return {}
    order = {
        "train.block": train.block,
        "train.batch_blocks": train.batch_blocks,
        "train.valid_tokens": train.valid_tokens,
        "seed": config.seed,
    }
    if was and not config.gnn.layers:  # nothing is trained, so whatever was searched is enough
        return {name: was[name] for name in (*order, BATCHES)}
    if searched_positions(config, readable) == readable:
        return {}
    same_order = bool(was) and all(was.get(name) == value for name, value in order.items())
    return {**order, BATCHES: max(batches, was[BATCHES]) if same_order else batches}


SEARCH = SearchStage()
