"""How fast this machine multiplies matrices."""

from __future__ import annotations

import time
from dataclasses import dataclass

EFFICIENCY = 0.5  # a whole model reaches this share of a matrix product's speed


@dataclass(frozen=True)
class Speed:
    """Multiplications and additions per second: of the device, by precision, and of the processor, where FAISS runs."""

    fp32: float
    bf16: float
    processor: float

    @classmethod
    def measured(cls, device: str = "auto", seconds: float = 0.3) -> Speed:
        from gnnlm.lm.load_lm import usable_device

        name = str(usable_device(device))
        fp32 = matrix_speed(name, "float32", seconds)
        processor = fp32 if name == "cpu" else matrix_speed("cpu", "float32", seconds)
        return cls(fp32, matrix_speed(name, "bfloat16", seconds), processor)

    def of(self, precision: str) -> float:
        """The speed that a whole model reaches."""
        return EFFICIENCY * (self.bf16 if precision == "bf16" else self.fp32)


def matrix_speed(device: str, dtype: str, seconds: float) -> float:
    """Multiplications and additions per second in matrix products, as large as the time allows.

    A processor without instructions for bfloat16 is a hundred times slower at it: a large product would take minutes.
    """
    if device != "cpu":
        return _product_speed(device, dtype, 4096, seconds)
    slow = _product_speed(device, dtype, 128, seconds / 10)
    return _product_speed(device, dtype, 1024, seconds) if 2 * 1024**3 / slow < seconds else slow


def _product_speed(device: str, dtype: str, size: int, seconds: float) -> float:
    import torch

    matrix = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    count, began = 0, 0.0
    while not count or time.perf_counter() - began < seconds:
        product = matrix
        for _ in range(4):
            product = matrix @ matrix
        product[0, 0].item()  # waits for all of them
        if began:
            count += 4
        else:  # the first round warms up
            began = time.perf_counter()
    return count * 2 * size**3 / (time.perf_counter() - began)
