"""The encode stage: a frozen LM turns every position of every split into a state.

Work goes by shards of windows; a shard's batches depend on the corpus and the config alone, so a resumed
build makes the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gnnlm.artifact import Artifact, Draft, require_space, writing
from gnnlm.config import LMConfig, StoreConfig
from gnnlm.corpus.stream import Stream
from gnnlm.corpus.windows import Window, plan_windows
from gnnlm.errors import ModelError
from gnnlm.lm.protocol import BaseLM
from gnnlm.progress import Track

DTYPES = {"fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Job:
    """A window with the tokens it reads (without the start token)."""

    window: Window
    tokens: npt.NDArray[np.int64]


def encode_tokens(lm: BaseLM, tokens: npt.NDArray[np.int64], config: LMConfig) -> npt.NDArray[np.float32]:
    """The len(tokens) + 1 states of one document, [T + 1, D]."""
    return encode_jobs(lm, _jobs(tokens, config), config.batch_tokens)


def encode_jobs(lm: BaseLM, jobs: list[Job], batch_tokens: int) -> npt.NDArray[np.float32]:
    """The kept states of all jobs, in order. Windows of similar length are batched, padded on the right."""
    ends = np.cumsum([job.window.kept for job in jobs])
    states = np.empty((int(ends[-1]), lm.width), dtype=np.float32)
    by_length = sorted(range(len(jobs)), key=lambda i: (-len(jobs[i].tokens), i))
    while by_length:
        longest = len(jobs[by_length[0]].tokens) + 1
        batch, by_length = by_length[: max(1, batch_tokens // longest)], by_length[max(1, batch_tokens // longest) :]
        tokens_BT = torch.full((len(batch), longest), lm.start_token, dtype=torch.long)
        for line, number in enumerate(batch):
            tokens_BT[line, 1 : 1 + len(jobs[number].tokens)] = torch.from_numpy(jobs[number].tokens)
        states_BTD = lm.encode(tokens_BT).cpu().numpy()
        for line, number in enumerate(batch):
            window = jobs[number].window
            kept = states_BTD[line, window.first - window.start : window.stop - window.start + 1]
            states[ends[number] - window.kept : ends[number]] = kept
    return states


def encode_split(draft: Draft, stream: Stream, lm: BaseLM, lm_config: LMConfig, store: StoreConfig) -> None:
    """Append the states of one split, going on from the last whole shard."""
    writer = draft.writer(f"{stream.split}.states.npy", (len(stream), lm.width), DTYPES[store.dtype])
    shard: list[Job] = []
    done, size = writer.rows, 0
    seconds = draft.notes.get(f"{stream.split}.seconds", 0.0)
    at = 0
    with Track(f"encode {stream.split}", len(stream), "tokens", done) as track:
        for number in range(len(stream.starts) - 1):
            start, end = int(stream.starts[number]), int(stream.starts[number + 1])
            for job in _jobs(np.asarray(stream.tokens[start : end - 1], dtype=np.int64), lm_config):
                shard.append(job)
                size += job.window.kept
                last = number == len(stream.starts) - 2 and job.window.stop == end - start - 1
                if size < store.shard_tokens and not last:
                    continue
                at += size
                if at > done:
                    assert at - size >= done, "shards must not change between tries"
                    states = encode_jobs(lm, shard, lm_config.batch_tokens)
                    writer.append(round_states(states, store.dtype))
                    draft.notes[f"{stream.split}.seconds"] = seconds + track.seconds
                    draft.commit()
                    track.advance(size)
                shard, size = [], 0


def build_store(
    draft: Draft, streams: dict[str, Stream], lm: BaseLM, lm_config: LMConfig, store: StoreConfig
) -> Artifact:
    """Encode train, valid and test, and keep the frozen softmax beside them."""
    rows = sum(len(stream) for stream in streams.values())
    head_bytes = 4 * lm.width * lm.vocab_size
    needed = rows * lm.width * np.dtype(DTYPES[store.dtype]).itemsize + head_bytes
    require_space(draft.folder, needed - draft.bytes_there, "the store")
    for stream in streams.values():
        encode_split(draft, stream, lm, lm_config, store)
    with writing(draft.folder / "head.safetensors"):
        lm.head.save(draft.folder / "head.safetensors")
    return draft.finish(
        {
            "width": lm.width,
            "vocab_size": lm.vocab_size,
            "start_token": lm.start_token,
            "dtype": store.dtype,
            "seconds": {split: draft.notes[f"{split}.seconds"] for split in streams},
        }
    )


def _jobs(tokens: npt.NDArray[np.int64], config: LMConfig) -> list[Job]:
    plan = plan_windows(len(tokens), config.window, config.context)
    return [Job(window, tokens[window.start : window.stop]) for window in plan]


def round_states(states: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """States as the store keeps them; refused where they do not fit."""
    with np.errstate(over="ignore"):
        rounded = states.astype(DTYPES[dtype])
    if not np.isfinite(rounded).all():
        problem = "are not numbers" if not np.isfinite(states).all() else "do not fit in fp16; set store.dtype: fp32"
        raise ModelError(f"the model's states {problem} (largest magnitude {np.abs(states).max():.3g})")
    return rounded
