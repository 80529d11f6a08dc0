"""Incremental reading: a text that arrives a few tokens at a time gets the states of encoding it whole.

Encoding cuts a text into windows (`corpus/windows.py`); which window gives the state of an offset depends only on the
offset. So a reader continues a window up to its end and then begins the next one as encoding does, by reading its
context again. `lm.whole_lines` is ignored: it ends windows at line ends that a reader cannot know yet.

The state at offset o has read the tokens 0..o-1 of its text and predicts token o. A window that begins at `start`
reads the token before it (or the start token), then tokens[start:]; at offset o it has read o - start + 1 tokens.

Shapes: B texts, T states, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.corpus.windows import Window, window_start
from gnnlm.errors import ConfigError
from gnnlm.lm.base_lm import BaseLM, ModelPast

Tokens = npt.NDArray[np.int64]
KEYS = ("state", "ffn_input")
BATCH_TOKENS = 2048  # read at once if whole windows are only passed through


@dataclass(frozen=True, eq=False)
class ReadStates:
    """States of what was read, padded on the right with zeros, and keys if they are not the states."""

    states_BTD: Tensor
    keys_BTD: Tensor | None
    real_BT: Tensor


@dataclass(frozen=True, eq=False)
class PastGroup:
    """Texts that are read together: where their windows begin, how many tokens of them were read, and the past."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    held: tuple[int, ...]  # tokens, the one before the window included
    past: ModelPast

    def select(self, picks: Sequence[int]) -> PastGroup | None:
        """These texts, by their numbers in the group."""
        if list(picks) == list(range(len(self.rows))):
            return self
        past = self.past.select(picks) if picks else None
        if past is None:
            return None
        rows, starts, held = (tuple(values[i] for i in picks) for values in (self.rows, self.starts, self.held))
        return PastGroup(rows, starts, held, past)

    def crop(self, held: Sequence[int]) -> PastGroup | None:
        """With only so many tokens of each window."""
        if self.held == tuple(held):
            return self
        past = self.past.crop([before - after for before, after in zip(self.held, held, strict=True)])
        return None if past is None else replace(self, held=tuple(held), past=past)


