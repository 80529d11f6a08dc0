"""Reading a store: tensors of states, tokens and document bounds, by position."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.quantize import CodedTable


@dataclass(frozen=True)
class States:
    """One split, as tensors over its positions (states memory-mapped, half precision, or coded).

    `document_P` numbers the document of each position; `first_P` and `last_P` are its first and last position.
    """

    states_PD: Tensor | CodedTable
    tokens_P: Tensor
    document_P: Tensor
    first_P: Tensor
    last_P: Tensor

    @classmethod
    def open(cls, store: Artifact, stream: Stream) -> States:
        states_PD = mapped(store.array(f"{stream.split}.states.npy"))
        tokens_P = torch.from_numpy(np.asarray(stream.tokens, dtype=np.int64))
        return cls.make(states_PD, tokens_P, torch.from_numpy(stream.starts))

    @classmethod
    def make(cls, states_PD: Tensor, tokens_P: Tensor, starts: Tensor) -> States:
        lengths = starts.diff()
        document_P = torch.arange(len(lengths)).repeat_interleave(lengths)
        return cls(states_PD, tokens_P, document_P, starts[:-1][document_P], starts[1:][document_P] - 1)

    def __len__(self) -> int:
        return len(self.tokens_P)

    @property
    def width(self) -> int:
        return self.states_PD.shape[1] if isinstance(self.states_PD, Tensor) else self.states_PD.width

    def gather(self, positions: Tensor) -> Tensor:
        """States at the positions, float32, [..., D]."""
        if isinstance(self.states_PD, Tensor):
            return self.states_PD[positions].float()
        return self.states_PD.decode(positions)

    def coded(self, table: CodedTable) -> States:
        """The same positions with coded states."""
        return replace(self, states_PD=table)


def mapped(array: npt.NDArray[Any]) -> Tensor:
    """A memory-mapped array as a tensor."""
    with warnings.catch_warnings():  # the map is read-only, and nothing here writes to it
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
