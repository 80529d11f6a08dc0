"""Which positions are trained on when: a pure function of seed and step, so that resuming needs no state."""

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
    """Blocks of consecutive positions in a fresh order, cut at a fresh offset, each epoch."""

    positions: int
    block: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, (self.positions - 1) // self.block // self.batch)

    def __call__(self, step: int) -> Tensor:
        """Positions [batch, block] of a step (from 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        block = min(self.block, self.positions)
        blocks = max(1, (self.positions - 1) // block)
        offset = int(torch.randint(self.positions - blocks * block + 1, (1,), generator=generator))
        order = torch.randperm(blocks, generator=generator)
        picked = order[torch.arange(index * self.batch, (index + 1) * self.batch) % blocks]
        return (offset + picked * block)[:, None] + torch.arange(block)


@dataclass(frozen=True)
class TextBlocks:
    """Blocks of one long text, each read from the token before its first."""

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
        """What is read and what is to be predicted, [B, T] each."""
        at_BT = self._order(number)
        return self._read[at_BT], self._read[at_BT + 1]


@dataclass(frozen=True)
class Lanes:
    """One long text in parallel lanes, segment after segment: for a model that carries its memory along."""

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

    def begins(self, number: int) -> bool:
        """Whether nothing stands before this segment."""
        return number % len(self) == 0


@dataclass(frozen=True, eq=False)
class Pieces:
    """Texts each by itself, cut into pieces of at most `block` tokens; a batch has pieces of similar length.

    A later piece of a text is read from the token before its first, or from the start token again.
    """

    texts: tuple[Tokens, ...]
    start: int
    start_always: bool
    block: int
    batch_tokens: int
    seed: int

    @cached_property
    def _pieces(self) -> list[tuple[int, int]]:
        """Number of a text and where the piece begins in it."""
        return [(n, at) for n, text in enumerate(self.texts) for at in range(0, len(text), self.block)]

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts)

    @lru_cache(maxsize=2)  # noqa: B019 - one order of data lives as long as its training
    def _batches(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng([self.seed, epoch])
        lengths = [min(self.block, len(self.texts[n]) - at) for n, at in self._pieces]
        order = rng.permutation(len(lengths))
        pool = 100 * max(1, self.batch_tokens // self.block)
        batches: list[list[int]] = []
        for part in np.array_split(order, max(1, len(order) // pool)):
            batch: list[int] = []
            for piece in sorted(part.tolist(), key=lambda number: lengths[number]):
                if batch and (len(batch) + 1) * lengths[piece] > self.batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(piece)
            batches.append(batch)
        return [batches[number] for number in rng.permutation(len(batches))]

    def batches_in(self, epoch: int = 0) -> int:
        return len(self._batches(epoch))

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        epoch = 0
        while number >= self.batches_in(epoch):
            number -= self.batches_in(epoch)
            epoch += 1
        batch = [self._pieces[piece] for piece in self._batches(epoch)[number]]
        cut = [self.texts[n][at : at + self.block] for n, at in batch]
        longest = max(len(piece) for piece in cut)
        read = torch.full((len(cut), longest), self.start)
        wanted = torch.full((len(cut), longest), IGNORED)
        for line, ((n, at), piece) in enumerate(zip(batch, cut, strict=True)):
            before = self.start if self.start_always or not at else int(self.texts[n][at - 1])
            read[line, 0] = before
            read[line, 1 : len(piece)] = torch.from_numpy(piece[:-1])
            wanted[line, : len(piece)] = torch.from_numpy(piece)
        return read, wanted
