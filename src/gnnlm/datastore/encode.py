"""The encode stage: a frozen LM turns every position of every split into a state.

The work is done in shards of windows. The batches of a shard depend on the corpus and the config alone, so a resumed
build produces the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gnnlm.artifact import Artifact, Draft, require_space, writing
from gnnlm.config import LMConfig, StoreConfig
from gnnlm.corpus.stream import Stream
from gnnlm.corpus.windows import Window, plan_windows
from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.protocol import BaseLM
from gnnlm.progress import Track, warn

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
DTYPES = {"fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Job:
    """A window: the tokens it reads, and which of its states are kept, in the order of positions."""

    window: Window
    tokens: Tokens
    kept: Tokens


class Encoded(NamedTuple):
    """States and, if the keys are not the states, keys: one row per position."""

    states: Floats
    keys: Floats | None


def encode_tokens(lm: BaseLM, tokens: Tokens, config: LMConfig, key: str = "state") -> Encoded:
    """The len(tokens) + 1 states of one document, [T + 1, D]."""
    jobs = list(plan_jobs(tokens, np.arange(len(tokens) + 1), lm, config))
    return encode_jobs(lm, jobs, config.batch_tokens, key)


def encode_jobs(lm: BaseLM, jobs: list[Job], batch_tokens: int, key: str) -> Encoded:
    """The kept states of all jobs, in order; windows of similar length are batched, padded on the right."""
    ends = np.cumsum([len(job.kept) for job in jobs])
    made: list[Floats] = []
    by_length = sorted(range(len(jobs)), key=lambda i: (-len(jobs[i].tokens), i))
    while by_length:
        longest = len(jobs[by_length[0]].tokens)
        count = max(1, batch_tokens // longest)
        batch, by_length = by_length[:count], by_length[count:]
        tokens_BT = torch.full((len(batch), longest), lm.start_token, dtype=torch.long)
        for line, number in enumerate(batch):
            tokens_BT[line, : len(jobs[number].tokens)] = torch.from_numpy(jobs[number].tokens)
        parts = (lm.encode(tokens_BT),) if key == "state" else lm.encode_keys(tokens_BT)
        if not made:
            made = [np.empty((int(ends[-1]), part.shape[-1]), dtype=np.float32) for part in parts]
        for whole, part_BTD in zip(made, parts, strict=True):
            part = part_BTD.cpu().numpy()
            for line, number in enumerate(batch):
                kept = jobs[number].kept
                whole[ends[number] - len(kept) : ends[number]] = part[line, kept]
    return Encoded(made[0], made[1] if len(made) > 1 else None)


def texts_of(stream: Stream, continuous: bool) -> Iterator[tuple[Tokens, Tokens]]:
    """The texts that the LM reads in one go (documents, or the whole split), and the offset of each position.

    In a continuous text the position past a document's last token and the first of the next have the same offset:
    both have read everything before them.
    """
    if continuous:
        yield stream.text(), stream.places()
        return
    for start, end in itertools.pairwise(stream.starts.tolist()):
        yield np.asarray(stream.tokens[start : end - 1], dtype=np.int64), np.arange(end - start)


def encode_split(
    draft: Draft, stream: Stream, lm: BaseLM, lm_config: LMConfig, store: StoreConfig, width: int | None
) -> None:
    """Append the states of one split, and its keys of the given width; resumes after the last complete shard."""
    writer = draft.writer(f"{stream.split}.states.npy", (len(stream), lm.width), DTYPES[store.dtype])
    key_writer = (
        None if width is None else draft.writer(f"{stream.split}.keys.npy", (len(stream), width), DTYPES[store.dtype])
    )
    shard: list[Job] = []
    done, size, at, read = writer.rows, 0, 0, 0
    seconds = draft.notes.get(f"{stream.split}.seconds", 0.0)
    with Track(f"encode {stream.split}", len(stream), "tokens", done) as track:
        for tokens, places in texts_of(stream, lm_config.continuous):
            for job in plan_jobs(tokens, places, lm, lm_config):
                shard.append(job)
                size += len(job.kept)
                read += len(job.tokens)
                whole = size >= store.shard_tokens and read >= lm_config.batch_tokens  # at least one batch
                if not whole and at + size < len(stream):
                    continue
                at += size
                if at > done:
                    assert at - size >= done, "shards must not change between attempts"
                    made = encode_jobs(lm, shard, lm_config.batch_tokens, store.key)
                    writer.append(round_states(made.states, store.dtype))
                    if key_writer is not None:
                        assert made.keys is not None
                        key_writer.append(round_states(made.keys, store.dtype))
                    draft.notes[f"{stream.split}.seconds"] = seconds + track.seconds
                    draft.commit()
                    track.advance(size)
                shard, size, read = [], 0, 0


def build_store(
    draft: Draft, streams: dict[str, Stream], lm: BaseLM, lm_config: LMConfig, store: StoreConfig
) -> Artifact:
    """Encode train, valid and test, and store the frozen softmax with them."""
    rows = sum(len(stream) for stream in streams.values())
    if lm_config.whole_lines and lm.start_always:
        raise ConfigError(
            "lm.whole_lines needs a word-level model, which has a token for the end of a line; this model has none"
        )
    _check_memory(lm, lm_config)
    keys = None if store.key == "state" else lm.encode_keys(torch.full((1, 1), lm.start_token))[1].shape[-1]
    values = rows * (lm.width + (keys or 0))
    needed = values * np.dtype(DTYPES[store.dtype]).itemsize + lm.head.bytes
    require_space(draft.folder, needed - draft.bytes_there, "the store")
    for stream in streams.values():
        encode_split(draft, stream, lm, lm_config, store, keys)
    with writing(draft.file("head.safetensors")):
        lm.head.save(draft.folder / "head.safetensors")
    return draft.finish(
        {
            "width": lm.width,
            "vocab_size": lm.vocab_size,
            "start_token": lm.start_token,
            "dtype": store.dtype,
            "key": store.key,
            "receptive_field": min(lm_config.window, lm.receptive_field or lm_config.window),
            "seconds": {split: draft.notes[f"{split}.seconds"] for split in streams},
        }
    )


def plan_jobs(tokens: Tokens, places: Tokens, lm: BaseLM, config: LMConfig) -> Iterator[Job]:
    """The windows of a text whose positions have these offsets."""
    ends: Tokens = np.flatnonzero(tokens == lm.start_token) + 1 if config.whole_lines else np.empty(0, dtype=np.int64)
    for window in plan_windows(len(tokens), config.window, config.context, ends):
        before = lm.start_token if lm.start_always or not window.start else tokens[window.start - 1]
        low, high = np.searchsorted(places, [window.first, window.stop + 1])
        kept = places[low:high] - window.start
        yield Job(window, np.concatenate([[before], tokens[window.start : window.stop]]), kept)


def _check_memory(lm: BaseLM, config: LMConfig) -> None:
    """Warn if the windows would cut the memory of a model short."""
    if not config.continuous or lm.receptive_field is None or lm.segment is None:
        return
    if config.context < lm.receptive_field or config.window % lm.segment or config.context % lm.segment:
        warn(
            f"windows of {config.window} tokens with {config.context} of context cut this model's memory short: its "
            f"states depend on {lm.receptive_field} tokens. To carry it exactly, set lm.context to at least that, and "
            f"lm.context and lm.window to multiples of its segment, {lm.segment}"
        )


def round_states(states: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """States in the precision of the store; refused if they do not fit."""
    with np.errstate(over="ignore"):
        rounded = states.astype(DTYPES[dtype])
    if not np.isfinite(rounded).all():
        problem = "are not numbers" if not np.isfinite(states).all() else "do not fit in fp16; set store.dtype: fp32"
        raise ModelError(f"the model's states {problem} (largest magnitude {np.abs(states).max():.3g})")
    return rounded
