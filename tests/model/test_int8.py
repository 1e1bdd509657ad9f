"""Products in int8: near the exact ones, exact where channels are large, and independent of their neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from honed.model.int8 import EXACT_SHARE, Quantised, activation_bits, calibrate, largest_inputs
from honed.model.linear import serving_copy

from .tiny import directory, model


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_product_is_near_the_exact_one() -> None:
    weight, x = drawn(96, 64), drawn(7, 64, seed=1)
    product = Quantised(weight, x.abs().amax(0)).product(x)
    assert 1e-4 < apart(product, x @ weight.T) < (0.02 if activation_bits() == 8 else 0.03)


def test_large_channels_would_drown_the_others_and_stay_exact() -> None:
    weight, x = drawn(96, 64), drawn(40, 64, seed=1)
    x[:, [5, 17]] *= 300
    largest = x.abs().amax(0)
    assert int(64 * EXACT_SHARE) >= 2
    plain = Quantised(weight, torch.arange(64.0)).product(x)  # keeps other channels exact
    assert apart(Quantised(weight, largest).product(x), x @ weight.T) < 2e-3
    rest = x.clone()
    rest[:, [5, 17]] = 0
    exact, error = rest @ weight.T, plain - x @ weight.T
    assert error.norm() > exact.norm() / 2  # else the test would show nothing


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    quantised, x = Quantised(drawn(96, 64), torch.ones(64)), drawn(33, 64, seed=2)
    x[7] *= 1000
    whole = quantised.product(x)
    for row in (0, 7, 32):
        torch.testing.assert_close(quantised.product(x[row : row + 1])[0], whole[row], rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_stay_zero() -> None:
    found = Quantised(drawn(8, 32), torch.ones(32)).product(torch.zeros(3, 32))
    assert found.abs().max() < 1e-6


def test_calibration_sees_what_each_linear_reads(tmp_path: Path) -> None:
    small, folder = model(), directory(tmp_path / "model")
    ids = torch.tensor([[5, 9, 40, 41]])
    seen = largest_inputs(small, ids)
    first = small.model.layers[0]
    expected = first.input_layernorm(small.model.embed_tokens(ids))[0].abs().amax(0)
    torch.testing.assert_close(seen["model.layers.0.self_attn.q_proj"], expected)
    assert set(seen) == {name for name, each in small.named_modules() if type(each) is torch.nn.Linear}
    assert not any(each._forward_pre_hooks for each in small.modules())
    by_text, by_ids = calibrate(small, folder), calibrate(small, tmp_path)
    assert set(by_text) == set(by_ids) == set(seen)
    assert not torch.equal(by_text["lm_head"], by_ids["lm_head"])


@pytest.mark.parametrize("tiled", [False, True])
def test_a_serving_copy_in_int8_is_near_the_model(tmp_path: Path, tiled: bool) -> None:
    small = model()
    serving = serving_copy(small, largest=calibrate(small, tmp_path), tiled=tiled)
    ids = torch.tensor([[5, 9, 40, 41, 7, 7, 80]])
    with torch.no_grad():
        exact, found = small(ids).logits, serving.model(ids).logits
    assert 1e-5 < apart(found, exact) < 0.1
