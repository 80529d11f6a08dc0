"""Incremental reading: a text that arrives a few tokens at a time gets the states of encoding it whole.

Encoding cuts a text into windows (`corpus/windows.py`). Which window gives the state of an offset depends only on the
offset, so a reader continues a window up to its end, and then begins the next window as encoding does: by reading the
window's context again. `lm.whole_lines` is ignored, because it ends windows at line ends that are not known yet.

The state at offset o has read the tokens 0..o-1 of its text and predicts token o. A window that begins at `start` reads
the token before it (or the start token), then tokens[start:]. At offset o it has read o - start + 1 tokens.

Example with window 4 and context 2. The windows give the states 0..3, 4..5, 6..7, ... and begin at 0, 2, 4, ... A text
of 2 tokens was read: its past holds the window that begins at 0. Reading 3 more tokens needs the states 3, 4 and 5:
    1. The window at 0 reads on, one token: state 3. Now it is full.
    2. The window at 2 begins: it reads tokens 1..4, drops the states 2 and 3, and gives the states 4 and 5. Its past
       is kept for the next call.

Shapes: B texts, T states, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
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
BATCH_TOKENS = 2048  # tokens of whole windows that are read at once


@dataclass(frozen=True, eq=False)
class ReadStates:
    """The states of new tokens, padded with zeros on the right, and their keys unless the states are the keys."""

    states_BTD: Tensor
    keys_BTD: Tensor | None
    real_BT: Tensor


@dataclass(frozen=True, eq=False)
class PastGroup:
    """Texts whose windows share one past of the model: where each window begins, and how much of it was read."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    held: tuple[int, ...]  # tokens read, the one before the window included
    past: ModelPast

    def select(self, picks: Sequence[int]) -> PastGroup | None:
        """Return these texts, by their numbers in the group; None if there are none or the model cannot select."""
        if list(picks) == list(range(len(self.rows))):
            return self
        past = self.past.select(picks) if picks else None
        if past is None:
            return None
        rows, starts, held = (tuple(values[i] for i in picks) for values in (self.rows, self.starts, self.held))
        return PastGroup(rows, starts, held, past)

    def crop(self, held: Sequence[int]) -> PastGroup | None:
        """Return the group with only so many tokens of each window; None if the model cannot crop."""
        if self.held == tuple(held):
            return self
        past = self.past.crop([before - after for before, after in zip(self.held, held, strict=True)])
        return None if past is None else replace(self, held=tuple(held), past=past)


