"""A LoRA linear as one differentiable product. PEFT's own makes three passes over [rows, out] more, and keeps them all.

`fuse` changes how PEFT's layers compute, not their parameters or names. What it does not do: dropout, DoRA, several
adapters at once, mixed number formats; such layers are left as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor
from torch.nn import functional


def fuse(model: torch.nn.Module) -> int:
    """Fuses every LoRA layer of `model` that can be, and returns how many were."""
    found = [module for module in model.modules() if isinstance(module, Linear) and _is_plain(module)]
    for module in found:
        module.forward = functools.partial(_forward, module, module.forward)
    return len(found)


class Product(torch.autograd.Function):
    """y = x W' + b + s (x A') B', for x [T, in], frozen W [out, in] and b, A [r, in], B [out, r] (LoRA, eq. 3).

    The low-rank term is added in place, forward and backward. Kept for the backward pass: x and x A'.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        low = x @ down.t()
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scaling = scaling
        return functional.linear(x, weight, bias).addmm_(low, up.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, weight, down, up, low = ctx.saved_tensors
        dlow = (dy @ up).mul_(ctx.scaling)
        dx = (dy @ weight).addmm_(dlow, down) if ctx.needs_input_grad[0] else None
        return dx, None, None, dlow.t() @ x, (dy.t() @ low).mul_(ctx.scaling), None


def _is_plain(module: Linear) -> bool:
    names = list(module.lora_A)
    return (
        len(names) == 1
        and list(module.active_adapters) == names
        and isinstance(module.lora_dropout[names[0]], torch.nn.Identity)
        and not module.use_dora.get(names[0], False)
        and module.lora_B[names[0]].bias is None
        and type(module.base_layer) is torch.nn.Linear
    )


def _forward(module: Linear, plain: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    (name,) = module.lora_A
    base, down, up = module.base_layer, module.lora_A[name].weight, module.lora_B[name].weight
    if module.merged or module.disable_adapters or not x.dtype == base.weight.dtype == down.dtype:
        return plain(x, *args, **kwargs)
    flat = Product.apply(x.reshape(-1, x.shape[-1]), base.weight, base.bias, down, up, module.scaling[name])
    return flat.view(*x.shape[:-1], -1)
