"""What a plain decoder computes between its products, with gradients: each in one pass over memory, by kernels.

In single precision on a CPU. torch's own make some ten passes for a norm and its gradient, and keep three of them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from honed.model import kernels
from honed.model.compiled import Loop, as_bits, as_float, claim, exp, floats
from honed.model.dense import Norm

MAX_SUMS = 8
"""Parts whose sums for a norm's weight are added up at the end."""


class Normed(torch.autograd.Function):
    """x [T, n] -> h weight [n], for h = x / r and r = sqrt(mean(x^2) + epsilon) (Zhang and Sennrich 2019, eq. 4).

    dx = (g - h mean(g h)) / r, for g = weight dout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return kernels.normed(x, None, Norm(weight, epsilon))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return *_norm_gradients(x, weight, ctx.epsilon, grads[0], None, ctx.needs_input_grad[1]), None


class AddNormed(torch.autograd.Function):
    """x and more [T, n] -> x + more, and that normed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        x, more = x.contiguous(), more.contiguous()
        total = torch.empty_like(x)
        out = kernels.normed(x, more, Norm(weight, epsilon), total)
        ctx.save_for_backward(total, weight)
        ctx.epsilon = epsilon
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, weight = ctx.saved_tensors
        dtotal, dout = grads
        dx, dweight = _norm_gradients(total, weight, ctx.epsilon, dout, dtotal, ctx.needs_input_grad[2])
        return dx, dx, dweight, None


class Gated(torch.autograd.Function):
    """gate and up [T, n] -> silu(gate) up (Shazeer 2020, eq. 6)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out, threads = torch.empty_like(gate), torch.get_num_threads()
        _gate()(threads, _parts(gate), gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        dout, dgate, dup = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        _gate_gradient()(
            torch.get_num_threads(), _parts(gate), gate.data_ptr(), up.data_ptr(), dout.data_ptr(), dgate.data_ptr(),
            dup.data_ptr(), gate.numel(),
        )  # fmt: skip
        return dgate, dup


def _norm_gradients(
    x: Tensor, weight: Tensor, epsilon: float, dout: Tensor, beside: Tensor | None, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, plus what comes in `beside` it, and the weight's if it learns."""
    dout, dx, (num_tokens, n) = dout.contiguous(), torch.empty_like(x), x.shape
    beside = None if beside is None else beside.contiguous()
    parts = max(1, min(num_tokens, MAX_SUMS))
    sums = x.new_zeros(parts, n) if learns else None
    _norm_gradient()(
        torch.get_num_threads(), parts, x.data_ptr(), weight.data_ptr(), dout.data_ptr(),
        0 if beside is None else beside.data_ptr(), dx.data_ptr(), 0 if sums is None else sums.data_ptr(), num_tokens,
        n, as_bits(epsilon),
    )  # fmt: skip
    return dx, None if sums is None else sums.sum(0)


def _parts(x: Tensor) -> int:
    return max(1, min(4 * torch.get_num_threads(), x.numel() // kernels.SMALL))


@functools.cache
def _norm_gradient() -> Loop:
    def gradient(a: Any) -> None:
        """As `_norm_gradients` lists its arguments."""
        count, n, eps = a[8], a[9], as_float(np.int32(a[10]))
        weight = carray(floats(a[3]), (n,))
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            for t in range(part * count // a[1], (part + 1) * count // a[1]):
                x, dout = carray(floats(a[2] + 4 * n * t), (n,)), carray(floats(a[4] + 4 * n * t), (n,))
                dx = carray(floats(a[6] + 4 * n * t), (n,))
                squares, along = np.float32(0), np.float32(0)
                for i in range(n):
                    squares += x[i] * x[i]
                    along += dout[i] * weight[i] * x[i]
                mean = squares / np.float32(n) + eps
                inverse = np.float32(1) / np.sqrt(mean)
                back = along / (np.float32(n) * mean)
                if a[5]:
                    beside = carray(floats(a[5] + 4 * n * t), (n,))
                    for i in range(n):
                        dx[i] = (dout[i] * weight[i] - x[i] * back) * inverse + beside[i]
                else:
                    for i in range(n):
                        dx[i] = (dout[i] * weight[i] - x[i] * back) * inverse
                if a[7]:
                    sums = carray(floats(a[7] + 4 * n * part), (n,))
                    for i in range(n):
                        sums[i] += dout[i] * x[i] * inverse

    return Loop(gradient)


@functools.cache
def _gate() -> Loop:
    def gate(a: Any) -> None:
        """As `Gated.forward` lists its arguments."""
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            first, end = part * a[5] // a[1], (part + 1) * a[5] // a[1]
            x, up = carray(floats(a[2] + 4 * first), (end - first,)), carray(floats(a[3] + 4 * first), (end - first,))
            out = carray(floats(a[4] + 4 * first), (end - first,))
            for i in range(end - first):
                out[i] = x[i] / (np.float32(1) + exp(-x[i])) * up[i]

    return Loop(gate)


@functools.cache
def _gate_gradient() -> Loop:
    def gradient(a: Any) -> None:
        """As `Gated.backward` lists its arguments."""
        one = np.float32(1)
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            first, end = part * a[7] // a[1], (part + 1) * a[7] // a[1]
            x, up = carray(floats(a[2] + 4 * first), (end - first,)), carray(floats(a[3] + 4 * first), (end - first,))
            dout = carray(floats(a[4] + 4 * first), (end - first,))
            dx, dup = carray(floats(a[5] + 4 * first), (end - first,)), carray(floats(a[6] + 4 * first), (end - first,))
            for i in range(end - first):
                share = one / (one + exp(-x[i]))
                silu = x[i] * share
                dup[i] = dout[i] * silu
                dx[i] = dout[i] * up[i] * (share + silu * (one - share))

    return Loop(gradient)
