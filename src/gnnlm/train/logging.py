"""TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gnnlm.progress import warn


@contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[str, float, int], None]]:
    """A function that logs (name, value, step)."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn("no TensorBoard log: it needs pip install 'gnnlm[tensorboard]'")
        yield lambda name, value, step: None
        return
    writer = SummaryWriter(str(folder))
    try:
        yield lambda name, value, step: writer.add_scalar(name, value, step)
    finally:
        writer.close()
