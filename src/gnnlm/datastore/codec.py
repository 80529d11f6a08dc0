"""Codecs: how the states of neighbour nodes are stored.

`fp16` reads the store as it is; `pq` compresses each state to a few bytes. Context nodes and the index always use the
exact states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from gnnlm.artifact import (
    Array,
    Artifact,
    Draft,
    concatenate,
    disk,
    file_digest,
    writing,
)
from gnnlm.config import CodecConfig
from gnnlm.datastore.quantize import CodedTable, Quantizer, train_quantizer
from gnnlm.datastore.row_shards import Layout, RowShards, ShardTasks, shards_of_rows, work_of
from gnnlm.datastore.store import mapped
from gnnlm.engine import Arrays, FileTask, Spread, Work, here
from gnnlm.layout import part_name
from gnnlm.progress import numbered, say

CODES, QUANTIZER = "codes", "quantizer.safetensors"
SHARD = 65_536


def build_codec(draft: Draft, encoded: Artifact, config: CodecConfig, seed: int, spread: Spread = here) -> Artifact:
    """Learn a quantizer from states sampled from the whole store, and code every segment with it."""
    segments = encoded.parts
    arrays = [segment.array("states.npy") for segment in segments]
    states = concatenate(arrays)
    if config.kind == "fp16":
        return draft.finish(_plain_facts(states))
    quantizer = _learned_in(draft, states, config, seed, spread)
    learned = file_digest(draft.file(QUANTIZER))
    inputs = [codes_inputs(segment.fingerprint, learned) for segment in segments]
    names = [part_name(number, CODES) for number in range(len(inputs))]
    sizes = [len(array) * config.bytes for array in arrays]
    draft.require_space(dict(zip(names, zip(inputs, sizes, strict=True), strict=True)), 0, "the codes")
    reads = (f"{draft.folder.name}/{QUANTIZER}",)

    def code(part: Draft, number: int) -> dict[str, Any]:
        codes = SegmentCodes(quantizer, arrays[number])
        label = numbered("codec", number, len(segments))
        codes.write(part, label, "states", tasks=ShardTasks(spread, "codes", {"segment": number}, reads))
        return {"positions": codes.rows}

    for number, name in enumerate(names):
        draft.part(name, inputs[number], partial(code, number=number))
    return draft.finish(_coded_facts(quantizer, states, seed))


def codes_inputs(states: str, quantizer: str) -> dict[str, str]:
    """Return the inputs of a segment's codes: the fingerprint of its states and the checksum of the quantizer."""
    return {"states": states, "quantizer": quantizer}


def code_states(draft: Draft, states: Array, config: CodecConfig, seed: int) -> dict[str, Any]:
    """Write the codes of states into a draft, with the quantizer, and return the facts; resumes at its last shard.

    `fp16` writes nothing: the states are read as they are.
    """
    if config.kind == "fp16":
        return _plain_facts(states)
    quantizer = _learned_in(draft, states, config, seed, here)
    SegmentCodes(quantizer, states).write(draft, "codec", "states")
    return _coded_facts(quantizer, states, seed)


def _learned_in(draft: Draft, states: Array, config: CodecConfig, seed: int, spread: Spread) -> Quantizer:
    """Return the quantizer of a draft; learn it if no earlier attempt has."""
    file = draft.file(QUANTIZER)
    if not draft.notes.get("quantizer"):
        learn = partial(learn_quantizer, states, config, seed)
        for path in spread.files(draft.shards, learn, [FileTask("quantizer", QUANTIZER)]):
            disk.rename(path, file)
            draft.notes["quantizer"] = True
            draft.commit(QUANTIZER)
    return Quantizer.from_tensors(load_file(file))


def learn_quantizer(states: Array, config: CodecConfig, seed: int, path: Path) -> None:
    """Write a quantizer learned from some of the states."""
    sample = np.random.default_rng(seed).permutation(len(states))[: config.train_rows]
    say(f"codec: learning a code of {config.bytes} bytes per vector from {len(sample):,} of {len(states):,} states")
    began = time.perf_counter()
    quantizer = train_quantizer(states[np.sort(sample)], config.bytes, seed)
    say(f"codec: learned in {time.perf_counter() - began:.0f} s")
    with writing(path):
        save_file(quantizer.tensors(), path)


@dataclass(frozen=True)
class SegmentCodes(RowShards):
    """The codes of a segment's states."""

    quantizer: Quantizer
    states: Array

    @property
    def layouts(self) -> dict[str, Layout]:
        return {"codes": Layout((len(self.states), self.quantizer.bytes), np.uint8)}

    @property
    def ends(self) -> list[int]:
        return shards_of_rows(len(self.states), SHARD)

    def make(self, shard: int) -> Arrays:
        return {"codes": self.quantizer.encode(self.states[shard * SHARD : (shard + 1) * SHARD])}


def codes_work(quantizer: Quantizer, segments: Sequence[Array]) -> Work:
    """Return the work of the tasks that code the states of some segments."""
    return work_of(lambda segment: SegmentCodes(quantizer, segments[segment]))


def open_codec(artifact: Artifact, device: str = "cpu") -> list[CodedTable] | None:
    """Return the coded states of each segment, decoded on the device; None if the store itself is read."""
    if artifact.facts["kind"] == "fp16":
        return None
    quantizer = Quantizer.from_tensors(artifact.tensors(QUANTIZER)).to(device)
    parts = artifact.parts or (artifact,)  # `code_states` writes the codes beside the quantizer
    return [CodedTable(mapped(part.array("codes.npy")), quantizer) for part in parts]


def _plain_facts(states: Array) -> dict[str, Any]:
    return {"kind": "fp16", "bytes": states.shape[1] * states.itemsize, "compression": 4 / states.itemsize}


def _coded_facts(quantizer: Quantizer, states: Array, seed: int) -> dict[str, Any]:
    facts = {"kind": "pq", "bytes": quantizer.bytes, "compression": 4 * states.shape[1] / quantizer.bytes}
    return {**facts, "error": _error(quantizer, states, seed)}


def _error(quantizer: Quantizer, states: npt.NDArray[Any], seed: int) -> float:
    """Return the share of the states' variance that coding loses, measured on a new sample."""
    some = np.sort(np.random.default_rng(seed + 1).permutation(len(states))[:4096])
    exact = torch.from_numpy(np.asarray(states[some], dtype=np.float32))
    coded = quantizer.decode(torch.from_numpy(quantizer.encode(states[some])))
    return float((coded - exact).square().sum() / (exact - exact.mean(0)).square().sum())