@dataclass(frozen=True, eq=False)
class LMPast:
    """What was read of each text of a batch. Immutable: reading on, cropping, selecting and joining make new pasts."""

    texts: tuple[Tokens, ...]
    groups: tuple[PastGroup, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each text, without the start token."""
        return tuple(len(text) for text in self.texts)

    def crop(self, n: int | Sequence[int]) -> LMPast:
        """Return a past without the last n tokens of each text, or n[b] tokens of text b.

        The model's own past is cropped at the next read.
        """
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
        """Return these texts, by number and in this order; a text may be taken more than once."""
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
        """Return the texts of all pasts, one after the other; the next read joins what can be read in one pass."""
        groups, first = [], 0
        for past in (self, *others):
            groups += [replace(group, rows=tuple(row + first for row in group.rows)) for group in past.groups]
            first += len(past)
        return LMPast(tuple(text for past in (self, *others) for text in past.texts), tuple(groups))


class WindowPart(NamedTuple):
    """Tokens of one text that its window beginning at `start` reads now.

    The first `skip` states are not wanted; `first` is the offset of the first state that is.
    """

    row: int
    start: int
    first: int
    tokens: Tokens
    skip: int


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
        """Return the states after each new token; without a past, also the state before the first token."""
        if past is not None and len(past) != len(tokens):
            raise ConfigError(f"expected tokens for each of the {len(past)} texts of the past, got {len(tokens)}")
        texts = [np.array(part, dtype=np.int64) for part in tokens]
        firsts = [0] * len(texts)  # the first offset of each text whose state is wanted
        old: tuple[PastGroup, ...] = ()
        if past is not None:
            texts = [np.concatenate(both) for both in zip(past.texts, texts, strict=True)]
            firsts = [length + 1 for length in past.lengths]
            old = past.groups
        todo = [self._windows(first, len(text)) for first, text in zip(firsts, texts, strict=True)]
        states = _StateBuffer(firsts, [len(text) + 1 - first for first, text in zip(firsts, texts, strict=True)])
        groups: list[PastGroup | None] = []
        for group in self._continuing(old, firsts, todo):
            parts = []
            for row, start in zip(group.rows, group.starts, strict=True):
                stop = todo[row].pop(0).stop if todo[row] else firsts[row] - 1
                parts.append(WindowPart(row, start, firsts[row], texts[row][firsts[row] - 1 : stop], 0))
            read = self._stream(parts, states, group) if any(len(part.tokens) for part in parts) else group
            groups.append(read and read.select([i for i, row in enumerate(read.rows) if not todo[row]]))
        begun = [[self._begin(row, window, texts[row]) for window in windows] for row, windows in enumerate(todo)]
        self._encode([part for parts in begun for part in parts[:-1]], states)
        last: dict[int, list[WindowPart]] = {}  # the windows that the next call may continue, by length
        for part in (parts[-1] for parts in begun if parts):
            last.setdefault(0 if self._lm.ragged else len(part.tokens), []).append(part)
        groups += [self._stream(parts, states) for parts in last.values()]
        return states.padded(self._nothing), LMPast(tuple(texts), tuple(group for group in groups if group))

    def _windows(self, first: int, last: int) -> list[Window]:
        """Return the windows that give the states of the offsets first..last."""
        windows = []
        while first <= last:
            start = window_start(first, self._window, self._context)
            windows.append(Window(start, min(last, start + self._window - 1), first))
            first = windows[-1].stop + 1
        return windows

    def _begin(self, row: int, window: Window, text: Tokens) -> WindowPart:
        """Return everything that a window reads from its beginning."""
        before = self._lm.start_token if self._lm.start_always or not window.start else text[window.start - 1]
        tokens = np.concatenate([[before], text[window.start : window.stop]])
        return WindowPart(row, window.start, window.first, tokens, window.first - window.start)

    def _continuing(
        self, groups: Sequence[PastGroup], firsts: Sequence[int], todo: Sequence[Sequence[Window]]
    ) -> Iterator[PastGroup]:
        """Yield the texts whose windows go on, cropped and regrouped so that few passes read them.

        A text is left out if it needs another window now, or if the model can neither select nor crop its past: then
        its window is read from the beginning. Groups in which no text reads anything are yielded as they are.
        """
        counts = [windows[0].stop - windows[0].first + 1 if windows else 0 for windows in todo]
        reading = []
        for group in groups:
            if any(counts[row] for row in group.rows):
                reading.append(group)
            else:
                yield group
        going_on: dict[int, tuple[int, int]] = {}  # tokens that a text reads now, and tokens of its window read before
        for group in reading:
            for row, start in zip(group.rows, group.starts, strict=True):
                if start == window_start(firsts[row], self._window, self._context) and start < firsts[row]:
                    going_on[row] = counts[row], firsts[row] - start
        batches = self._batches(going_on)
        same_batch: dict[Hashable, list[PastGroup]] = {}
        for group in reading:
            members: dict[Hashable, list[int]] = {}
            for number, row in enumerate(group.rows):
                if row in batches:
                    members.setdefault(batches[row], []).append(number)
            for batch, numbers in members.items():
                some = group.select(numbers)
                some = some and some.crop([going_on[row][1] for row in some.rows])
                if some is not None:
                    same_batch.setdefault(batch, []).append(some)
        for some_groups in same_batch.values():
            reads = any(counts[row] for row in some_groups[0].rows)
            yield from _joined(some_groups) if reads else some_groups

    def _batches(self, texts: dict[int, tuple[int, int]]) -> dict[int, Hashable]:
        """Return the batch of each text, given how many tokens it reads and how many its window has read.

        One pass reads a batch: texts with equal numbers or, for a ragged model, texts whose slots fit into a window.
        """
        if not self._lm.ragged:
            return dict(texts)
        found: dict[int, Hashable] = {}
        sizes: list[tuple[int, int]] = []  # of each batch: the most new tokens, and the most tokens read before
        for row, (count, held) in sorted(texts.items(), key=lambda text: -text[1][1]):
            if not count:
                found[row] = "reads nothing"
                continue
            fits = (n for n, (most, longest) in enumerate(sizes) if longest + max(most, count) <= self._window)
            number = next(fits, len(sizes))
            most, longest = sizes.pop(number) if number < len(sizes) else (0, held)
            sizes.insert(number, (max(most, count), longest))
            found[row] = number
        return found

    def _stream(
        self, parts: Sequence[WindowPart], states: _StateBuffer, group: PastGroup | None = None
    ) -> PastGroup | None:
        """Continue the windows of a group, or begin windows; return None if the model keeps no past."""
        counts = [len(part.tokens) for part in parts]
        before = None if group is None else group.past
        states_BTD, keys_BTD, past = self._lm.stream(self._batch(parts), before, counts, self._keys)
        states.put(parts, states_BTD, keys_BTD)
        if past is None:
            return None
        held = [0] * len(parts) if group is None else group.held
        held = tuple(earlier + count for earlier, count in zip(held, counts, strict=True))
        return PastGroup(tuple(part.row for part in parts), tuple(part.start for part in parts), held, past)

    def _encode(self, parts: Sequence[WindowPart], states: _StateBuffer) -> None:
        """Read whole windows that nothing will continue."""
        size = max(1, BATCH_TOKENS // self._window)
        for number in range(0, len(parts), size):
            some = parts[number : number + size]
            tokens_BT = self._batch(some)
            if self._keys:
                states.put(some, *self._lm.encode_keys(tokens_BT))
            else:
                states.put(some, self._lm.encode(tokens_BT), None)

    def _batch(self, parts: Sequence[WindowPart]) -> Tensor:
        longest = max(len(part.tokens) for part in parts)
        tokens_BT = np.full((len(parts), longest), self._lm.start_token, dtype=np.int64)
        for line, part in zip(tokens_BT, parts, strict=True):
            line[: len(part.tokens)] = part.tokens
        return torch.from_numpy(tokens_BT)

    def _nothing(self) -> tuple[Tensor, Tensor | None]:
        """Return tensors of the widths of states and keys, for a call that reads nothing."""
        if self._keys:
            return self._lm.encode_keys(torch.full((1, 1), self._lm.start_token))
        return torch.empty(0, self._lm.width, device=self._lm.head.device), None


class _StateBuffer:
    """Collects the wanted states of each text, from its first wanted offset on."""

    def __init__(self, firsts: Sequence[int], counts: Sequence[int]) -> None:
        self._firsts, self._counts = firsts, counts
        self._padded: list[Tensor] = []  # states, and keys if they are wanted

    def put(self, parts: Sequence[WindowPart], states_BTD: Tensor, keys_BTD: Tensor | None) -> None:
        read = [states_BTD] if keys_BTD is None else [states_BTD, keys_BTD]
        self._make_room(read)
        for line, (row, _, first, tokens, skip) in enumerate(parts):
            for padded_BTD, read_BTD in zip(self._padded, read, strict=True):
                begin = first - self._firsts[row]
                padded_BTD[row, begin : begin + len(tokens) - skip] = read_BTD[line, skip : len(tokens)]

    def _make_room(self, read: Sequence[Tensor]) -> None:
        if not self._padded:
            shape = len(self._counts), max(self._counts, default=0)
            self._padded = [part.new_zeros(*shape, part.shape[-1]) for part in read]

    def padded(self, nothing: Callable[[], tuple[Tensor, Tensor | None]]) -> ReadStates:
        """Return all that was put; `nothing` gives tensors of the right widths if that is none."""
        if not self._padded:
            self._make_room([part for part in nothing() if part is not None])
        states_BTD, keys_BTD = self._padded if len(self._padded) == 2 else (self._padded[0], None)
        real_BT = torch.arange(states_BTD.shape[1]) < torch.tensor(self._counts)[:, None]
        return ReadStates(states_BTD, keys_BTD, real_BT.to(states_BTD.device))


def _joined(groups: list[PastGroup]) -> list[PastGroup]:
    """Return the groups as one, or unchanged if the model cannot join pasts."""
    first, *others = groups
    past = first.past.join([other.past for other in others]) if others else None
    if past is None:
        return groups
    rows, starts, held = (
        tuple(itertools.chain.from_iterable(getattr(group, name) for group in groups))
        for name in ("rows", "starts", "held")
    )
    return [PastGroup(rows, starts, held, past)]
