"""The frozen softmax: states in, log-probabilities out.

A store has a copy of the head, so that training a GNN does not load the LM. `SoftmaxHead` is a matrix with an optional
bias, scale and soft cap on the logits, which covers the Hugging Face causal LMs known to us. The paper's base models
have an adaptive softmax (`adaptive_softmax.py`).

Shapes: N states, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gnnlm.artifact import writing
from gnnlm.matmul import product

CHUNK_LOGITS = 2**25  # logits held at once: 128 MB of float32

ChunkValues = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


class Confidence(NamedTuple):
    """At each state, the likeliest token, its log-probability, and the entropy of the softmax in nats."""

    token: Tensor
    log_prob: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, log_probs_NV: Tensor) -> Confidence:
        """
        >>> Confidence.of(torch.tensor([[0.5, 0.25, 0.25]]).log()).entropy
        tensor([1.0397])
        """
        log_prob, token = log_probs_NV.max(-1)
        return cls(token, log_prob, -torch.linalg.vecdot(log_probs_NV.exp(), log_probs_NV))


class Head(nn.Module, ABC):
    """Turns states into log-probabilities."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def width(self) -> int: ...

    @property
    @abstractmethod
    def embeddings_VD(self) -> Tensor:
        """One vector per token, in the space of states."""

    @property
    def device(self) -> torch.device:
        return next(tensor for tensor in (*self.parameters(), *self.buffers())).device

    @property
    def bytes(self) -> int:
        """The size on disk and in memory."""
        return sum(t.numel() * t.element_size() for t in (*self.parameters(), *self.buffers()))

    @abstractmethod
    def log_probs(self, states_ND: Tensor) -> Tensor:
        """Return log-probabilities over the vocabulary, [..., V]."""

    @abstractmethod
    def target_log_probs(self, states_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Return the log-probability of one token per state, [N], without ever holding [N, V].

        The result is differentiable with respect to the states.
        """

    def confidence(self, states_ND: Tensor) -> Confidence:
        """Return the confidence at each state, [N], without ever holding [N, V]."""
        return self.target_confidence(states_ND, torch.zeros(len(states_ND), dtype=torch.long, device=self.device))[1]

    def target_confidence(self, states_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Confidence]:
        """Return the log-probability of one token per state, and the confidence; [N, V] is never held."""
        values, sure = [], []
        chunk = max(1, CHUNK_LOGITS // self.vocab_size)
        for states, targets in zip(states_ND.split(chunk), targets_N.split(chunk), strict=True):
            log_probs = self.log_probs(states)
            values.append(log_probs.gather(1, targets[:, None])[:, 0])
            sure.append(Confidence.of(log_probs))
        return torch.cat(values), Confidence(*map(torch.cat, zip(*sure, strict=True)))

    @abstractmethod
    def on(self, device: torch.device | str) -> Head:
        """Return a copy of the head on a device."""

    @abstractmethod
    def save(self, path: Path) -> None: ...


class SoftmaxHead(Head):
    """log_softmax(cap(scale * (W h + b))), which is never trained."""

    weight_VD: Tensor
    bias_V: Tensor | None

    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None = None, scale: float = 1.0, soft_cap: float | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("weight_VD", weight_VD.detach().float().contiguous())
        self.register_buffer("bias_V", None if bias_V is None else bias_V.detach().float().contiguous())
        self.scale, self.soft_cap = scale, soft_cap

    @property
    def vocab_size(self) -> int:
        return self.weight_VD.shape[0]

    @property
    def width(self) -> int:
        return self.weight_VD.shape[1]

    @property
    def embeddings_VD(self) -> Tensor:
        return self.weight_VD

    def logits(self, states_ND: Tensor) -> Tensor:
        logits_NV = product(states_ND.to(self.weight_VD.dtype), self.weight_VD, self.bias_V)
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.soft_cap is not None:
            logits_NV = self.soft_cap * torch.tanh(logits_NV / self.soft_cap)
        return logits_NV

    def log_probs(self, states_ND: Tensor) -> Tensor:
        return self.logits(states_ND).log_softmax(-1)

    def target_log_probs(self, states_ND: Tensor, targets_N: Tensor) -> Tensor:
        return chunked_values(states_ND, targets_N, self._target_log_probs, self.vocab_size)

    def _target_log_probs(self, states: Tensor, targets: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """Return the values of a chunk, and their gradient W^T (onehot - softmax), from the same logits."""
        logits = self.logits(states)
        log_norm = logits.logsumexp(-1)
        value = logits.gather(1, targets[:, None])[:, 0] - log_norm
        if not wanted:
            return value, None
        slope = None if self.soft_cap is None else 1 - (logits / self.soft_cap).square()
        error = logits.sub_(log_norm[:, None]).exp_().neg_()  # onehot - softmax, in place
        error.scatter_add_(1, targets[:, None], torch.ones_like(error[:, :1]))
        if slope is not None:
            error *= slope
        return value, error @ self.weight_VD * self.scale

    def on(self, device: torch.device | str) -> SoftmaxHead:
        bias_V = None if self.bias_V is None else self.bias_V.to(device)
        return SoftmaxHead(self.weight_VD.to(device), bias_V, self.scale, self.soft_cap)

    def save(self, path: Path) -> None:
        tensors = {"weight": self.weight_VD.cpu()} | ({} if self.bias_V is None else {"bias": self.bias_V.cpu()})
        numbers = torch.tensor([self.scale, float("nan") if self.soft_cap is None else self.soft_cap])
        with writing(path):
            save_file({**tensors, "scale_and_cap": numbers.double()}, path)

    @classmethod
    def load(cls, tensors: dict[str, Tensor]) -> SoftmaxHead:
        """Make a head from the tensors that `save` wrote."""
        scale, cap = tensors["scale_and_cap"].tolist()
        return cls(tensors["weight"], tensors.get("bias"), scale, None if cap != cap else cap)


class _ChunkedValues(torch.autograd.Function):
    """A function of single states, computed a chunk at a time together with its gradient, which is all that is kept.

    `values(states, targets, wanted)` returns the values of a chunk and, if `wanted`, their gradients in the states.
    """

    @staticmethod
    def forward(ctx: Any, states_ND: Tensor, targets_N: Tensor, values: ChunkValues, chunk: int) -> Tensor:
        found: list[Tensor] = []
        gradients: list[Any] = []
        for states, targets in zip(states_ND.split(chunk), targets_N.split(chunk), strict=True):
            value, gradient = values(states, targets, ctx.needs_input_grad[0])
            found.append(value)
            gradients.append(gradient)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_ND,) = ctx.saved_tensors
        return grad_N[:, None] * gradient_ND, None, None, None


def chunked_values(states_ND: Tensor, targets_N: Tensor, values: ChunkValues, columns: int) -> Tensor:
    """Return values [N] computed in chunks of states, each of which needs `columns` logits per state."""
    out: Tensor = _ChunkedValues.apply(states_ND, targets_N, values, max(1, CHUNK_LOGITS // columns))
    return out
