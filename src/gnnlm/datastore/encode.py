"""Encoding: a frozen LM turns every position of every split into a state.

The work is done in shards of windows, segment by segment. The batches of a shard depend on the segment and the config
alone, so a resumed build produces the same bytes, and so does another run with the same segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import LMConfig, StoreConfig
from gnnlm.corpus.stream import Stream, TokenStream
from gnnlm.corpus.windows import Window, plan_windows
from gnnlm.datastore.row_shards import Layout, RowShards, ShardTasks, work_of
from gnnlm.engine import Arrays, Spread, Work, here
from gnnlm.errors import ConfigError, ModelError
from gnnlm.layout import part_name
from gnnlm.lm.base_lm import BaseLM
from gnnlm.progress import numbered, warn

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
STATES = "states"  # the part of a segment that holds its states
DTYPES = {"fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class EncodingWindow:
    """The tokens that the LM reads at once, and which of their states are kept, in the order of positions."""

    window: Window
    tokens: Tokens
    kept: Tokens


class StatesAndKeys(NamedTuple):
    """States and, if the keys are not the states, keys: one row per position."""

    states: Floats
    keys: Floats | None


def encode_tokens(lm: BaseLM, tokens: Tokens, config: LMConfig, key: str = "state") -> StatesAndKeys:
    """Return the len(tokens) + 1 states of one document, [T + 1, D]."""
    windows = list(text_windows(tokens, np.arange(len(tokens) + 1), lm, config))
    return encode_windows(lm, windows, config.batch_tokens, key)


def encode_windows(lm: BaseLM, windows: Sequence[EncodingWindow], batch_tokens: int, key: str) -> StatesAndKeys:
    """Return the kept states of all windows, in order; windows of similar length are batched, padded on the right."""
    ends = np.cumsum([len(window.kept) for window in windows])
    made: list[Floats] = []
    by_length = sorted(range(len(windows)), key=lambda i: (-len(windows[i].tokens), i))
    while by_length:
        longest = len(windows[by_length[0]].tokens)
        count = max(1, batch_tokens // longest)
        batch = by_length[:count]
        by_length = by_length[count:]
        tokens_BT = torch.full((len(batch), longest), lm.start_token, dtype=torch.long)
        for line, number in enumerate(batch):
            tokens_BT[line, : len(windows[number].tokens)] = torch.from_numpy(windows[number].tokens)
        parts = (lm.encode(tokens_BT),) if key == "state" else lm.encode_keys(tokens_BT)
        if not made:
            made = [np.empty((int(ends[-1]), part.shape[-1]), dtype=np.float32) for part in parts]
        for whole, part_BTD in zip(made, parts, strict=True):
            part = part_BTD.cpu().numpy()
            for line, number in enumerate(batch):
                kept = windows[number].kept
                whole[ends[number] - len(kept) : ends[number]] = part[line, kept]
    return StatesAndKeys(made[0], made[1] if len(made) > 1 else None)


def texts_of(stream: TokenStream, continuous: bool) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield the texts that the LM reads in one go (documents, or the whole split), and the offset of each position.

    In a continuous text the position past a document's last token and the first of the next have the same offset:
    both have read everything before them.
    """
    if continuous:
        yield stream.text(), stream.places()
        return
    for start, end in itertools.pairwise(stream.starts.tolist()):
        yield np.asarray(stream.tokens[start : end - 1], dtype=np.int64), np.arange(end - start)


def segment_windows(stream: TokenStream, number: int, lm: BaseLM, config: LMConfig) -> Iterator[EncodingWindow]:
    """Yield the windows that the positions of one segment of a split are read in.

    In a continuous text windows are laid over all of it, and one that crosses into the segment is read for its
    positions there.
    """
    if config.continuous:
        first, last = stream.bases[number : number + 2].tolist()
        yield from text_windows(stream.text(None), stream.places(first, last), lm, config)
        return
    for tokens, places in texts_of(stream.segments[number], False):
        yield from text_windows(tokens, places, lm, config)


@dataclass(frozen=True)
class Encoder:
    """A frozen LM, how texts are read with it, and how states are stored."""

    lm: BaseLM
    config: LMConfig
    store: StoreConfig

    @cached_property
    def widths(self) -> dict[str, int]:
        """The width of each array of a segment: its states and, if the keys are not the states, its keys."""
        if self.store.key == "state":
            return {"states": self.lm.width}
        keys_BTD = self.lm.encode_keys(torch.full((1, 1), self.lm.start_token))[1]
        return {"states": self.lm.width, "keys": int(keys_BTD.shape[-1])}

    @property
    def row_bytes(self) -> int:
        """The size of a position's state and key."""
        return sum(self.widths.values()) * np.dtype(DTYPES[self.store.dtype]).itemsize

    def encode(self, windows: Sequence[EncodingWindow]) -> Arrays:
        """Return the kept states of windows, and their keys, in the precision of the store."""
        made = encode_windows(self.lm, windows, self.config.batch_tokens, self.store.key)
        found = {"states": made.states} if made.keys is None else {"states": made.states, "keys": made.keys}
        return {name: round_states(values, self.store.dtype) for name, values in found.items()}


