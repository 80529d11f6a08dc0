"""Any causal language model of transformers as a base model. It is loaded in `hf_loading.py`.

The state is the input of the output embedding, as the model itself computes it. What the model does to the logits
afterwards (scale, soft cap) is read from its config. A model that does anything else is refused when it is loaded: on a
probe, head(state) is compared with the model's own log-softmax.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnnlm.errors import ConfigError, ModelError
from gnnlm.lm.base_lm import BaseLM, StreamOutput
from gnnlm.lm.head import SoftmaxHead
from gnnlm.lm.hf_tokenizer import HFTokenizer
from gnnlm.matmul import speed_up

if TYPE_CHECKING:
    from gnnlm.lm.hf_stream import HFStream

FEED_FORWARD = ("mlp", "feed_forward", "ffn", "fc1", "block_sparse_moe")  # its names in the families of models


class HFModel(BaseLM):
    """A frozen transformers model."""

    start_always = True  # some models are degenerate without their start token

    def __init__(self, model: Any, tokenizer: Any, start: str = "auto", dtype: str = "fp32") -> None:
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise ModelError(
                f"{type(model).__name__} has no linear output layer (got {type(output).__name__}); this kind of model "
                "is not supported"
            )
        super().__init__(model, SoftmaxHead(output.weight, output.bias, *_logit_config(model.config)), dtype)
        speed_up(self.model)
        self.tokenizer = tokenizer
        self._text = HFTokenizer(tokenizer, self.vocab_size)
        self.start_token = _start_token(tokenizer, start, self.vocab_size)
        last = _last_feed_forward(model)
        self._keys = None if last is None else _InputRecorder(last)
        self._check_head()

    @property
    def text(self) -> HFTokenizer:
        return self._text

    def encode(self, tokens_BT: Tensor) -> Tensor:
        return self._forward(tokens_BT, use_cache=False)[0]

    def encode_keys(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        states_BTD, keys_BTD, _ = self._forward(tokens_BT, keys=True, use_cache=False)
        assert keys_BTD is not None
        return states_BTD, keys_BTD

    @cached_property
    def _stream(self) -> HFStream:
        from gnnlm.lm.hf_stream import HFStream, find_mode  # imports transformers, which takes a while

        base = self.model.base_model
        return HFStream(base, self._forward, find_mode(base, self.vocab_size, partial(self._forward, exact=True)))

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
        """Return states, keys if asked for, and the model's own output. Every forward pass goes through here.

        `exact` calculates in full precision whatever `lm.dtype` says.
        """
        tokens_BT = self._placed(tokens_BT)
        recording = self._keys_recorded() if keys else contextlib.nullcontext([])
        arguments = {
            name: value.to(tokens_BT.device) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        with recording as recorded, contextlib.nullcontext() if exact else self._arithmetic():
            out = self.model.base_model(input_ids=tokens_BT, **arguments)
        states_BTD = out.last_hidden_state.float()
        return states_BTD, recorded[0].reshape(*states_BTD.shape[:2], -1).float() if keys else None, out

    def _keys_recorded(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        if self._keys is None:
            raise ModelError(
                f"{type(self.model).__name__}: its last feed-forward layer has none of the names "
                f"{', '.join(FEED_FORWARD)}; use store.key: state"
            )
        return self._keys.recording()

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a text by the settings of the model and of its tokenizer."""
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        found = [self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
        return frozenset(int(token) for token in found if token is not None and 0 <= token < self.vocab_size)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("this model's tokenizer has no chat template; write without chat")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program and raises errors of any kind
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return self.tokenize(text)[0]

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Refuse a model whose log-probabilities are not head(state)."""
        probe = torch.arange(8, device=self.head.device)[None] % self.vocab_size
        theirs = self.model(input_ids=probe, use_cache=False).logits.float().log_softmax(-1)
        states = self.model.base_model(input_ids=probe, use_cache=False).last_hidden_state.float()
        if states.shape[-1] != self.width:
            raise ModelError(
                f"{type(self.model).__name__}: its states have width {states.shape[-1]}, its output layer "
                f"{self.width}; this kind of model is not supported"
            )
        gap = (theirs - self.head.log_probs(states)).abs().max().item()
        if not gap < 1e-2:
            raise ModelError(
                f"{type(self.model).__name__} changes its logits in a way not known here (log-probabilities differ "
                f"by {gap:.3g} on a probe); its probabilities would be wrong, so use another model"
            )


class _InputRecorder:
    """Records what a module is given, separately for each thread that asks for it."""

    def __init__(self, module: nn.Module) -> None:
        self._local = local = threading.local()

        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            recorded: list[Tensor] | None = getattr(local, "recorded", None)
            if recorded is not None:
                recorded.append(inputs[0])

        module.register_forward_pre_hook(record)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        self._local.recorded = recorded = list[Tensor]()
        try:
            yield recorded
        finally:
            self._local.recorded = None


def _last_feed_forward(model: nn.Module) -> nn.Module | None:
    """Return the feed-forward network of the last layer, or its first matrix; None if its name is not known."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and _feed_forward(m[-1])]
    return _feed_forward(stacks[-1][-1]) if stacks else None


def _feed_forward(layer: nn.Module) -> nn.Module | None:
    return next(
        (getattr(layer, name) for name in FEED_FORWARD if isinstance(getattr(layer, name, None), nn.Module)), None
    )


def _logit_config(config: Any) -> tuple[float, float | None]:
    """Return the scale and the soft cap that a model applies to its logits, from its config."""
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
