"""Which positions are trained on when: a pure function of seed and step, so that resuming needs no state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
