"""What the parts of a segment are made from in a run, whether a stage builds them or a document is added later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnlm.run import Run


def encoded_from(run: Run, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Which model reads in which way, of the inputs of the encode stage: with a text, it determines states."""
    made_from = {name: value for name, value in inputs.items() if name != "artifact corpus"}
    return {**made_from, "model files": run.artifact("corpus").inputs["model files"]}


def cached_from(run: Run, states: str, codes: str | None) -> dict[str, Any]:
    """Which network and which states the tables of a segment are made from."""
    return {
        "network": run.artifact("train").fingerprint,
        "softmax": run.artifact("encode").manifest.files["head.safetensors"].sha256,
        "bytes": run.config.cache.bytes if run.config.cache.dtype == "pq" else None,
        "states": states,
        "codes": codes,
    }
