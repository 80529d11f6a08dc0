"""The index stage: the train states are indexed for search, segment by segment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft, draft_path
from gnnlm.config import Config
from gnnlm.engine import Work
from gnnlm.stage import BuildContext, InputFacts, SegmentSource, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.retrieval.segmented import SegmentedIndex
    from gnnlm.run.snapshot import Snapshot


class IndexStage(Stage):
    name = "index"
    folder = "index"
    parents = ("corpus", "encode")
    help = "Index the train states for search."
    part = "index"
    part_is_copied = False
    tasks = ("trained", "filled")

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        from gnnlm.retrieval.auto_index import choose_index

        index, rows = config.index, known.parents["corpus"]["train"]["tokens"]
        kind = choose_index(index, rows, known.parents["encode"]["width"]).kind
        clusters = index.clusters_of(rows) if kind in ("ivf", "paper") else None
        section = section_inputs(index, "index", skip=("probes", "clusters", "memory_gb"))
        return {**section, "index.kind": kind, "index.clusters": clusters, "seed": config.seed}

    def check(self, config: Config, width: int, rows: int) -> None:
        from gnnlm.retrieval.faiss_build import check_index

        check_index(config.index, width, rows)

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.retrieval.index_build import build_index

        config, snapshot = context.config, context.snapshot
        encoded, train = snapshot.artifact("encode"), snapshot.streams["train"]
        return build_index(draft, encoded, train, config.index, config.seed, context.spread, snapshot.live)

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        from gnnlm.retrieval.faiss_build import TRAINED, filling, train_to

        config, encoded, stream = snapshot.config, snapshot.artifact("encode"), snapshot.streams["train"]
        if kind == "trained":
            return partial(train_to, encoded, stream, config.index, config.seed)
        return filling(encoded, stream, config.index.metric, draft_path(snapshot.path(self.name)) / TRAINED)

    def part_inputs(self, snapshot: Snapshot, source: SegmentSource) -> dict[str, Any] | None:
        index = snapshot.trained(self.name)
        if index.facts["kind"] == "exact":
            return None
        from gnnlm.retrieval.faiss_build import TRAINED, index_inputs

        trained, metric = index.manifest.files[TRAINED].sha256, index.facts["metric"]
        return dict(index_inputs(source.parts["states"].fingerprint, source.stream, trained, metric))

    def write_part(self, snapshot: Snapshot, source: SegmentSource, draft: Draft) -> Mapping[str, Any]:
        from gnnlm.retrieval.faiss_build import FILE, TRAINED, fill_index
        from gnnlm.retrieval.index import Rows, key_file

        index, rows = snapshot.trained(self.name), Rows.of(source.stream)
        keys = source.parts["states"].array(key_file(snapshot.trained("encode")))
        fill_index(index.file(TRAINED), keys, rows, index.facts["metric"], draft.file(FILE))
        return {"rows": len(rows)}

    def load(self, snapshot: Snapshot) -> SegmentedIndex:
        """Open the index of every segment, in this process, removed documents included."""
        from gnnlm.retrieval.open_index import open_index

        made, encoded = snapshot.artifact(self.name), snapshot.artifact("encode")
        return open_index(made, encoded, snapshot.streams["train"], snapshot.config.index.probes, snapshot.device)

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        if artifact.facts["kind"] == "exact":
            return ""
        return "the centroids of the index, trained again" if refitted else "the centroids of the trained index"


INDEX = IndexStage()
