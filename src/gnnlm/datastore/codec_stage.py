"""The codec stage: the states that neighbour nodes carry are kept as they are, or compressed to a few bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft, concatenate, draft_path
from gnnlm.config import Config
from gnnlm.engine import Work
from gnnlm.stage import BuildContext, InputFacts, SegmentSource, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.datastore.store import Store
    from gnnlm.run.snapshot import Snapshot


class CodecStage(Stage):
    name = "codec"
    folder = "codec"
    parents = ("encode",)
    help = "Compress the states that neighbour nodes carry."
    part = "codes"
    tasks = ("quantizer", "codes")

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        unused = () if config.codec.kind == "pq" else ("bytes", "train_rows")
        return {**section_inputs(config.codec, "codec", skip=unused), "seed": config.seed}

    def check(self, config: Config, width: int, rows: int) -> None:
        from gnnlm.datastore.quantize import check_bytes

        if config.codec.kind == "pq":
            check_bytes(width, config.codec.bytes, "codec.bytes")

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.datastore.codec import build_codec

        config, encoded = context.config, context.snapshot.artifact("encode")
        return build_codec(draft, encoded, config.codec, config.seed, context.spread)

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        from safetensors.torch import load_file

        from gnnlm.datastore.codec import QUANTIZER, codes_work, learn_quantizer
        from gnnlm.datastore.quantize import Quantizer

        config = snapshot.config
        segments = [part.array("states.npy") for part in snapshot.artifact("encode").parts]
        if kind == "quantizer":
            return partial(learn_quantizer, concatenate(segments), config.codec, config.seed)
        tensors = load_file(draft_path(snapshot.path(self.name)) / QUANTIZER)
        return codes_work(Quantizer.from_tensors(tensors), segments)

    def part_inputs(self, snapshot: Snapshot, source: SegmentSource) -> dict[str, Any] | None:
        from gnnlm.datastore.codec import QUANTIZER, codes_inputs

        codec = snapshot.trained(self.name)
        if codec.facts["kind"] == "fp16":
            return None
        return dict(codes_inputs(source.parts["states"].fingerprint, codec.manifest.files[QUANTIZER].sha256))

    def write_part(self, snapshot: Snapshot, source: SegmentSource, draft: Draft) -> Mapping[str, Any]:
        from gnnlm.datastore.codec import QUANTIZER, SegmentCodes
        from gnnlm.datastore.quantize import Quantizer

        quantizer = Quantizer.from_tensors(snapshot.trained(self.name).tensors(QUANTIZER))
        codes = SegmentCodes(quantizer, source.parts["states"].array("states.npy"))
        codes.write(draft, "codec", "states")
        return {"positions": codes.rows}

    def load(self, snapshot: Snapshot) -> Store:
        """Return the store: the train text, with coded states where there is a codec."""
        from gnnlm.datastore.codec import open_codec

        tables = open_codec(snapshot.artifact(self.name), snapshot.device)
        return snapshot.train if tables is None else snapshot.train.coded(tables)

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        return "" if artifact.facts["kind"] == "fp16" else "the codebooks of the states"


CODEC = CodecStage()
