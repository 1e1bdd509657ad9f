"""Norms and gates and their gradients are those that torch derives in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("numba")

from honed.model.compiled import gomp
from honed.model.gradients import AddNormed, Gated, Normed

pytestmark = [
    pytest.mark.skipif(gomp() is None, reason="torch's threads are not libgomp's here"),
    pytest.mark.usefixtures("threads"),
]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-3)


def same(function: Callable[..., Any], formula: Callable[..., Any], given: list[Tensor]) -> None:
    """Whether a function has the values and gradients of a formula."""
    narrow = [each.detach().requires_grad_() for each in given]
    wide = [each.detach().double().requires_grad_() for each in given]
    found, right = function(*narrow), formula(*wide)
    found, right = ((each,) if isinstance(each, Tensor) else each for each in (found, right))
    above = [torch.randn_like(each) for each in found]
    gradients = torch.autograd.grad(found, narrow, above)
    wanted = torch.autograd.grad(right, wide, [each.double() for each in above])
    for own, other in zip((*found, *gradients), (*right, *wanted), strict=True):
        assert float((own.detach().double() - other.detach()).norm() / other.detach().norm()) < 1e-6


@pytest.mark.parametrize(("num_tokens", "n"), [(1, 16), (5, 576), (203, 100)])
def test_norms(num_tokens: int, n: int) -> None:
    x, more, weight = torch.randn(num_tokens, n), torch.randn(num_tokens, n), torch.randn(n)
    same(lambda x, weight: Normed.apply(x, weight, 1e-3), norm, [x, weight])
    same(
        lambda x, more, weight: AddNormed.apply(x, more, weight, 1e-3),
        lambda x, more, weight: (x + more, norm(x + more, weight)),
        [x, more, weight],
    )


def test_a_norm_by_hand() -> None:
    """x = (3, 4), weight (1, 2), epsilon 0: r^2 = 12.5, h = x / r. With g = (1, 0), mean(g h) = 3 / (2 r), so
    dx = ((1, 0) - (3, 4) 3 / (2 r^2)) / r = (0.64, -0.48) / r; dweight = (3 / r, 0)."""
    x, weight = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    out = Normed.apply(x, weight, 0.0)
    out.backward(torch.tensor([[1.0, 0.0]]))
    r = 12.5**0.5
    torch.testing.assert_close(out, torch.tensor([[3 / r, 8 / r]]))
    torch.testing.assert_close(x.grad, torch.tensor([[0.64 / r, -0.48 / r]]))
    torch.testing.assert_close(weight.grad, torch.tensor([3 / r, 0]))


def test_a_frozen_norm_learns_nothing() -> None:
    x = torch.randn(3, 16, requires_grad=True)
    weight = torch.ones(16)
    AddNormed.apply(x, torch.randn(3, 16), weight, 1e-5)[1].sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize(("num_tokens", "n"), [(1, 3), (7, 1536), (64, 640)])
def test_gates(num_tokens: int, n: int) -> None:
    given = [torch.randn(num_tokens, n) * 4, torch.randn(num_tokens, n)]
    same(Gated.apply, lambda gate, up: functional.silu(gate) * up, given)


def test_a_gate_far_out_is_shut_or_open() -> None:
    gate, up = torch.tensor([[-300.0, 300.0]], requires_grad=True), torch.tensor([[2.0, 2.0]])
    out = Gated.apply(gate, up)
    out.sum().backward()
    torch.testing.assert_close(out, torch.tensor([[0.0, 600.0]]))
    torch.testing.assert_close(gate.grad, torch.tensor([[0.0, 2.0]]))


@pytest.mark.parametrize("function", [lambda x: Normed.apply(x, torch.ones(64), 1e-5), lambda x: Gated.apply(x, x)])
def test_a_number_that_is_none_stays_none(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    assert function(x)[1, 5].isnan()
