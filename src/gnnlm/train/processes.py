"""Several processes that train one model together, started by a launcher such as torchrun.

The first process runs the command; the others wait for its orders (`run/follow.py`) and join in when it trains. Every
line of a batch belongs to one process. Gradients are *summed*, each process having divided its losses by the tokens of
all: the sum is the gradient of one process that reads the whole batch, however unequal the shares are.

Decisions (a signal, a stop, a failure) are made together at fixed points, with `agree`, so that no process waits for
another one that has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnnlm.errors import Interrupted, TrainingError

PATIENCE = timedelta(days=30)  # how long the others wait while the first process does work of its own
BUCKET = 8_000_000  # gradients summed at once: enough to use the network well, little memory
FLAGS = 3  # decisions in one agreement


class PeerFailure(TrainingError):
    """Another process failed or was interrupted, and has reported why."""


class ProcessLost(TrainingError):
    """A process has died or can no longer be reached."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train together; without a launcher it is the only one."""

    rank: int = 0
    count: int = 1
    group: Any = None  # for decisions and small values; has a long timeout and uses no GPU

    @property
    def first(self) -> bool:
        return self.rank == 0

    # -- shares --------------------------------------------------------------------------------------------

    def share_of(self, lines: int) -> slice:
        """Return the lines of a batch that this process reads: equal shares, to within one line.

        >>> [Processes(rank, 3).share_of(7) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
        """
        return slice(*self._bounds(lines, self.rank))

    def _bounds(self, lines: int, rank: int) -> tuple[int, int]:
        each, more = divmod(lines, self.count)
        begin = rank * each + min(rank, more)
        return begin, begin + each + (rank < more)

    def join_lines(self, mine: Tensor, lines: int) -> Tensor:
        """Return the lines of all processes in the first one; the other processes return their own."""
        if self.count == 1:
            return mine
        with _connected():
            if not self.first:
                if len(mine):
                    dist.send(mine.cpu().contiguous(), 0, group=self.group)
                return mine
            parts = [mine.cpu()]
            for rank in range(1, self.count):
                begin, end = self._bounds(lines, rank)
                if end > begin:
                    parts.append(torch.empty(end - begin, *mine.shape[1:], dtype=mine.dtype))
                    dist.recv(parts[-1], rank, group=self.group)
        return torch.cat(parts)

    # -- tensors -------------------------------------------------------------------------------------------

    def equalize(self, model: nn.Module) -> None:
        """Give every process the weights of the first one."""
        if self.count > 1:
            with _connected():
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.data, 0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all processes. A gradient that no process has stays None."""
        if self.count == 1:
            return
        with _connected():
            used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
            for bucket in _buckets([p for p, some in zip(parameters, used.tolist(), strict=True) if some]):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                flat = torch.cat([grad.reshape(-1) for grad in grads])
                dist.all_reduce(flat)
                for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    p.grad = part.view_as(p)

    # -- decisions -----------------------------------------------------------------------------------------

    def agree(self, number: float = 0.0, flags: Sequence[bool] = ()) -> tuple[float, tuple[bool, ...]]:
        """Return the sum of all numbers, and for each flag whether any process set it; raise if any process failed.

        >>> Processes().agree(1.5, (True, False))
        (1.5, (True, False))
        """
        if self.count == 1:
            return number, tuple(flags)
        total, *raised, interrupted, failed = self._sum([number, *flags, *[0.0] * (FLAGS - len(flags)), 0.0, 0.0])
        if failed or interrupted:
            errors = self._errors("")
            if not errors:
                raise Interrupted if self.first else PeerFailure("interrupted elsewhere")
            raise PeerFailure(errors[0])
        return total, tuple(value > 0 for value in raised[: len(flags)])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap work that all processes do: it ends in all of them together, and an error in one is an error in all."""
        try:
            yield
            self.agree()
        except (PeerFailure, ProcessLost):
            raise
        except BaseException as error:
            if self.count > 1:
                with suppress(ProcessLost):
                    self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        interrupted = isinstance(error, (Interrupted, KeyboardInterrupt))
        self._sum([0.0] * (1 + FLAGS) + [float(interrupted), float(not interrupted)])
        words = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, TrainingError):
            words = f"{type(error).__name__}: {words}"
        self._errors("" if interrupted else f"process {self.rank} of {self.count}: {words}")

    def _errors(self, mine: str) -> list[str]:
        found: list[Any] = [None] * self.count
        with _connected():
            dist.all_gather_object(found, mine, group=self.group)
        return [words for words in found if words]

    def _sum(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        with _connected():
            dist.all_reduce(tensor, group=self.group)
        return list(tensor.tolist())

    def tell(self, value: Any = None) -> Any:
        """Return, in all processes, the small value that the first one gives."""
        if self.count == 1:
            return value
        box = [value]
        with _connected():
            dist.broadcast_object_list(box, 0, group=self.group)
        return box[0]


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        words = " ".join(str(error).split())[:120]
        raise ProcessLost(
            f"a process of this training was lost ({words}); run the same command again: it resumes from the last "
            "checkpoint"
        ) from error


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype, in their order, up to `BUCKET` values at once."""
    bucket: list[nn.Parameter] = []
    for p in parameters:
        if bucket and (p.dtype != bucket[0].dtype or sum(q.numel() for q in bucket) + p.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


ALONE = Processes()
_here = ALONE


def here() -> Processes:
    """Return this process: the only one, unless a launcher started several and `joined` connected them."""
    return _here


@contextmanager
def joined() -> Iterator[Processes]:
    """Connect the processes that a launcher started, on GPUs if there are any. The first one ends the others."""
    global _here
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if local < gpus:
        torch.cuda.set_device(local)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainingError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {missing[0]} is not set; start several processes with "
            "torchrun or accelerate launch, or unset WORLD_SIZE"
        )
    with _connected():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
        _here = Processes(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))
    try:
        yield _here
    finally:
        with suppress(ProcessLost):
            if _here.first:
                _here.tell(None)
        _here = ALONE
        dist.destroy_process_group()
