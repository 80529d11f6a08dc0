"""Product quantization: a vector as a few bytes, decoded in torch.

    x  ~  codebook[0, c_0] | codebook[1, c_1] | ... , rotated back, plus the mean

The rotation (OPQ) and the codebooks are learned with FAISS; after that FAISS is not needed: decoding is one
gather and, where raw vectors are wanted, one matrix product. Attention does not need that product: it
rotates the query instead, and the mean shifts all scores of a query equally.

Shapes: N vectors, D width, M bytes of a vector, d = D / M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.errors import ConfigError

LEVELS = 256
OPQ_ROUNDS = 10  # alternations of rotation and codebooks; FAISS's 50 take five times as long for under 1% less error


@dataclass(frozen=True)
class Quantizer:
    rotation_DD: Tensor
    mean_D: Tensor
    codebook_Mcd: Tensor

    @property
    def bytes(self) -> int:
        return self.codebook_Mcd.shape[0]

    @property
    def width(self) -> int:
        return len(self.mean_D)

    def encode(self, vectors_ND: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Encode vectors [N, D] as codes [N, M]."""
        rotated = (torch.from_numpy(np.asarray(vectors_ND, dtype=np.float32)) - self.mean_D) @ self.rotation_DD.T
        pq = faiss.ProductQuantizer(self.width, self.bytes, 8)
        faiss.copy_array_to_vector(self.codebook_Mcd.numpy().ravel(), pq.centroids)
        codes: npt.NDArray[np.uint8] = pq.compute_codes(np.ascontiguousarray(rotated.numpy()))
        return codes

    def look_up(self, codes: Tensor) -> Tensor:
        """Return the rotated, centred vectors of codes [..., M] by one gather, [..., D]."""
        offsets_M = torch.arange(self.bytes, device=codes.device) * LEVELS
        found = self.codebook_Mcd.flatten(0, 1).index_select(0, (codes.long() + offsets_M).reshape(-1))
        return found.view(*codes.shape[:-1], self.width)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [..., M] on the quantizer's device."""
        return self.look_up(codes.to(self.mean_D.device)) @ self.rotation_DD + self.mean_D

    def to(self, device: torch.device | str) -> Quantizer:
        return Quantizer(*(t.to(device) for t in (self.rotation_DD, self.mean_D, self.codebook_Mcd)))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        names = ("rotation", "mean", "codebook")
        values = (self.rotation_DD, self.mean_D, self.codebook_Mcd)
        return {f"{prefix}{name}": value.contiguous() for name, value in zip(names, values, strict=True)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str = "") -> Quantizer:
        return cls(*(tensors[f"{prefix}{name}"] for name in ("rotation", "mean", "codebook")))


@dataclass(frozen=True)
class CodedTable:
    """Vectors that are decoded as they are gathered; attention reads them rotated and centred."""

    codes_RM: Tensor
    quantizer: Quantizer

    @property
    def width(self) -> int:
        return self.quantizer.width

    def __len__(self) -> int:
        return len(self.codes_RM)

    def gather(self, lines: Tensor) -> Tensor:
        return self.quantizer.look_up(self.codes_RM[lines])

    def decode(self, lines: Tensor) -> Tensor:
        return self.quantizer.decode(self.codes_RM[lines])

    def enter(self, queries: Tensor) -> Tensor:
        """Return queries in the space of `gather`; all scores of a query shift equally."""
        return queries @ self.quantizer.rotation_DD.T.to(queries.dtype)

    def leave(self, averages: Tensor) -> Tensor:
        """Return averages of gathered vectors (weights sum to one) as averages of vectors."""
        return averages @ self.quantizer.rotation_DD.to(averages.dtype) + self.quantizer.mean_D.to(averages.dtype)


def check_bytes(width: int, size: int, name: str) -> None:
    """Refuse a size that does not divide the width, and name the nearest sizes that do."""
    if width % size == 0:
        return
    below = max(n for n in range(1, min(size, width) + 1) if width % n == 0)
    above = min((n for n in range(size, width + 1) if width % n == 0), default=width)
    raise ConfigError(f"{name} must divide {width}, the width of the coded vectors (got {size}); use "
                      f"{' or '.join(str(n) for n in sorted({below, above}))}")  # fmt: skip


def train_quantizer(sample_ND: npt.NDArray[Any], size: int, seed: int, name: str = "codec.bytes") -> Quantizer:
    """Learn OPQ and PQ with `size` bytes per vector from sample vectors."""
    sample = np.ascontiguousarray(sample_ND, dtype=np.float32)
    count, width = sample.shape
    check_bytes(width, size, name)
    if count < LEVELS:
        raise ConfigError(f"product quantization needs at least {LEVELS} vectors to learn from (got {count}); use fp16")
    mean = sample.mean(axis=0)
    sample = sample - mean
    pq = faiss.ProductQuantizer(width, size, 8)
    pq.cp.seed = seed + 1
    pq.cp.min_points_per_centroid = 1
    opq = faiss.OPQMatrix(width, size)
    opq.niter = OPQ_ROUNDS
    opq.pq = pq
    opq.max_train_points = count
    opq.train(sample)
    rotation = faiss.vector_to_array(opq.A).reshape(width, width)
    pq.train(np.ascontiguousarray(sample @ rotation.T))
    codebook = faiss.vector_to_array(pq.centroids).reshape(size, LEVELS, width // size)
    return Quantizer(*(torch.from_numpy(a.astype(np.float32)) for a in (rotation, mean, codebook)))
