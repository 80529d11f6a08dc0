"""Checkpoints of other programs, loaded without running anything in them.

Every tensor is accounted for: it is mapped to one of ours, or known to hold no weight, or reported as unused. A file
that lacks a tensor is refused.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gnnlm.corpus.vocabulary import Vocabulary
from gnnlm.errors import ModelError
from gnnlm.lm.native_lm import NativeLM, NativeModel

WITHOUT_WEIGHT = ("*.version", "*_float_tensor", "*pos_emb.inv_freq", "*.training_step")
FAIRSEQ_METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter")


@dataclass
class Conversion:
    """A converted model, and what each tensor of the file was used for."""

    lm: NativeLM
    mapped: dict[str, str]
    unused: list[str]
    without_weight: list[str]


@dataclass
class CheckpointTensors:
    """The tensors of a file: which were mapped to tensors of ours, which are missing, and what ours are filled with."""

    tensors: dict[str, Tensor]
    mapped: dict[str, str] = field(default_factory=dict)
    filled: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def peek(self, name: str) -> Tensor:
        """Return a matrix whose shape is needed to describe the model."""
        if name not in self.tensors:
            raise ModelError(f"the checkpoint has no tensor {name}; it was made by another program, or is incomplete")
        if self.tensors[name].ndim != 2:
            shape = tuple(self.tensors[name].shape)
            raise ModelError(f"{name} has shape {shape}; expected 2 dimensions: the checkpoint has another layout")
        return self.tensors[name]

    def put(self, ours: str, *names: str, make: Callable[..., Tensor] | None = None) -> None:
        """Fill a tensor of ours from theirs, concatenated or combined by `make`."""
        lost = [name for name in names if name not in self.tensors]
        self.missing += lost
        if lost:
            return
        parts = [self.tensors[name] for name in names]
        try:
            self.filled[ours] = make(*parts) if make else torch.cat(parts)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in zip(names, parts, strict=True))
            raise ModelError(f"the shapes of the checkpoint's tensors do not fit together: {shapes}") from error
        for name in names:
            self.mapped[name] = f"{self.mapped[name]}, {ours}" if name in self.mapped else ours

    def same(self, name: str, ours: str) -> None:
        """Check that a tensor of theirs, if the file has it, repeats one of ours."""
        if name not in self or ours not in self.filled:
            return
        if not torch.equal(self.tensors[name], self.filled[ours]):
            raise ModelError(
                f"{name} should equal the tensor that {ours} was taken from, but differs; this model is not supported"
            )
        self.mapped[name] = ours

    def count(self, prefix: str) -> int:
        """Return one more than the highest number that follows the prefix in a name."""
        numbered = re.compile(re.escape(prefix) + r"(\d+)\.")
        found = [int(match.group(1)) for match in map(numbered.match, self.tensors) if match]
        return max(found, default=-1) + 1

    def finish(self, model: NativeModel, vocabulary: Vocabulary | None, start: int | None) -> Conversion:
        """Fill the model, which is refused if one of its tensors has no value."""
        if self.missing:
            raise ModelError(f"the checkpoint lacks {len(self.missing)} tensors: {', '.join(self.missing)}")
        state = model.state_dict()
        there = {state[name].data_ptr() for name in self.filled if name in state}  # tied tensors are one
        missing = [name for name, tensor in state.items() if tensor.numel() and tensor.data_ptr() not in there]
        wrong = [
            f"{name} {tuple(tensor.shape)}, expected {tuple(state[name].shape) if name in state else 'none'}"
            for name, tensor in self.filled.items()
            if name not in state or tensor.shape != state[name].shape
        ]
        if missing or wrong:
            raise ModelError(f"the checkpoint does not fill the model: {'; '.join([*missing, *wrong])}")
        model.load_state_dict(self.filled, strict=False)
        left = [name for name in self.tensors if name not in self.mapped]
        weightless = [name for name in left if any(fnmatch.fnmatch(name, pattern) for pattern in WITHOUT_WEIGHT)]
        unused = [name for name in left if name not in weightless]
        return Conversion(NativeLM(model, vocabulary, start), self.mapped, unused, weightless)


class _UnusedMeter:
    """Stands for fairseq's classes of training statistics, which are loaded but not used."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a .pt or .safetensors file as plain values."""
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ModelError(f"{path} {what}; expected a checkpoint, .pt or .safetensors")
    with path.open("rb") as file:
        first = file.read(2)
    if path.suffix != ".safetensors" and first != b"PK" and first[:1] != b"\x80":  # a zip archive, or an older pickle
        raise ModelError(f"{path} is not a checkpoint; expected what torch.save writes, or .safetensors")
    known: list[Any] = [argparse.Namespace, *((_UnusedMeter, f"fairseq.meters.{name}") for name in FAIRSEQ_METERS)]
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals(known), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they advise programmers, not users
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise errors of many kinds, and advise to drop safeguards
        raise ModelError(f"{path} {_why_not(error)}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a dictionary of tensors, got {type(found).__name__}")
    return found


def _why_not(error: Exception) -> str:
    """Return why a checkpoint could not be loaded, and what to do."""
    needed = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
    if needed is not None:
        return (
            f"holds more than tensors and plain values (it needs {needed.group(1)}), which is not loaded; save its "
            "state_dict() (and fairseq's args as an argparse.Namespace) and convert that"
        )
    if "TorchScript" in str(error):
        return "is a TorchScript archive, which is not loaded; save the model's state_dict() and convert that"
    return "cannot be read as a checkpoint: it is damaged or cut short; get the file again"


def state_dict(checkpoint: dict[str, Any]) -> CheckpointTensors:
    """Return the tensors of a checkpoint by name, in full precision."""
    inner = next((checkpoint[key] for key in ("model", "state_dict") if isinstance(checkpoint.get(key), dict)), None)
    tensors = {str(k): v for k, v in (inner or checkpoint).items() if isinstance(v, Tensor)}
    return CheckpointTensors(
        {name.removeprefix("module."): t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    )
