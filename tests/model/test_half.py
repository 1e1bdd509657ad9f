"""Weights held in 16 bits give single precision's products; weights that would lose by it are not held so."""

import pytest
import torch
from torch import nn

from honed.model import half
from honed.model.half import Half
from honed.model.linear import WIDE, Product

pytestmark = pytest.mark.skipif(not half.available(), reason="FBGEMM is made for x86 CPUs with AVX2")


def weight(*shape: int, of: torch.dtype = torch.float16) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 0.1
    return made.to(of).float()


def test_what_half_precision_holds() -> None:
    assert half.fits(weight(30, 40))
    assert half.fits(weight(300, 400, of=torch.bfloat16))  # its least numbers lose bits, and next to nothing by it
    assert not half.fits(weight(30, 40, of=torch.float32))
    assert not half.fits(weight(30, 40).double())
    for one in (1e6, float("nan"), float("inf")):
        odd = weight(30, 40)
        odd[3, 5] = one
        assert not half.fits(odd)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 13, 64, 130])
def test_its_product_is_that_of_single_precision(num_rows: int) -> None:
    """Inputs far beyond half precision's range too: only weights are narrow."""
    w, x = weight(70, 600), torch.randn(num_rows, 600, generator=torch.Generator().manual_seed(2)) * 1e5
    expected = x.double() @ w.double().t()
    found = Half(w).product(x)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 1e-6  # half precision's own would be 3e-4


@pytest.mark.parametrize("bias", [False, True])
def test_products_hold_weights_in_half_where_that_loses_nothing(bias: bool) -> None:
    linears = [nn.Linear(24, 12, bias=bias), nn.Linear(24, 8, bias=bias)]
    for linear in linears:
        linear.weight.data = weight(*linear.weight.shape)
    x = torch.randn(3, 24)
    product = Product("q+k", linears, None)
    assert product.narrow is not None
    assert product.weight is None
    expected = torch.cat([linear(x) for linear in linears], -1)
    torch.testing.assert_close(product.compute(x), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_wide_product_is_made_by_whichever_is_faster() -> None:
    linear = nn.Linear(16, WIDE, bias=False)
    linear.weight.data = weight(WIDE, 16)
    product = Product("lm_head", [linear], None)
    assert product.narrow is not None
    assert product.weight is not None
    asked: list[int] = []
    plain = product.narrow.product

    def counted(x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return plain(x)

    product.narrow.product = counted  # type: ignore[method-assign]
    for num_rows in (1, half.ROOM // WIDE, half.ROOM // WIDE + 1):
        x = torch.randn(num_rows, 16)
        torch.testing.assert_close(product.compute(x), linear(x), rtol=1e-5, atol=1e-5)
    assert asked == [1, half.ROOM // WIDE]