@dataclass(frozen=True, eq=False)
class LMPast:
    """What was read of each text of a batch. A value: reading on, cropping, selecting and joining make new ones."""

    texts: tuple[Tokens, ...]
    groups: tuple[PastGroup, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each text, the start token not counted."""
        return tuple(len(text) for text in self.texts)

    def crop(self, n: int | Sequence[int]) -> LMPast:
        """Without the last n tokens of each text, or n[b] of text b; the model's past is cropped at the next read."""
        counts = [n] * len(self) if isinstance(n, int) else list(n)
        if len(counts) != len(self) or not all(0 <= c <= t for c, t in zip(counts, self.lengths, strict=True)):
            raise ConfigError(
                f"expected a number of tokens to drop for each of {len(self)} texts, at most its length of "
                f"{list(self.lengths)}; got {n}"
            )
        texts = (text[: len(text) - count] for text, count in zip(self.texts, counts, strict=True))
        return LMPast(tuple(texts), self.groups)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> LMPast:
        """These texts, by number and in this order, each as often as it is named."""
        if not all(0 <= row < len(self) for row in rows):
            raise ConfigError(f"expected numbers of texts from 0 to {len(self) - 1}, got {list(rows)}")
        groups = []
        for group in self.groups:
            place = {row: number for number, row in enumerate(group.rows)}
            new = [number for number, row in enumerate(rows) if row in place]
            chosen = group.select([place[rows[number]] for number in new])
            if chosen is not None:
                groups.append(replace(chosen, rows=tuple(new)))
        return LMPast(tuple(self.texts[row] for row in rows), tuple(groups))

    def join(self, others: Sequence[LMPast]) -> LMPast:
        """The texts of all, one after the other; the next read joins what the model can read on together."""
        groups, first = [], 0
        for past in (self, *others):
            groups += [replace(group, rows=tuple(row + first for row in group.rows)) for group in past.groups]
            first += len(past)
        return LMPast(tuple(text for past in (self, *others) for text in past.texts), tuple(groups))


class WindowPart(NamedTuple):
    """Tokens of one text for the window that begins at `start`; the first `skip` of their states are not wanted."""

    row: int
    start: int
    first: int  # the offset of the first state wanted
    tokens: Tokens
    skip: int


class StateSpan(NamedTuple):
    """States of one text from an offset on, and keys if they are wanted."""

    row: int
    first: int
    parts: tuple[Tensor, ...]


class WindowReader:
    """Reads texts with a base model, in the windows that encoding uses."""

    def __init__(self, lm: BaseLM, window: int, context: int, key: str = "state") -> None:
        if not 0 <= context < window:
            raise ConfigError(f"expected a context from 0 to {window - 1}, less than the window; got {context}")
        if key not in KEYS:
            raise ConfigError(f"expected a key among {', '.join(KEYS)}; got {key}")
        self._lm, self._window, self._context, self._keys = lm, window, context, key != "state"

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]], past: LMPast | None = None) -> tuple[ReadStates, LMPast]:
        """The states after each new token of each text; without a past, also the state before the first token."""
        if past is not None and len(past) != len(tokens):
            raise ConfigError(f"expected tokens for each of the {len(past)} texts of the past, got {len(tokens)}")
        texts = [np.array(part, dtype=np.int64) for part in tokens]
        firsts = [0] * len(texts)
        old: tuple[PastGroup, ...] = ()
        if past is not None:
            texts = [np.concatenate(both) for both in zip(past.texts, texts, strict=True)]
            firsts, old = [length + 1 for length in past.lengths], past.groups
        todo = [self._windows(first, len(text)) for first, text in zip(firsts, texts, strict=True)]
        made: list[StateSpan] = []
        groups: list[PastGroup | None] = []
        for group in self._continuing(old, firsts, todo):
            jobs = []
            for row, start in zip(group.rows, group.starts, strict=True):
                stop = todo[row].pop(0).stop if todo[row] else firsts[row] - 1
                jobs.append(WindowPart(row, start, firsts[row], texts[row][firsts[row] - 1 : stop], 0))
            read = self._stream(jobs, made, group) if any(len(job.tokens) for job in jobs) else group
            groups.append(read and read.select([i for i, row in enumerate(read.rows) if not todo[row]]))
        anew = [[self._anew(row, window, texts[row]) for window in windows] for row, windows in enumerate(todo)]
        self._encode([job for jobs in anew for job in jobs[:-1]], made)
        last: dict[int, list[WindowPart]] = {}
        for job in (jobs[-1] for jobs in anew if jobs):
            last.setdefault(0 if self._lm.ragged else len(job.tokens), []).append(job)
        groups += [self._stream(jobs, made) for jobs in last.values()]
        counts = [len(text) + 1 - first for first, text in zip(firsts, texts, strict=True)]
        return self._padded(made, firsts, counts), LMPast(tuple(texts), tuple(group for group in groups if group))

    def _windows(self, first: int, last: int) -> list[Window]:
        """The windows that give the states of these offsets."""
        windows = []
        while first <= last:
            start = window_start(first, self._window, self._context)
            windows.append(Window(start, min(last, start + self._window - 1), first))
            first = windows[-1].stop + 1
        return windows

    def _anew(self, row: int, window: Window, text: Tokens) -> WindowPart:
        """Everything that a window reads, from its beginning."""
        before = self._lm.start_token if self._lm.start_always or not window.start else text[window.start - 1]
        tokens = np.concatenate([[before], text[window.start : window.stop]])
        return WindowPart(row, window.start, window.first, tokens, window.first - window.start)

    def _continuing(
        self, groups: Sequence[PastGroup], firsts: Sequence[int], todo: Sequence[Sequence[Window]]
    ) -> Iterator[PastGroup]:
        """The groups that continue their windows, cropped, and arranged to read in as few passes as possible."""
        counts = [windows[0].stop - windows[0].first + 1 if windows else 0 for windows in todo]
        reading = []
        for group in groups:
            if any(counts[row] for row in group.rows):
                reading.append(group)
            else:
                yield group
        lasting: dict[int, tuple[int, int]] = {}  # tokens that a text reads now, and tokens of its window read before
        for group in reading:
            for row, start in zip(group.rows, group.starts, strict=True):
                if start == window_start(firsts[row], self._window, self._context) and start < firsts[row]:
                    lasting[row] = counts[row], firsts[row] - start
        batches = self._batches(lasting)
        alike: dict[Hashable, list[PastGroup]] = {}
        for group in reading:
            parts: dict[Hashable, list[int]] = {}
            for number, row in enumerate(group.rows):
                if row in batches:
                    parts.setdefault(batches[row], []).append(number)
            for batch, numbers in parts.items():
                some = group.select(numbers)
                some = some and some.crop([lasting[row][1] for row in some.rows])
                if some is not None:
                    alike.setdefault(batch, []).append(some)
        for same in alike.values():
            yield from _joined(same) if any(counts[row] for row in same[0].rows) else same

    def _batches(self, texts: dict[int, tuple[int, int]]) -> dict[int, Hashable]:
        """Which texts read on in one pass: equal ones or, for a ragged model, those whose slots fit into a window."""
        if not self._lm.ragged:
            return dict(texts)
        found: dict[int, Hashable] = {}
        sizes: list[tuple[int, int]] = []
        for row, (count, left) in sorted(texts.items(), key=lambda text: -text[1][1]):
            if not count:
                found[row] = "waits"
                continue
            fits = (n for n, (most, longest) in enumerate(sizes) if longest + max(most, count) <= self._window)
            number = next(fits, len(sizes))
            most, longest = sizes.pop(number) if number < len(sizes) else (0, left)
            sizes.insert(number, (max(most, count), longest))
            found[row] = number
        return found

    def _stream(
        self, jobs: Sequence[WindowPart], made: list[StateSpan], group: PastGroup | None = None
    ) -> PastGroup | None:
        """Continue the windows of a group, or begin windows; None if the model keeps no past."""
        counts, past = [len(job.tokens) for job in jobs], None if group is None else group.past
        states_BTD, keys_BTD, past = self._lm.stream(self._batch(jobs), past, counts, self._keys)
        self._take(jobs, made, states_BTD, keys_BTD)
        if past is None:
            return None
        held = [0] * len(jobs) if group is None else group.held
        held = tuple(before + count for before, count in zip(held, counts, strict=True))
        return PastGroup(tuple(job.row for job in jobs), tuple(job.start for job in jobs), held, past)

    def _encode(self, jobs: Sequence[WindowPart], made: list[StateSpan]) -> None:
        """Read whole windows, which nothing continues."""
        size = max(1, BATCH_TOKENS // self._window)
        for number in range(0, len(jobs), size):
            some = jobs[number : number + size]
            tokens_BT = self._batch(some)
            self._take(
                some, made, *(self._lm.encode_keys(tokens_BT) if self._keys else (self._lm.encode(tokens_BT), None))
            )

    def _batch(self, jobs: Sequence[WindowPart]) -> Tensor:
        longest = max(len(job.tokens) for job in jobs)
        tokens_BT = np.full((len(jobs), longest), self._lm.start_token, dtype=np.int64)
        for line, job in zip(tokens_BT, jobs, strict=True):
            line[: len(job.tokens)] = job.tokens
        return torch.from_numpy(tokens_BT)

    def _take(
        self, jobs: Sequence[WindowPart], made: list[StateSpan], states_BTD: Tensor, keys_BTD: Tensor | None
    ) -> None:
        parts = [states_BTD] if keys_BTD is None else [states_BTD, keys_BTD]
        for line, job in enumerate(jobs):
            made.append(StateSpan(job.row, job.first, tuple(part[line, job.skip : len(job.tokens)] for part in parts)))

    def _padded(self, made: Sequence[StateSpan], firsts: Sequence[int], counts: Sequence[int]) -> ReadStates:
        """All that was made, by text and offset."""
        examples = made[0].parts if made else self._nothing()
        padded = [part.new_zeros(len(counts), max(counts, default=0), part.shape[-1]) for part in examples]
        for row, first, parts in made:
            for whole_BTD, part_TD in zip(padded, parts, strict=True):
                whole_BTD[row, first - firsts[row] :][: len(part_TD)] = part_TD
        real_BT = torch.arange(padded[0].shape[1]) < torch.tensor(counts)[:, None]
        return ReadStates(padded[0], padded[1] if self._keys else None, real_BT.to(padded[0].device))

    def _nothing(self) -> list[Tensor]:
        """Tensors of the widths of states and keys, if nothing was read."""
        if not self._keys:
            return [torch.empty(0, self._lm.width, device=self._lm.head.device)]
        return list(self._lm.encode_keys(torch.full((1, 1), self._lm.start_token)))


def _joined(groups: list[PastGroup]) -> list[PastGroup]:
    """The groups as one, or unchanged if the model cannot join pasts."""
    first, *others = groups
    past = first.past.join([other.past for other in others]) if others else None
    if past is None:
        return groups
    rows, starts, held = (
        tuple(itertools.chain.from_iterable(values))
        for values in ((g.rows for g in groups), (g.starts for g in groups), (g.held for g in groups))
    )
    return [PastGroup(rows, starts, held, past)]
