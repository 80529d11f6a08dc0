"""TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gnnlm.progress import say, warn
from gnnlm.train.processes import here


@contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[str, float, int], None]]:
    """Yield a function that logs (name, value, step) for TensorBoard; without TensorBoard it does nothing.

    Of several processes only the first logs.
    """
    if not here().first:
        yield lambda name, value, step: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn("training curves are not logged; to log them: pip install 'gnnlm[tensorboard]'")
        yield lambda name, value, step: None
        return
    say(f"training curves: tensorboard --logdir {folder}")
    writer = SummaryWriter(str(folder))
    try:
        yield lambda name, value, step: writer.add_scalar(name, value, step)
    finally:
        writer.close()
