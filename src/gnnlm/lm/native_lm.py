"""The paper's own base models, and the directories they are saved in.

A directory holds `config.json` (architecture and options), `model.safetensors` and, if it is known, the
vocabulary. `gnnlm lm train` and `gnnlm lm convert` write such directories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnlm.artifact import disk
from gnnlm.corpus.vocabulary import FILE, Vocabulary, load_vocabulary
from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.adaptive_transformer import AdaptiveOptions, AdaptiveTransformer, NativeOutput
from gnnlm.lm.base_lm import BaseLM, StreamOutput
from gnnlm.lm.tensor_file import load_tensors, save_tensors
from gnnlm.lm.transformer_xl import TransformerXL, TransformerXLOptions

NativeModel = AdaptiveTransformer | TransformerXL
NativeOptions = AdaptiveOptions | TransformerXLOptions
KEY = "gnnlm_architecture"  # the entry of config.json that marks a model saved here, and names its kind


def options_of(kind: str, values: Mapping[str, Any]) -> NativeOptions:
    """Return the options of a kind of model, from plain values; None stands for an option's default."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None}
    return TransformerXLOptions(**values) if kind == TransformerXL.kind else AdaptiveOptions(**values)


def make_model(options: NativeOptions) -> NativeModel:
    """Return a model with initial weights."""
    return TransformerXL(options) if isinstance(options, TransformerXLOptions) else AdaptiveTransformer(options)


def is_native(folder: Path) -> bool:
    """Return whether a directory holds one of the paper's models, as saved here."""
    return (folder / "config.json").is_file() and KEY in _read_config(folder)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); expected the config.json of a model") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds no settings; expected the config.json of a model")
    return found


class NativeLM(BaseLM):
    """A frozen model of the paper.

    It has no end tokens: <eos> of the benchmarks ends a line, not a text.
    """

    model: NativeModel
    start_always = False
    ragged = False

    def __init__(
        self,
        model: NativeModel,
        vocabulary: Vocabulary | None = None,
        start_token: int | None = None,
        dtype: str = "fp32",
    ) -> None:
        super().__init__(model, model.head, dtype)
        self.vocabulary = vocabulary
        if start_token is None:
            start_token = 0 if vocabulary is None else vocabulary.start
        self.start_token = start_token
        if vocabulary is not None and len(vocabulary) > self.vocab_size:
            raise ModelError(
                f"the vocabulary has {len(vocabulary)} entries, more than the model's {self.vocab_size}; use the one "
                "that the model came with"
            )

    @property
    def text(self) -> Vocabulary:
        if self.vocabulary is None:
            raise ModelError("this model came without a vocabulary, so it reads only token ids; convert it with one")
        return self.vocabulary

    @property
    def receptive_field(self) -> int | None:
        return self.model.receptive_field

    @property
    def segment(self) -> int | None:
        return self.model.options.segment if isinstance(self.model, TransformerXL) else None

    def encode(self, tokens_BT: Tensor) -> Tensor:
        return self.encode_keys(tokens_BT)[0]

    @torch.inference_mode()
    def encode_keys(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        out = self._read(tokens_BT)
        return out.states.float(), out.ffn_input.float()

    @torch.inference_mode()
    def stream(
        self, tokens_BT: Tensor, past: Any = None, counts: Sequence[int] | None = None, keys: bool = False
    ) -> StreamOutput:
        out = self._read(tokens_BT, past)
        return StreamOutput(out.states.float(), out.ffn_input.float() if keys else None, out.past)

    def _read(self, tokens_BT: Tensor, past: Any = None) -> NativeOutput:
        tokens_BT = self._placed(tokens_BT)
        with self._arithmetic():
            return self.model.stream(tokens_BT, past)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ConfigError("this model has no chat template; write without --chat")

    def save(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise ModelError(f"{folder} is a file; name a directory")
        disk.make_directories(folder)
        described = {KEY: self.model.kind, "options": self.model.options.as_dict(), "start_token": self.start_token}
        save_tensors(self.model, folder / "model.safetensors")
        disk.remove_file(folder / FILE)  # the vocabulary of a model that was here before
        if self.vocabulary is not None:
            self.vocabulary.save(folder)
        disk.write_file(folder / "config.json", (json.dumps(described, indent=1) + "\n").encode())


def load_native(folder: Path, device: str = "cpu", dtype: str = "fp32") -> NativeLM:
    """Load a model that `NativeLM.save` wrote."""
    described = _read_config(folder)
    try:
        model = make_model(options_of(described[KEY], described["options"]))
        start = int(described["start_token"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"{folder / 'config.json'} does not describe a model ({what[:200]}); train or convert it again"
        ) from error
    load_tensors(model, folder / "model.safetensors")
    return NativeLM(model.to(device), load_vocabulary(folder), start, dtype)
