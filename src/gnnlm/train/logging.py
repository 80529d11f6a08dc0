"""TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[str, float, int], None]]:
    """A function that logs (name, value, step)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    try:
        yield lambda name, value, step: writer.add_scalar(name, value, step)
    finally:
        writer.close()
