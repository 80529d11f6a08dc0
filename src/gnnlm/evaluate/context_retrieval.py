"""The passages stage: the base model reads valid and test with passages of the store before the text.

Every `stride` tokens, BM25 finds passages with the last tokens that were read. The model reads the start token, the
passages (the best one last, next to the text) and as much of the text so far as fits, and the states of the next
`stride` positions are kept. A lookup never sees a token that is still to be predicted, and the windows of a text do
not depend on where the text ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from gnnlm.artifact import Array, Artifact, Draft, require_space
from gnnlm.config import Config, ContextRetrievalConfig
from gnnlm.corpus.stream import END, Stream
from gnnlm.corpus.windows import Window
from gnnlm.datastore.encode import DTYPES, EncodingWindow, Tokens, encode_windows, round_states, texts_of
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.head import Head
from gnnlm.predict.predictor import perplexity
from gnnlm.progress import Track, say
from gnnlm.retrieval.bm25 import PassageIndex

SCORED = 256  # positions that the softmax scores at once


@dataclass(frozen=True)
class Setting:
    """How passages are looked up: `count` of `length` tokens, with the last `query` tokens, every `stride` tokens."""

    count: int
    length: int
    query: int
    stride: int

    def __str__(self) -> str:
        return f"{self.count} x {self.length} tokens every {self.stride} (query {self.query})"

    @property
    def name(self) -> str:
        return f"{self.count}x{self.length}-by-{self.query}-every-{self.stride}"


def first_positions(stream: Stream, tokens: int) -> int:
    """How many positions of a split hold its first tokens."""
    if tokens >= stream.token_count:
        return len(stream)
    return int(np.flatnonzero(np.asarray(stream.tokens) != END)[tokens - 1]) + 1


def passage_jobs(
    tokens: Tokens, places: Tokens, passages: PassageIndex, setting: Setting, start_token: int, window: int
) -> Iterator[EncodingWindow]:
    """The windows of a text whose positions have these offsets, each with its passages before the text.

    While the same passages are found again and the whole text fits, one window serves several strides: it gives the
    same states.
    """
    last = int(places[-1])
    begins = range(0, last + 1, setting.stride)
    found = [passages.find(tokens[max(0, begin - setting.query) : begin], setting.count) for begin in begins]
    first = 0
    while first < len(begins):
        before = [passages.passages[number] for number in reversed(found[first])]
        size = sum(len(passage) for passage in before)

        def cut(number: int, size: int = size) -> int:
            """The first token of the text that fits into the window of a stride."""
            return max(0, begins[number] + setting.stride + size - window)

        after = first + 1
        while after < len(begins) and found[after] == found[first] and not cut(after):
            after += 1
        begin, start = begins[first], cut(first)
        stop = min(begins[after - 1] + setting.stride - 1, last)
        low, high = np.searchsorted(places, [begin, stop + 1])
        read = np.concatenate([[start_token], *before, tokens[start:stop]])
        yield EncodingWindow(Window(start, stop, begin), read, places[low:high] - start + size)
        first = after


@dataclass(frozen=True)
class ReadingCost:
    """What reading with passages costs: tokens that the model reads for each token of the text, and its speed."""

    tokens_read: float
    tokens_per_second: float


class PassageReader:
    """Reads splits with passages before the text, and writes the states to a draft."""

    def __init__(self, draft: Draft, lm: BaseLM, store: Stream, config: Config) -> None:
        self.draft = draft
        self.lm = lm
        self.store = store
        self.config = config
        self._passages: dict[int, PassageIndex] = {}

    def passages(self, length: int) -> PassageIndex:
        """The store's passages of a length."""
        if length not in self._passages:
            self._passages[length] = PassageIndex.over(self.store, length)
        return self._passages[length]

    def jobs(self, stream: Stream, positions: int, setting: Setting) -> Iterator[EncodingWindow]:
        """The windows of a split's first positions."""
        passages, left = self.passages(setting.length), positions
        start, window = self.lm.start_token, self.config.lm.window
        for tokens, places in texts_of(stream, self.config.lm.continuous):
            if left:
                yield from passage_jobs(tokens, places[:left], passages, setting, start, window)
            left -= min(left, len(places))

    def read(self, name: str, stream: Stream, positions: int, setting: Setting) -> ReadingCost:
        """Append the states of a split's first positions; resumes after the last complete shard."""
        draft, lm, config = self.draft, self.lm, self.config
        widths = {"states": lm.width}
        if config.store.key != "state":
            widths["keys"] = lm.encode_keys(torch.full((1, 1), lm.start_token))[1].shape[-1]
        dtype = DTYPES[config.store.dtype]
        writers = {
            part: draft.writer(f"{name}.{part}.npy", (positions, width), dtype) for part, width in widths.items()
        }
        shard: list[EncodingWindow] = []
        done = writers["states"].rows
        at = read = total = 0
        seconds = draft.notes.get(f"{name}.seconds", 0.0)
        with Track(f"read {stream.split} with {setting}", positions, "tokens", done) as track:
            for job in self.jobs(stream, positions, setting):
                shard.append(job)
                at += len(job.kept)
                read += len(job.tokens)
                total += len(job.tokens)
                if read < config.store.shard_tokens and at < positions:
                    continue
                if at > done:
                    assert at - sum(len(job.kept) for job in shard) >= done, "shards must not change between attempts"
                    made = encode_windows(lm, shard, config.lm.batch_tokens, config.store.key)
                    for part, writer in writers.items():
                        writer.append(round_states(getattr(made, part), config.store.dtype))
                    draft.notes[f"{name}.seconds"] = seconds + track.seconds
                    draft.commit()
                    track.advance(sum(len(job.kept) for job in shard))
                shard, read = [], 0
        return ReadingCost(total / positions, positions / max(draft.notes[f"{name}.seconds"], 1e-9))


