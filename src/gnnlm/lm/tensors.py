"""The tensors of a model on disk, each once (tied ones under their first name): one model, one sequence of bytes."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gnnlm.errors import ModelError


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    kept: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        kept.setdefault(tensor.data_ptr() if tensor.numel() else -len(kept) - 1, (name, tensor.contiguous()))
    return dict(kept.values())


def save_tensors(model: nn.Module, path: Path) -> None:
    save_file(distinct_tensors(model), path)


def load_tensors(model: nn.Module, path: Path) -> None:
    """Fill a model; refused where the file's names are not the model's."""
    tensors, expected = load_file(path), set(distinct_tensors(model))
    if tensors.keys() != expected:
        wrong = sorted(tensors.keys() ^ expected)
        raise ModelError(f"{path} is not of this model: {len(wrong)} tensors differ, the first is {wrong[0]}")
    model.load_state_dict(tensors, strict=False)
