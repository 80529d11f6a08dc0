"""The text that each step trains on: a pure function of seed and step, so that resuming needs no state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORED = -100  # a target that is not scored
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockOrder:
    """Blocks of consecutive positions; each epoch cuts the text at a new offset and shuffles the blocks."""

    positions: int
    block: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, (self.positions - 1) // self.block // self.batch)

    def __call__(self, step: int) -> Tensor:
        """Return the positions [batch, block] of a step (from 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        block = min(self.block, self.positions)
        offset, order = _shuffled(self.positions, block, self.seed * 1_000_003 + epoch)
        picked = order[torch.arange(index * self.batch, (index + 1) * self.batch) % len(order)]
        return (offset + picked * block)[:, None] + torch.arange(block)

    def read(self, steps: int) -> Tensor:
        """Return which positions the first steps read.

        >>> order = BlockOrder(positions=9, block=2, batch=1, seed=0)
        >>> int(order.read(0).sum()), int(order.read(1).sum()), int(order.read(4).sum())
        (0, 2, 8)
        """
        read_P = torch.zeros(self.positions, dtype=torch.bool)
        for step in range(steps):
            read_P[self(step)] = True
        return read_P


@lru_cache(maxsize=2)
def _shuffled(positions: int, block: int, seed: int) -> tuple[int, Tensor]:
    """Return where the first block of an epoch begins, and the order of the epoch's blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = max(1, (positions - 1) // block)
    offset = int(torch.randint(positions - blocks * block + 1, (1,), generator=generator))
    return offset, torch.randperm(blocks, generator=generator)


@dataclass(frozen=True)
class TextBlocks:
    """Blocks of one long text; the model also reads the token before a block."""

    text: Tokens
    start: int
    block: int
    batch: int
    seed: int

    @cached_property
    def _read(self) -> Tensor:
        return torch.from_numpy(np.concatenate([[self.start], self.text]))

    @cached_property
    def _order(self) -> BlockOrder:
        return BlockOrder(len(self.text), self.block, self.batch, self.seed)

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the tokens to read and the tokens to predict, [B, T] each."""
        at_BT = self._order(number)
        return self._read[at_BT], self._read[at_BT + 1]

    def wanted(self, number: int) -> int:
        """Return how many tokens a batch predicts."""
        return self._order.batch * min(self.block, len(self.text))


@dataclass(frozen=True)
class Lanes:
    """One long text in parallel lanes, read segment after segment by a model with memory."""

    text: Tokens
    start: int
    segment: int
    lanes: int

    @cached_property
    def _read(self) -> Tensor:
        length = len(self.text) // self.lanes
        assert length >= self.segment, (len(self.text), self.lanes, self.segment)
        lanes = np.arange(self.lanes)[:, None] * length + np.arange(length + 1)
        return torch.from_numpy(np.concatenate([[self.start], self.text])[lanes])

    def __len__(self) -> int:
        return (self._read.shape[1] - 1) // self.segment

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        at = number % len(self) * self.segment
        part = self._read[:, at : at + self.segment + 1]
        return part[:, :-1], part[:, 1:]

    def wanted(self, number: int) -> int:
        """Return how many tokens a batch predicts."""
        return self.lanes * self.segment

    def begins(self, number: int) -> bool:
        """Return whether this segment is the first of its lane."""
        return number % len(self) == 0


@dataclass(frozen=True)
class StartToken:
    """The token that is read before a text and, with `always`, before every piece of the text."""

    token: int
    always: bool = False


class TextPieces:
    """Separate texts, cut into pieces of at most `block` tokens; a batch has pieces of similar length.

    `tokens` holds the texts, and `bounds` where each begins and ends there, [texts, 2]. Before a later piece of a text,
    the model reads the token before the piece, or the start token again.
    """

    def __init__(
        self, tokens: Tokens, bounds: Tokens, start: StartToken, block: int, batch_tokens: int, seed: int
    ) -> None:
        self._tokens, self._start = tokens, start
        self._block, self._batch_tokens, self._seed = block, batch_tokens, seed
        lengths = bounds[:, 1] - bounds[:, 0]
        self.tokens = int(lengths.sum())
        counts = -(-lengths // block)
        number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        self._begins = np.repeat(bounds[:, 0], counts) + number * block
        self._lengths = np.minimum(block, np.repeat(bounds[:, 1], counts) - self._begins)
        self._first = number == 0
        self._ends: list[int] = []  # batches up to the end of each epoch so far
        self._order: tuple[int, list[Tokens]] = (-1, [])  # the current epoch and its batches

    def _batches(self, epoch: int) -> list[Tokens]:
        if self._order[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            order = rng.permutation(len(self._begins))
            pool = 100 * max(1, self._batch_tokens // self._block)
            batches: list[Tokens] = []
            for part in np.array_split(order, max(1, len(order) // pool)):
                part = part[np.argsort(self._lengths[part], kind="stable")]
                cut = 0
                for at, length in enumerate(self._lengths[part].tolist()):
                    if at > cut and (at - cut + 1) * length > self._batch_tokens:
                        batches.append(part[cut:at])
                        cut = at
                batches.append(part[cut:])
            self._order = epoch, [batches[number] for number in rng.permutation(len(batches))]
        return self._order[1]

    def batches_in(self, epoch: int = 0) -> int:
        while len(self._ends) <= epoch:
            self._ends.append((self._ends or [0])[-1] + len(self._batches(len(self._ends))))
        return self._ends[epoch] - (self._ends[epoch - 1] if epoch else 0)

    def _pieces(self, number: int) -> Tokens:
        """Return the numbers of a batch's pieces."""
        while not self._ends or self._ends[-1] <= number:
            self.batches_in(len(self._ends))
        epoch = int(np.searchsorted(self._ends, number, side="right"))
        return self._batches(epoch)[number - (self._ends[epoch - 1] if epoch else 0)]

    def wanted(self, number: int) -> int:
        """Return how many tokens a batch predicts."""
        return int(self._lengths[self._pieces(number)].sum())

    def bounds(self, number: int) -> Tokens:
        """Return where the tokens that each line of a batch predicts begin and end, [B, 2]."""
        pieces = self._pieces(number)
        return np.stack([self._begins[pieces], self._begins[pieces] + self._lengths[pieces]], axis=1)

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the tokens to read and the tokens to predict, [B, T] each; padding is not scored."""
        pieces = self._pieces(number)
        longest = int(self._lengths[pieces].max())
        read = torch.full((len(pieces), longest), self._start.token)
        wanted = torch.full((len(pieces), longest), IGNORED)
        for line, piece in enumerate(pieces.tolist()):
            begin, length = int(self._begins[piece]), int(self._lengths[piece])
            text = torch.from_numpy(np.asarray(self._tokens[begin : begin + length], dtype=np.int64))
            if not self._start.always and not self._first[piece]:
                read[line, 0] = int(self._tokens[begin - 1])
            read[line, 1:length] = text[:-1]
            wanted[line, :length] = text
        return read, wanted
