"""Packed and fused products against plain linears, and lanes of adapters against their formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from honed.errors import ConfigError
from honed.model.linear import Adapter, Lane, Serving, lay_out, serving_copy


class Layer(nn.Module):
    """Attention's and the MLP's linears as decoders name them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(24, 48, bias),
            nn.Linear(24, 16, bias),
            nn.Linear(24, 16, bias),
        )
        self.o_proj = nn.Linear(48, 24, False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return q, k, v, self.o_proj(q)


class Model(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layer = Layer(bias)
        self.lm_head = nn.Linear(24, 50, False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*self.layer(x), self.lm_head(x))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def made(bias: bool = False) -> tuple[Model, Serving]:
    model = Model(bias)
    return model, serving_copy(model)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
@torch.inference_mode()
def test_a_serving_copy_computes_the_same(bias: bool, num_rows: int) -> None:
    model, serving = made(bias)
    x = torch.randn(1, num_rows, 24)
    for _ in range(2):
        for a, b in zip(serving.model(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_siblings_share_one_product_and_the_model_keeps_its_linears() -> None:
    model, serving = made()
    assert set(serving.products) == {"layer.q_proj+k_proj+v_proj", "layer.o_proj", "lm_head"}
    assert serving.parts["layer.v_proj"] == ("layer.q_proj+k_proj+v_proj", 2)
    assert isinstance(model.layer.q_proj, nn.Linear)


@torch.inference_mode()
def test_another_input_is_never_answered_with_the_last_ones_product() -> None:
    model, serving = made()
    layer = serving.model.layer
    first, second = torch.randn(1, 3, 24), torch.randn(1, 3, 24)
    layer.q_proj(first)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(layer.k_proj(second), model.layer.k_proj(second))  # type: ignore[operator, union-attr]


@torch.inference_mode()
def test_each_lane_gets_its_own_adapter_and_other_rows_none() -> None:
    model, serving = made()
    pairs = [
        {path: (torch.randn(4, 24), torch.randn(size, 4)) for path, size in sizes.items()}
        for sizes in ({"layer.q_proj": 48, "layer.v_proj": 16}, {"layer.k_proj": 16})
    ]
    adapters = [lay_out(serving, Adapter(f"a@{n}", "", f"{n}"), pairs[n], 0.5) for n in range(2)]
    serving.lanes.lanes = [Lane(1, 3, adapters[0]), Lane(3, 6, adapters[1])]
    x = torch.randn(1, 7, 24)
    found = serving.model(x)
    plain = model(x)
    for index, path in enumerate(("layer.q_proj", "layer.k_proj", "layer.v_proj")):
        expected = plain[index].clone()
        for (start, end), adapter in (((1, 3), pairs[0]), ((3, 6), pairs[1])):
            if path in adapter:
                down, up = adapter[path]
                expected[0, start:end] += 0.5 * (x[0, start:end] @ down.t() @ up.t())
        torch.testing.assert_close(found[index], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[4], plain[4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "down", "up"),
    [
        ("layer.q_proj", (4, 23), (48, 4)),
        ("layer.q_proj", (4, 24), (47, 4)),
        ("lm_head", (4, 24), (50, 4)),
        ("x", (1, 1), (1, 1)),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(path: str, down: tuple[int, int], up: tuple[int, int]) -> None:
    _, serving = made()
    with pytest.raises(ConfigError, match="a@1"):
        lay_out(serving, Adapter("a@1", "", "k"), {path: (torch.zeros(down), torch.zeros(up))}, 1.0)


def test_the_size_of_an_adapter() -> None:
    _, serving = made()
    adapter = lay_out(serving, Adapter("a@1", "", "k"), {"layer.o_proj": (torch.zeros(4, 48), torch.zeros(24, 4))}, 1.0)
    assert adapter.num_bytes == 4 * (4 * 48 + 24 * 4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN has nothing to pack for")
def test_products_are_packed_on_a_cpu_in_fp32_and_in_no_other_format() -> None:
    """Without the packing everything still works, at up to twice the time: nothing else would tell."""
    assert torch.ops.mkldnn._reorder_linear_weight
    _, serving = made()
    assert {product.packed for product in serving.products.values()} == {True}
    assert all(product.weight.is_mkldnn for product in serving.products.values())
    halves = serving_copy(Model().to(torch.bfloat16))
    assert {product.packed for product in halves.products.values()} == {False}