def build_passages(
    draft: Draft, streams: dict[str, Stream], lm: BaseLM, head: Head, encoded: Artifact, config: Config
) -> Artifact:
    """Choose number, length and stride on a part of valid, and read a part of test with them."""
    wanted = config.eval.context_retrieval
    valid, test = streams["valid"], streams["test"]
    reader = PassageReader(draft, lm, streams["train"], config)
    positions = {"valid": first_positions(valid, wanted.tune_tokens), "test": first_positions(test, wanted.tokens)}
    tries = len(first_settings(wanted)) + len(set(wanted.queries)) + len(set(wanted.strides)) - 2
    rows = positions["valid"] * tries + positions["test"]
    needed = rows * lm.width * np.dtype(DTYPES[config.store.dtype]).itemsize
    require_space(draft.folder, needed - draft.bytes_there, "the states read with passages")

    costs: dict[Setting, ReadingCost] = {}

    def loss(setting: Setting) -> float:
        name = f"valid.{setting.name}"
        costs[setting] = reader.read(name, valid, positions["valid"], setting)
        states = np.load(draft.folder / f"{name}.states.npy", mmap_mode="r")
        return _loss(head, states, valid)

    tried: dict[Setting, float] = {}

    def best_with(settings: list[Setting]) -> Setting:
        tried.update({setting: loss(setting) for setting in settings})
        return min(tried, key=lambda setting: tried[setting])

    best = best_with(first_settings(wanted))
    best = best_with(other_queries(best, wanted))
    best = best_with(other_strides(best, wanted))
    say(f"passages: {best}, perplexity {perplexity(tried[best]):.2f} on valid")
    cost = reader.read("test", test, positions["test"], best)
    base = _loss(head, encoded.array("valid.states.npy")[: positions["valid"]], valid)
    facts = {
        **asdict(best),
        "passages": len(reader.passages(best.length)),
        "valid": f"valid.{best.name}",
        "positions": positions,
        "seconds": draft.notes["test.seconds"],
        "tokens_read": cost.tokens_read,
        "base_loss": base,
        "tried": [{**asdict(s), "loss": tried[s], **asdict(costs[s])} for s in tried],
    }
    kept = [f"{name}.{part}.npy" for name in (facts["valid"], "test") for part in ("states", "keys")]
    return draft.finish(facts, [name for name in kept if (draft.folder / name).exists()])


def first_settings(wanted: ContextRetrievalConfig) -> list[Setting]:
    """Every number and length of passages, at the largest stride, which costs least."""
    pairs = itertools.product(sorted(set(wanted.counts)), sorted(set(wanted.lengths)))
    return [Setting(count, length, wanted.queries[0], max(wanted.strides)) for count, length in pairs]


def other_queries(best: Setting, wanted: ContextRetrievalConfig) -> list[Setting]:
    """The best setting with every other length of the query."""
    return [replace(best, query=query) for query in sorted(set(wanted.queries)) if query != best.query]


def other_strides(best: Setting, wanted: ContextRetrievalConfig) -> list[Setting]:
    """The best setting with every smaller stride, largest first."""
    return [replace(best, stride=stride) for stride in sorted(set(wanted.strides), reverse=True)[1:]]


@torch.inference_mode()
def _loss(head: Head, states_PD: Array, stream: Stream) -> float:
    """The mean negative log-probability of the tokens at a split's first positions."""
    total = 0.0
    count = 0
    for start in range(0, len(states_PD), SCORED):
        part = states_PD[start : start + SCORED]
        targets = np.asarray(stream.tokens[start : start + len(part)], dtype=np.int64)
        states = torch.from_numpy(part[targets != END].astype(np.float32)).to(head.device)
        scores = head.target_log_probs(states, torch.from_numpy(targets[targets != END]).to(head.device))
        total -= float(scores.double().sum())
        count += len(scores)
    return total / max(count, 1)
