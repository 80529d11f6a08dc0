"""The tensors of a model on disk, tied ones once, under their first name. Equal models give equal files."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gnnlm.artifact import writing
from gnnlm.errors import ModelError


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    kept: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        kept.setdefault(tensor.data_ptr() if tensor.numel() else -len(kept) - 1, (name, tensor.contiguous()))
    return dict(kept.values())


def save_tensors(model: nn.Module, path: Path) -> None:
    with writing(path):
        save_file(distinct_tensors(model), path)


def load_tensors(model: nn.Module, path: Path) -> None:
    """Fill a model from a file; refused if the names or shapes in it are not the model's."""
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; make it again") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); make it again") from error
    expected = {name: tuple(tensor.shape) for name, tensor in distinct_tensors(model).items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if wrong:
        first = f"{wrong[0]} has shape {found.get(wrong[0], 'none')}, expected {expected.get(wrong[0], 'none')}"
        raise ModelError(f"{path} does not fit its config.json: {len(wrong)} tensors differ ({first}); make it again")
    model.load_state_dict(tensors, strict=False)  # tied tensors are in the file once
