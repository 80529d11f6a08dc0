"""The codec stage: how the states of neighbour nodes are stored.

`fp16` reads the store as it is; `pq` compresses each state to a few bytes. Context nodes and the index always use the
exact states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    disk,
    file_digest,
    files_of,
    joined,
    writing,
)
from gnnlm.config import CodecConfig
from gnnlm.corpus.stream import part_name
from gnnlm.datastore.quantize import CodedTable, Quantizer, train_quantizer
from gnnlm.datastore.store import mapped
from gnnlm.engine import Spread, Task, here, load_arrays, save_arrays
from gnnlm.progress import Track, numbered, say

CODES, QUANTIZER = "codes", "quantizer.safetensors"
SHARD = 65_536


def build_codec(draft: Draft, encoded: Artifact, config: CodecConfig, seed: int, spread: Spread = here) -> Artifact:
    """Learn a quantizer from states sampled from the whole store, and code every segment with it."""
    segments = files_of(encoded, "train.")
    arrays = [files.array("states.npy") for files in segments]
    states = joined(arrays)
    if config.kind == "fp16":
        return draft.finish(_plain_facts(states))
    quantizer = _learned_in(draft, states, config, seed, spread)
    learned = file_digest(draft.file(QUANTIZER))
    inputs = [codes_inputs(files.artifact.fingerprint, learned) for files in segments]
    names = [part_name(number, CODES) for number in range(len(inputs))]
    sizes = [len(array) * config.bytes for array in arrays]
    draft.require_space(dict(zip(names, zip(inputs, sizes, strict=True), strict=True)), 0, "the codes")
    reads = (f"{draft.folder.name}/{QUANTIZER}",)
    for number in range(len(segments)):
        write = partial(write_codes, segments=arrays, segment=number, quantizer=quantizer, spread=spread, reads=reads)
        draft.part(names[number], inputs[number], write)
    return draft.finish(_coded_facts(quantizer, states, seed))


def codes_inputs(states: str, quantizer: str) -> dict[str, str]:
    """What the codes of a segment are made from: its states, by fingerprint, and the quantizer's file."""
    return {"states": states, "quantizer": quantizer}


def code_states(draft: Draft, states: Array, config: CodecConfig, seed: int) -> dict[str, Any]:
    """Write the codes of states into a draft, with the quantizer, and return the facts; resumes at its last shard.

    `fp16` writes nothing: the states are read as they are.
    """
    if config.kind == "fp16":
        return _plain_facts(states)
    quantizer = _learned_in(draft, states, config, seed, here)
    write_codes(draft, [states], 0, quantizer)
    return _coded_facts(quantizer, states, seed)


def _learned_in(draft: Draft, states: Array, config: CodecConfig, seed: int, spread: Spread) -> Quantizer:
    """The quantizer that a draft has, learned first where an earlier attempt has not."""
    file = draft.file(QUANTIZER)
    if not draft.notes.get("quantizer"):
        for path in spread(
            draft.shards, partial(learn_quantizer, states, config, seed), [Task("quantizer", QUANTIZER)]
        ):
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


def write_codes(
    draft: Draft,
    segments: Sequence[Array],
    segment: int,
    quantizer: Quantizer,
    spread: Spread = here,
    reads: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Write the codes of the states of a segment; resumes after the last complete shard."""
    rows = len(segments[segment])
    codes = draft.writer("codes.npy", (rows, quantizer.bytes), np.uint8)
    tasks = [
        Task("codes", f"codes.{start:010d}", {"segment": segment, "start": start}, reads)
        for start in range(codes.rows, rows, SHARD)
    ]
    with Track(numbered("codec", segment, len(segments)), rows, "states", codes.rows) as track:
        for path in spread(draft.shards, partial(code_shard, segments, quantizer), tasks):
            made = load_arrays(path)["codes"]
            codes.append(made)
            draft.commit()
            track.advance(len(made))
    return {"positions": rows}


def code_shard(segments: Sequence[Array], quantizer: Quantizer, segment: int, start: int, path: Path) -> None:
    """Write the codes of one shard of a segment's states."""
    save_arrays(path, {"codes": quantizer.encode(segments[segment][start : start + SHARD])})


def open_codec(artifact: Artifact, device: str = "cpu") -> list[CodedTable] | None:
    """The coded states of each segment, decoded on the device; None if the store itself is read."""
    if artifact.facts["kind"] == "fp16":
        return None
    quantizer = Quantizer.from_tensors(artifact.tensors(QUANTIZER)).to(device)
    parts = artifact.parts or (artifact,)  # `code_states` and older runs have the codes beside the quantizer
    return [CodedTable(mapped(part.array("codes.npy")), quantizer) for part in parts]


def _plain_facts(states: Array) -> dict[str, Any]:
    return {"kind": "fp16", "bytes": states.shape[1] * states.itemsize, "compression": 4 / states.itemsize}


def _coded_facts(quantizer: Quantizer, states: Array, seed: int) -> dict[str, Any]:
    facts = {"kind": "pq", "bytes": quantizer.bytes, "compression": 4 * states.shape[1] / quantizer.bytes}
    return {**facts, "error": _error(quantizer, states, seed)}


def _error(quantizer: Quantizer, states: npt.NDArray[Any], seed: int) -> float:
    """The share of the states' variance that coding loses, measured on a new sample."""
    some = np.sort(np.random.default_rng(seed + 1).permutation(len(states))[:4096])
    exact = torch.from_numpy(np.asarray(states[some], dtype=np.float32))
    coded = quantizer.decode(torch.from_numpy(quantizer.encode(states[some])))
    return float((coded - exact).square().sum() / (exact - exact.mean(0)).square().sum())
