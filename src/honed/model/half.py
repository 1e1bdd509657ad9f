"""A product whose weights are held in 16 bits and multiplied in 32, for weights that half precision holds.

A small batch waits for its weights: half the bytes, twice the speed. What was published in bfloat16 or half precision,
or quantised with scales in half precision (convert.py), is held without loss; the sums are those of single precision.
By FBGEMM, in torch, whose kernels widen weights in registers. No autograd.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LOSS = 2.0**-24
"""Of the weights' norm: what single precision itself may lose when it rounds."""
TILE_ROWS = 42
"""Rows of every product where results may not depend on how many there are: the kernels take 6 at a time on AVX2, 14 on
AVX-512, and what is left over by another sum."""
ROOM = 1 << 20
"""Outputs up to which this is the faster product: beyond, sums go through memory once for every 512 inputs."""


def available() -> bool:
    """Whether torch has these kernels here (x86 with AVX2)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def fits(weight: Tensor) -> bool:
    """Whether half precision holds `weight`, a matrix in single precision on a CPU, to LOSS."""
    if not available() or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    apart = torch.linalg.vector_norm(weight.half().float() - weight)
    return bool(apart <= LOSS * torch.linalg.vector_norm(weight))


class Half:
    """A weight [out, in] packed for products."""

    def __init__(self, weight: Tensor) -> None:
        with packing():
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), None)

    def product(self, x: Tensor) -> Tensor:
        """x [T, in] -> x W^T [T, out]."""
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


@contextmanager
def packing() -> Iterator[None]:
    """Weights packed in here are packed for FBGEMM; the setting decides that, and nothing later."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it will go; torch is pinned, and a test holds this
            yield
    finally:
        torch.backends.quantized.engine = engine
