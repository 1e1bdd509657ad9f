"""Kernels compute what torch does, a token at a time, and alike to the bit whatever runs beside it."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("numba")

from honed.model import kernels
from honed.model.bank import Bank
from honed.model.compiled import gomp
from honed.model.dense import Norm

pytestmark = [
    pytest.mark.skipif(gomp() is None, reason="torch's threads are not libgomp's here"),
    pytest.mark.usefixtures("threads"),
]
WIDTHS = [(3, 64, 3), (2, 16, 2), (1, 8, 1), (8, 24, 1)]
"""Groups, numbers of a head, key heads."""


def attended(queries: Tensor, members: list[kernels.Member], window: int | None, layer: int = 1) -> Tensor:
    _, _, groups, dim = queries.shape
    out = torch.full(queries.shape, 7.0)
    kernels.Step(groups, dim, members, members).attend(queries, out, layer, window, 0.3)
    return out


@pytest.mark.parametrize("window", [None, 20, 1000])
@pytest.mark.parametrize(("groups", "dim", "kv_heads"), WIDTHS)
def test_attention_over_rows_of_any_bank(groups: int, dim: int, kv_heads: int, window: int | None) -> None:
    """One token and stretches, of two banks; the queries lie in a wider tensor, as after the joined product."""
    short, long = (Bank(2, 4, kv_heads, length, dim, torch.float32, "cpu") for length in (48, 256))
    for bank in (short, long):
        bank.data.normal_()
    joined = torch.randn(24, kv_heads * (groups + 2), dim)
    queries = joined[:, : kv_heads * groups].view(24, kv_heads, groups, dim)
    members = [(long, 0, 2, 254, 255), (short, 3, 3, 0, 17), (short, 1, 20, 36, 37), (long, 2, 21, 99, 102)]
    out = attended(queries, members, window)
    for bank, row, first, start, end in members:
        for token in range(end - start):
            seen = start + token + 1
            keys, values = (part[row, :, max(0, seen - (window or seen)) : seen] for part in bank.layer(1))
            scores = torch.einsum("hgd,hnd->hgn", queries[first + token], keys) * 0.3
            torch.testing.assert_close(out[first + token], torch.softmax(scores, -1) @ values, rtol=1e-5, atol=2e-6)
    assert (out[[0, 1, 23]][:2] == 7).all()  # of nobody


def test_attention_by_hand() -> None:
    """Two keys, scores 0.3 ln 3 / 0.3 and 0: weights 3/4 and 1/4."""
    bank = Bank(1, 1, 1, 16, 8, torch.float32, "cpu")
    bank.data[0, 0, 0, 0, 0, 0] = math.log(3) / 0.3
    bank.data[0, 1, 0, 0, 0] = 4.0
    query = torch.zeros(1, 1, 1, 8)
    query[..., 0] = 1
    torch.testing.assert_close(attended(query, [(bank, 0, 0, 1, 2)], None, 0), torch.full((1, 1, 1, 8), 3.0))


def test_a_token_gets_the_same_bits_whatever_is_beside_it() -> None:
    bank = Bank(2, 3, 2, 256, 16, torch.float32, "cpu")
    bank.data.normal_()
    queries = torch.randn(130, 2, 3, 16)
    together = attended(queries, [(bank, 0, 0, 0, 100), (bank, 1, 100, 200, 201), (bank, 2, 101, 7, 36)], None)
    for first, member in ((0, (bank, 0, 0, 0, 1)), (41, (bank, 0, 0, 41, 63)), (100, (bank, 1, 0, 200, 201))):
        count = member[4] - member[3]
        assert torch.equal(attended(queries[first : first + count], [member], None), together[first : first + count])


def test_scores_far_apart_stay_finite() -> None:
    bank = Bank(1, 1, 1, 32, 8, torch.float32, "cpu")
    bank.data.normal_(std=1e3)
    out = attended(torch.randn(20, 1, 2, 8) * 1e3, [(bank, 0, 0, 0, 20)], None, 0)
    assert out.isfinite().all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("groups", "dim", "kv_heads"), WIDTHS)
@pytest.mark.parametrize("count", [1, 70])
def test_queries_and_keys_are_turned_and_kept(groups: int, dim: int, kv_heads: int, normed: bool, count: int) -> None:
    heads, bank = groups * kv_heads, Bank(2, 2, kv_heads, 128, dim, torch.float32, "cpu")
    joined, cos, sin = torch.randn(count, heads + 2 * kv_heads, dim), torch.randn(count, dim), torch.randn(count, dim)
    norms = (Norm(torch.randn(dim), 1e-3), Norm(torch.randn(dim), 1e-3)) if normed else (None, None)
    expected = joined.clone()
    if norms[0] and norms[1]:
        expected[:, :heads] = norms[0](joined[:, :heads])
        expected[:, heads : heads + kv_heads] = norms[1](joined[:, heads : heads + kv_heads])
    turned = expected[:, : heads + kv_heads]
    swapped = torch.cat([turned[..., dim // 2 :], turned[..., : dim // 2]], -1)
    expected[:, : heads + kv_heads] = turned * cos[:, None] + swapped * sin[:, None]
    member = (bank, 1, 0, 30, 30 + count)
    kernels.Step(groups, dim, [member], []).rotate(joined, cos, sin, *norms, 1)
    torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-5)
    keys, values = (part[1, :, 30 : 30 + count].transpose(0, 1) for part in bank.layer(1))
    assert torch.equal(keys, joined[:, heads : heads + kv_heads])
    assert torch.equal(values, joined[:, heads + kv_heads :])
    bank.data[1, :, 1, :, 30 : 30 + count] = 0
    assert not bank.data.any()


@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("width", [9, 576])
def test_sum_and_norm(count: int, width: int) -> None:
    x, more, norm = torch.randn(count, width), torch.randn(count, width), Norm(torch.randn(width), 1e-2)
    expected = x + more
    torch.testing.assert_close(kernels.normed(x.clone(), None, norm), norm(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernels.normed(x, more, norm), norm(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("width", [7, 1536])
def test_gate(count: int, width: int) -> None:
    """As torch's silu, at the ends of the exponential's range too."""
    hidden = torch.randn(count, 2 * width) * 4
    hidden[0, :7] = torch.tensor([-200.0, -90.0, -87.0, 0.0, 87.0, 90.0, 200.0])
    expected = functional.silu(hidden[:, :width]) * hidden[:, width:]
    torch.testing.assert_close(kernels.gated(hidden), expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_a_number_stays_none() -> None:
    """So that a model that has come apart is seen where it samples."""
    x = torch.randn(3, 16)
    x[1, 5] = math.nan
    assert kernels.normed(x.clone(), None, Norm(torch.ones(16), 1e-5))[1].isnan().all()
    assert kernels.gated(x)[1, 5].isnan()


def test_without_numba_the_model_still_runs() -> None:
    """In a process where it can't be imported."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from engine.tiny import tiny\n"
        "from honed.engine.local import LocalEngine\n"
        "LocalEngine(tiny())\n"  # compares its logits with transformers'
        "from honed.model import dense\n"
        "print('kernels:', dense.kernels)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd="tests", timeout=200, capture_output=True, text=True)
    assert ran.stdout == "kernels: None\n", ran.stderr


def test_two_threads_that_call_at_once_get_their_own() -> None:
    """Each is the master of a team, and claims of its own arguments."""
    inputs = [torch.randn(300, 512) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for x, found in zip(inputs, pool.map(kernels.gated, inputs), strict=True):
            expected = functional.silu(x[:, :256]) * x[:, 256:]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
