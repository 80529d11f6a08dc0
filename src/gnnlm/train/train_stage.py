"""The train stage: the graph network is trained in front of the frozen softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import Config, flat
from gnnlm.stage import NO_NETWORK, BuildContext, InputFacts, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.gnn.model import GnnModel
    from gnnlm.retrieval.index import Ids
    from gnnlm.run.snapshot import Snapshot


class TrainStage(Stage):
    name = "train"
    folder = "gnn"
    parents = ("encode", "codec", "search")
    help = "Train the graph network."
    trains = True

    def is_in(self, config: Config) -> bool:
        return config.gnn.layers > 0

    def absence(self, config: Config) -> str:
        return NO_NETWORK.format(self.name)

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        from gnnlm.gnn.gnn_options import resolve_options, similarity_best

        best = similarity_best(config.index.metric)
        options = resolve_options(config.gnn, known.parents["encode"]["width"], best=best).as_dict()
        del options["similarity_unit"]  # comes from the neighbour tables
        train = section_inputs(config.train, "train", skip=("device",))
        return {**flat(options, "gnn."), **train, "seed": config.seed}

    def check(self, config: Config, width: int, rows: int) -> None:
        from gnnlm.gnn.gnn_options import resolve_options

        resolve_options(config.gnn, width)

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        import torch

        from gnnlm.gnn.gnn_options import resolve_options, similarity_best, similarity_unit
        from gnnlm.gnn.model import GnnModel
        from gnnlm.train.tensorboard import tensorboard
        from gnnlm.train.train_gnn import TrainingTexts, train_gnn
        from gnnlm.train.training_loop import training_setup

        config, snapshot = context.config, context.snapshot
        torch.manual_seed(config.seed)
        train, valid, metric = snapshot.searched("train"), snapshot.searched("valid"), config.index.metric
        unit, best = similarity_unit(metric, train.table.similarity), similarity_best(metric)
        model = GnnModel(resolve_options(config.gnn, snapshot.head.width, unit, best), snapshot.head)
        model.checkpoint = config.train.checkpoint
        with tensorboard(context.curves) as log:
            setup = training_setup(context, draft, log, config.train.device)
            texts = TrainingTexts(train, valid, torch.from_numpy(snapshot.train_positions))
            return train_gnn(setup, model, snapshot.head, snapshot.graphs, texts, config.train)

    def train_positions_read(self, snapshot: Snapshot, search_inputs: Mapping[str, Any]) -> Ids | None:
        from gnnlm.retrieval.search_stage import BATCHES
        from gnnlm.train.train_gnn import block_order, read_lines

        batches = search_inputs.get(BATCHES)
        if batches is None:
            return None
        config, positions = snapshot.config, snapshot.train_positions
        order = block_order(config.train, len(positions), config.seed)
        scored = min(config.train.valid_tokens, len(snapshot.streams["valid"]))
        some: Ids = positions[read_lines(order, batches, scored).numpy()]
        return some

    def load(self, snapshot: Snapshot) -> GnnModel | None:
        """Load the trained network; None in a run without one."""
        from gnnlm.gnn.model import GnnModel

        if not snapshot.has(self.name):
            return None
        path = snapshot.trained(self.name).file("model.safetensors")
        return GnnModel.load(path, snapshot.head).to(snapshot.device).freeze()

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        return "the weights of the graph network" + (", trained again" if refitted else "")


TRAIN = TrainStage()
