"""The states that a model computes when it first reads a text, before learning from it, saved during fine-tuning."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gnnlm.artifact import disk, npy_header, telling
from gnnlm.datastore.encode import round_states
from gnnlm.errors import TrainingError
from gnnlm.train.batches import TextPieces
from gnnlm.train.processes import Processes

CHUNK = 2**14  # positions that are checked together
UNREAD_STATES, UNREAD_POSITIONS = "unread.states.npy", "unread.positions.npy"


class FirstReadings:
    """Writes the states of train positions to a file when the model first reads them.

    The file has all positions; those that were not kept are zero. A step writes to the positions that it reads, so a
    step that is repeated after a crash writes the same states again. Of several processes only the first writes.
    """

    def __init__(self, folder: Path, rows: int, model: Any, pieces: TextPieces, settle: float) -> None:
        output: nn.Linear = model.get_output_embeddings()
        self._model, self._output, self._pieces = model, output, pieces
        self._drops_out = drops_out(model)
        self._kept = range(int(settle * pieces.batches_in(0)), pieces.batches_in(0))
        self._path, self._shape = folder / UNREAD_STATES, (rows, output.in_features)
        self._header = npy_header(self._shape, np.dtype(np.float16))
        self._digests = torch.full((len(self._kept),), -1)  # of each batch's states; -1 for what was not read yet
        self._read: list[tuple[int, Tensor]] = []  # numbers of batches, and the states of this process's lines

    @contextmanager
    def reading(self, number: int, read: Tensor) -> Iterator[None]:
        """Record the input of the softmax while lines of a batch are read."""
        if number not in self._kept:
            yield
            return
        seen: list[Tensor] = []
        hook = self._output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        try:
            if self._drops_out and len(read):  # states must be those of prediction, without dropout
                self._read_again(read)
                hook.remove()
            yield
        finally:
            hook.remove()
        states = torch.from_numpy(round_states(seen[0].float().cpu().numpy(), "fp16")) if seen else torch.empty(0)
        self._read.append((number, states))

    @torch.no_grad()
    def _read_again(self, read: Tensor) -> None:
        self._model.eval()
        self._model(input_ids=read, use_cache=False)
        self._model.train()

    def keep(self, processes: Processes) -> None:
        """Write the states of the batches that were read since the last call."""
        read = [(number, self._pieces.bounds(number).tolist(), mine) for number, mine in self._read]
        joined = [(number, bounds, processes.join_lines(mine, len(bounds)).numpy()) for number, bounds, mine in read]
        self._read = []
        for number, bounds, states in joined if processes.first else ():
            digest = 0
            for line, (begin, end) in enumerate(bounds):
                data = states[line, : end - begin].tobytes()
                with telling(self._path):
                    self._file.seek(self._place(begin))
                    disk.write(self._file, data)
                digest = zlib.crc32(data, digest)
            self._digests[number - self._kept.start] = digest

    def _place(self, position: int) -> int:
        """Return the byte of the file at which a position's state begins."""
        return len(self._header) + position * self._shape[1] * 2

    @cached_property
    def _file(self) -> BinaryIO:
        """The open file. It is no memory map: a full disk is then an error that can be reported, not a crash."""
        if self._path.exists():
            file = cast(BinaryIO, self._path.open("r+b"))
            disk.truncate(file, self._place(self._shape[0]))
            return file
        file = disk.create(self._path)
        disk.write(file, self._header)
        disk.truncate(file, self._place(self._shape[0]))
        return file

    def kept(self) -> Tensor:
        """Fsync what was written so far; return its digests."""
        with telling(self._path):
            disk.sync(self._file)
        return self._digests.clone()

    def check(self, kept: Tensor) -> None:
        """Resume from the digests of an earlier attempt; refused if the states in the file differ from them."""
        self._file.seek(0)
        whole = self._file.read(len(self._header)) == self._header
        others = np.ones(self._shape[0], dtype=bool)
        for number, digest in zip(self._kept, kept.tolist(), strict=True):
            found = 0
            for begin, end in self._pieces.bounds(number).tolist():
                others[begin:end] = False
                found = zlib.crc32(self._bytes(begin, end), found)
            whole = whole and digest in (-1, found)
        for begin in range(0, len(others), CHUNK):
            rows = np.frombuffer(self._bytes(begin, min(begin + CHUNK, len(others))), np.uint16)
            whole = whole and not rows.reshape(-1, self._shape[1])[others[begin : begin + CHUNK]].any()
        if not whole:
            raise TrainingError(
                f"{self._path} has lost states that were kept for the GNN; delete {self._path.parent} and run the same "
                "command again: the fine-tuning starts over"
            )
        self._digests = kept.clone()

    def _bytes(self, begin: int, end: int) -> bytes:
        """Return the states of positions as they are in the file."""
        self._file.seek(self._place(begin))
        return self._file.read(self._place(end) - self._place(begin))

    def finish(self, batches: int) -> npt.NDArray[np.int64]:
        """Close the file; return the positions whose states were kept in the first `batches` batches, in order."""
        bounds = [self._pieces.bounds(number) for number in self._kept if number < batches]
        if not bounds:
            raise TrainingError(
                f"fine-tuning stopped after batch {batches}, but lm.finetune.settle keeps states for the GNN only from "
                f"batch {self._kept.start + 1} on; train longer, or lower lm.finetune.settle"
            )
        self._file.close()
        return np.sort(np.concatenate([np.arange(begin, end) for begin, end in np.concatenate(bounds).tolist()]))


def drops_out(model: Any) -> bool:
    """Return whether a transformers model uses dropout."""
    settings = model.config.to_dict().items()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings)