@dataclass(frozen=True)
class SegmentStates(RowShards):
    """The states of one segment of a stream, and their keys."""

    encoder: Encoder
    stream: TokenStream
    number: int = 0

    @property
    def layouts(self) -> dict[str, Layout]:
        rows = len(self.stream.segments[self.number])
        dtype = DTYPES[self.encoder.store.dtype]
        return {name: Layout((rows, width), dtype) for name, width in self.encoder.widths.items()}

    @cached_property
    def windows(self) -> list[list[EncodingWindow]]:
        """The windows of each shard, which together fill at least one batch."""
        config = self.encoder.config
        store = self.encoder.store
        shards: list[list[EncodingWindow]] = [[]]
        size = read = 0
        for window in segment_windows(self.stream, self.number, self.encoder.lm, config):
            if size >= store.shard_tokens and read >= config.batch_tokens:
                shards.append([])
                size = read = 0
            shards[-1].append(window)
            size += len(window.kept)
            read += len(window.tokens)
        return shards

    @cached_property
    def ends(self) -> list[int]:
        ends: list[int] = np.cumsum([sum(len(window.kept) for window in shard) for shard in self.windows]).tolist()
        return ends

    def make(self, shard: int) -> Arrays:
        return self.encoder.encode(self.windows[shard])


def states_work(encoder: Encoder, streams: Mapping[str, TokenStream]) -> Work:
    """Return the work of the tasks that encode the segments of some splits."""
    return work_of(lambda split, segment: SegmentStates(encoder, streams[split], segment))


def build_store(
    draft: Draft,
    streams: dict[str, Stream],
    lm: BaseLM,
    lm_config: LMConfig,
    store: StoreConfig,
    made_from: Mapping[str, Any],
    spread: Spread = here,
) -> Artifact:
    """Encode train, segment by segment, then valid and test, and store the frozen softmax with them.

    `made_from` says which model reads in which way: together with its text, it determines the states of a segment.
    """
    if lm_config.whole_lines and lm.start_always:
        raise ConfigError(
            "lm.whole_lines needs a word-level model, which has a token for the end of a line; this model has none"
        )
    _check_memory(lm, lm_config)
    encoder = Encoder(lm, lm_config, store)
    train = streams["train"]
    before = [text.fingerprint for text in train.segments] if lm_config.continuous else None
    inputs = [states_inputs(made_from, text, before) for text in train.segments]
    names = [part_name(number, STATES) for number in range(len(inputs))]
    sizes = [len(text) * encoder.row_bytes for text in train.segments]
    own = (len(streams["valid"]) + len(streams["test"])) * encoder.row_bytes + lm.head.bytes
    draft.require_space(dict(zip(names, zip(inputs, sizes, strict=True), strict=True)), own, "the store")

    def encode(part: Draft, split: str, number: int = 0, prefix: str = "") -> dict[str, Any]:
        stream = streams[split]
        states = SegmentStates(encoder, stream, number)
        tasks = ShardTasks(spread, "encode", {"split": split, "segment": number})
        label = numbered(f"encode {split}", number, len(stream.segments))
        seconds = states.write(part, label, "tokens", prefix, tasks)
        return {"positions": states.rows, "seconds": seconds}

    for number, name in enumerate(names):
        draft.part(name, inputs[number], partial(encode, split="train", number=number))
    seconds = {split: encode(draft, split, prefix=f"{split}.")["seconds"] for split in ("valid", "test")}
    lm.head.save(draft.file("head.safetensors"))
    return draft.finish(
        {
            "width": lm.width,
            "vocab_size": lm.vocab_size,
            "start_token": lm.start_token,
            "dtype": store.dtype,
            "key": store.key,
            "receptive_field": min(lm_config.window, lm.receptive_field or lm_config.window),
            "seconds": seconds,
        }
    )


def states_inputs(made_from: Mapping[str, Any], text: Stream, continuous: list[str] | None = None) -> dict[str, Any]:
    """Return the inputs of a segment's states.

    `continuous` has the texts of all segments, where the LM reads on from one to the next.
    """
    return {**made_from, "text": text.fingerprint, "continuous text": continuous}


def text_windows(tokens: Tokens, places: Tokens, lm: BaseLM, config: LMConfig) -> Iterator[EncodingWindow]:
    """Yield the windows of a text whose positions have these offsets."""
    ends: Tokens = np.flatnonzero(tokens == lm.start_token) + 1 if config.whole_lines else np.empty(0, dtype=np.int64)
    for window in plan_windows(len(tokens), config.window, config.context, ends):
        low, high = np.searchsorted(places, [window.first, window.stop + 1])
        if low == high:  # a window of another segment
            continue
        before = lm.start_token if lm.start_always or not window.start else tokens[window.start - 1]
        kept = places[low:high] - window.start
        read = np.concatenate([[before], tokens[window.start : window.stop]]).astype(np.int64)
        yield EncodingWindow(window, read, kept)


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
    """Return states in the precision of the store; refused if they do not fit."""
    with np.errstate(over="ignore"):
        rounded = states.astype(DTYPES[dtype])
    if not np.isfinite(rounded).all():
        problem = "are not numbers" if not np.isfinite(states).all() else "do not fit in fp16; set store.dtype: fp32"
        raise ModelError(f"the model's states {problem} (largest magnitude {np.abs(states).max():.3g})")
    return rounded
