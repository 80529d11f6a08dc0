"""Base models of every kind, by name."""

from __future__ import annotations

from pathlib import Path

import torch

from gnnlm.config import LMConfig
from gnnlm.errors import ModelError
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.hf_loading import load_hf
from gnnlm.lm.model_files import resolve_model
from gnnlm.lm.native_lm import is_native, load_native


def load_lm(model: str | Path | LMConfig) -> BaseLM:
    """Load a frozen base model: a directory, a hub id, a .gguf file or `smollm2`; or the model of a config's `lm`."""
    config = model if isinstance(model, LMConfig) else LMConfig().model_copy(update={"model": str(model)})
    path, device = resolve_model(config.model), usable_device(config.device)
    if path.is_dir() and is_native(path):
        return load_native(path, device, config.dtype)
    return load_hf(path, config, device)


def usable_device(name: str) -> str:
    """Return the device that a config names; `auto` is CUDA if there is a GPU, otherwise the CPU."""
    device = name
    if name == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"lm.device {name} cannot be used here ({str(error).splitlines()[0][:120]}); use auto or cpu"
        ) from error
    return device
