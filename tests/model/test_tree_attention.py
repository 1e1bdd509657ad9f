"""Attention over a tree and its gradient are those of softmax over each token's own path, in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from honed.model.compiled import gomp
from honed.model.tree import Tree, build
from honed.model.tree_attention import Layout, TreeAttention, fit
from honed.model.tree_loops import ROWS

pytestmark = [
    pytest.mark.skipif(gomp() is None, reason="torch's threads are not libgomp's here"),
    pytest.mark.usefixtures("threads"),
]


def branching() -> Tree:
    """A trunk of 37, branches of 1 to 70 of which two part again, and a sequence of its own."""
    draw = np.random.default_rng(3)
    trunk, limb = draw.integers(0, 9, 37), draw.integers(0, 9, 18)
    ends = [draw.integers(0, 9, size) + 10 * (1 + number) for number, size in enumerate((1, 16, 70, 33))]
    return build([
        np.concatenate([trunk, ends[0]]), np.concatenate([trunk, ends[1]]), np.concatenate([trunk, limb + 50, ends[2]]),
        np.concatenate([trunk, limb + 50, ends[3]]), draw.integers(60, 70, 49),
    ])  # fmt: skip


def expected(tree: Tree, q: Tensor, k: Tensor, v: Tensor, turns: tuple[Tensor, Tensor], window: int) -> Tensor:
    """By the definition, sequence by sequence."""
    half, (cos, sin) = q.shape[-1] // 2, turns

    def turned(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat([x[..., half:], x[..., :half]], -1) * sin[:, None]

    groups, out = q.shape[1] // k.shape[1], [None] * len(tree)
    q, k, v = turned(q), turned(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    for rows in tree.rows:
        for number, row in enumerate(rows):
            seen = rows[max(0, number - window + 1) if window else 0 : number + 1]
            scores = torch.einsum("hd,nhd->hn", q[row], k[seen]) * 0.3
            out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[seen])
    return torch.stack(out)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 4, 16), (10, 2, 48), (7, 1, 32)])
def test_outputs_and_gradients(heads: int, kv_heads: int, dim: int, window: int) -> None:
    tree = branching()
    size = len(tree)
    joined = torch.randn(size, heads + 2 * kv_heads, dim)  # a wider row, as after a joined product
    angles = torch.rand(size, dim // 2) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1) * 1.2, torch.cat([-angles.sin(), angles.sin()], -1) * 1.2
    given = [part.detach().requires_grad_() for part in joined.split([heads, kv_heads, kv_heads], 1)]
    above = torch.randn(size, heads, dim)
    out = TreeAttention.apply(*given, cos, sin, tree.layout(heads // kv_heads, window), 0.3)
    found = torch.autograd.grad(out, given, above)
    wide = [part.detach().double().requires_grad_() for part in given]
    right = expected(tree, *wide, (cos.double(), sin.double()), window)
    for own, other in zip((out, *found), (right, *torch.autograd.grad(right, wide, above.double())), strict=True):
        assert own.shape == other.shape
        assert float((own.detach().double() - other.detach()).norm() / other.detach().norm()) < 1e-6


def test_bits_do_not_depend_on_chance() -> None:
    """The order of every sum is fixed, whichever thread takes which block."""
    tree = branching()
    q, k, v = (torch.randn(len(tree), heads, 64, requires_grad=True) for heads in (6, 2, 2))
    layout, kept = tree.layout(3, 0), []
    for _ in range(4):
        out = TreeAttention.apply(q, k, v, None, None, layout, 0.125)
        kept.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    assert all(torch.equal(one, other) for each in kept[1:] for one, other in zip(kept[0], each, strict=True))


def test_a_score_of_any_size_is_weighed() -> None:
    """Scores far over what exp holds: the greatest takes all, and nothing is lost."""
    tree = build([np.arange(20)])
    q, k, v = (torch.ones(20, 1, 16) * 100, torch.zeros(20, 1, 16), torch.randn(20, 1, 16))
    k[3] = 100.0
    out = TreeAttention.apply(q, k, v, None, None, tree.layout(1, 0), 1.0)
    torch.testing.assert_close(out[3:], v[3].expand(17, 1, 16))
    torch.testing.assert_close(out[2], v[:3].mean(0))


def test_a_layout_skips_what_no_query_of_a_block_sees() -> None:
    """One node of 100 tokens, one head, blocks of ROWS queries: panels up to a block's last query, and none that lies
    before the window of its first."""
    nodes = build([np.arange(100)]).nodes
    plain, windowed = Layout(nodes, 1, 0), Layout(nodes, 1, 20)
    assert ROWS == 48
    assert plain.units.tolist() == [[0, 48, 0, 0, 1], [48, 48, 48, 1, 1], [96, 4, 96, 2, 1]]
    assert plain.segments.tolist() == [[0, 3, 0, 100], [0, 6, 0, 100], [0, 7, 0, 100]]
    # the second block's first query stands at 48 and sees from 29 on, the third's at 96 from 77
    assert windowed.segments.tolist() == [[0, 3, 0, 100], [1, 5, 16, 100], [4, 3, 64, 100]]


def test_heads_that_do_not_fill_panels_are_left_to_torch() -> None:
    assert fit(9, 3, 64)
    assert not fit(9, 3, 24)
    assert not fit(64, 1, 64)
