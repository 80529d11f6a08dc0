"""The codec stage: how the states of neighbour nodes are stored.

`fp16` reads the store as it is; `pq` compresses each state to a few bytes. Context nodes and the index always use the
exact states.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from gnnlm.artifact import Artifact, Draft, require_space, writing
from gnnlm.config import CodecConfig
from gnnlm.datastore.quantize import CodedTable, Quantizer, train_quantizer
from gnnlm.datastore.store import mapped
from gnnlm.progress import Track, say

SHARD = 65_536


def build_codec(draft: Draft, store: Artifact, config: CodecConfig, seed: int) -> Artifact:
    """Learn a quantizer from states sampled from the whole store, and encode every position with it."""
    states = store.array("train.states.npy")
    rows, width = states.shape
    if config.kind == "fp16":
        return draft.finish({"kind": "fp16", "bytes": width * states.itemsize, "compression": 4 / states.itemsize})
    require_space(draft.folder, rows * config.bytes - draft.bytes_there, "the codes")
    file = draft.file("quantizer.safetensors")
    if not draft.resumed:
        sample = np.random.default_rng(seed).permutation(rows)[: config.train_rows]
        say(f"codec: learning a code of {config.bytes} bytes per vector from {len(sample):,} of {rows:,} states")
        began = time.perf_counter()
        quantizer = train_quantizer(states[np.sort(sample)], config.bytes, seed)
        say(f"codec: learned in {time.perf_counter() - began:.0f} s")
        with writing(file):
            save_file(quantizer.tensors(), file)
    quantizer = Quantizer.from_tensors(load_file(file))
    codes = draft.writer("codes.npy", (rows, config.bytes), np.uint8)
    if not draft.resumed:
        draft.commit()
    with Track("codec", rows, "states", codes.rows) as track:
        for start in range(codes.rows, rows, SHARD):
            codes.append(quantizer.encode(states[start : start + SHARD]))
            draft.commit()
            track.advance(min(SHARD, rows - start))
    facts = {"kind": "pq", "bytes": config.bytes, "compression": 4 * width / config.bytes}
    return draft.finish({**facts, "error": _error(quantizer, states, seed)})


def open_codec(artifact: Artifact, device: str = "cpu") -> CodedTable | None:
    """The coded states, decoded on the device; None if the store itself is read."""
    if artifact.facts["kind"] == "fp16":
        return None
    quantizer = Quantizer.from_tensors(artifact.tensors("quantizer.safetensors"))
    return CodedTable(mapped(artifact.array("codes.npy")), quantizer.to(device))


def _error(quantizer: Quantizer, states: npt.NDArray[Any], seed: int) -> float:
    """The share of the states' variance that coding loses, measured on a new sample."""
    some = np.sort(np.random.default_rng(seed + 1).permutation(len(states))[:4096])
    exact = torch.from_numpy(np.asarray(states[some], dtype=np.float32))
    coded = quantizer.decode(torch.from_numpy(quantizer.encode(states[some])))
    return float((coded - exact).square().sum() / (exact - exact.mean(0)).square().sum())
