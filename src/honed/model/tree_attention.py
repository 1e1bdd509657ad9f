"""Attention over a tree and its gradient, in single precision on a CPU: blocks of queries, each over the keys of its
path, in products that fit the registers.

As in FlashAttention-2 (Dao 2023, algorithms 1 and 2) the weights are never kept: the backward pass makes them again
from the logarithm of each row's sum. A row's scores lie whole in the cache instead of piecewise, so no sum is rescaled.
Keys and values are first packed into panels of TILE tokens, a node's own ones together; what a panel has too many
weighs zero. The order of every sum is fixed, whichever thread does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from honed.model.compiled import TILE, as_bits, gomp
from honed.model.tree_loops import ROWS, backward_loop, collect_loop, forward_loop, pack_loop

if TYPE_CHECKING:
    from honed.model.tree import Node

PARTS = 3
"""Of the backward pass, for each thread; each has its own sums for keys and values."""


def fit(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether loops can run here, and heads are of a kind that they take."""
    return gomp() is not None and dim % TILE == 0 and heads // kv_heads <= ROWS


class Layout:
    """A tree as the loops read it, for `groups` query heads a key head and a window (0: none).

    `panels` [P, 2]: first token and how many. `units` [U, 5], a block of queries each: first token, how many, position
    of the first, and its first segment and how many. `segments` [S, 4], what a unit sees of a node on its path: first
    panel and how many, position of the first key, and the one at which the node ends.
    """

    def __init__(self, nodes: Sequence[Node], groups: int, window: int) -> None:
        panels: list[tuple[int, int]] = []
        firsts: list[int] = []
        for node in nodes:
            firsts.append(len(panels))
            panels += [(t, min(TILE, node.stop - t)) for t in range(node.start, node.stop, TILE)]
        units: list[tuple[int, int, int, int, int]] = []
        segments: list[tuple[int, int, int, int]] = []
        widest, at_once = 1, max(1, ROWS // groups)
        self._costs: list[int] = []
        for node in nodes:
            for first in range(node.start, node.stop, at_once):
                count, position = min(at_once, node.stop - first), node.before + first - node.start
                least, begin, columns = max(0, position - window + 1) if window else 0, len(segments), 0
                for number in node.path:
                    other = nodes[number]
                    end = other.before + other.stop - other.start
                    skipped = max(0, least - other.before) // TILE
                    start = other.before + skipped * TILE
                    wide = -(-(min(end, position + count) - start) // TILE)
                    if wide > 0:
                        segments.append((firsts[number] + skipped, wide, start, end))
                        columns += wide
                units.append((first, count, position, begin, len(segments) - begin))
                self._costs.append(columns)
                widest = max(widest, columns)
        self.groups, self.window = groups, window
        self.panels, self.units, self.segments = (np.array(each, np.int64) for each in (panels, units, segments))
        self.token_panels = np.empty(nodes[-1].stop, np.int64)
        for number, (first, count) in enumerate(panels):
            self.token_panels[first : first + count] = number * TILE + np.arange(count)
        # an odd number of cache lines, else all rows would share a few places of the first cache
        self.row = TILE * (widest | 1)

    def shares(self, wanted: int) -> np.ndarray:
        """Bounds of up to `wanted` runs of units that cost about the same."""
        total = np.cumsum(self._costs)
        wanted = min(wanted, len(total))
        ends = np.searchsorted(total, total[-1] * np.arange(1, wanted) / wanted, side="left") + 1
        return np.array([0, *ends, len(total)], np.int64)


class TreeAttention(torch.autograd.Function):
    """softmax(q k' scale) v over each token's path, for q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d].

    With cos and sin [T, d] queries and keys are turned by their positions first (Su et al. 2021), sin with the sign of
    the half it is for.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, layout: Layout, scale: float
    ) -> Tensor:
        q, k, v = _rows(q), _rows(k), _rows(v)
        num_tokens, heads, dim = q.shape
        threads, kv_heads = torch.get_num_threads(), k.shape[1]
        turns = _addresses(cos, sin)
        (_, keys), (values, _) = _packed(k, turns, layout, across=True), _packed(v, (0, 0), layout, across=False)
        out, logs = q.new_empty(num_tokens, heads, dim), q.new_empty(num_tokens, heads)
        room = q.new_empty(threads, ROWS * (layout.row + 2 * dim))
        counter = np.zeros(1, np.int64)
        forward_loop()(
            threads, len(layout.units) * kv_heads, q.data_ptr(), 4 * q.stride(0), *turns, keys.data_ptr(),
            values.data_ptr(), out.data_ptr(), logs.data_ptr(), room.data_ptr(), 4 * room.stride(0),
            counter.ctypes.data, layout.units.ctypes.data, layout.segments.ctypes.data, len(layout.panels), kv_heads,
            layout.groups, dim, layout.row, layout.window, as_bits(scale),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, cos, sin, out, logs)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, cos, sin, out, logs = ctx.saved_tensors
        layout, dout = ctx.layout, _rows(grads[0])
        (num_tokens, _, dim), kv_heads, threads = q.shape, k.shape[1], torch.get_num_threads()
        turns = _addresses(cos, sin)
        (keys, keys_across), (_, values_across) = (
            _packed(k, turns, layout, across=True), _packed(v, (0, 0), layout, across=True)
        )  # fmt: skip
        shares = layout.shares(-(-PARTS * threads // kv_heads))
        parts = kv_heads * (len(shares) - 1)
        sums = q.new_empty(2, parts, len(layout.panels) * TILE, dim)
        dq, dk, dv = (torch.empty(each.shape, dtype=each.dtype) for each in (q, k, v))
        room = q.new_empty(threads, ROWS * (2 * layout.row + 3 * dim + 1))
        counter = np.zeros(1, np.int64)
        backward_loop()(
            threads, parts, q.data_ptr(), 4 * q.stride(0), *turns, keys_across.data_ptr(), keys.data_ptr(),
            values_across.data_ptr(), out.data_ptr(), logs.data_ptr(), dout.data_ptr(), 4 * dout.stride(0),
            dq.data_ptr(), sums[0].data_ptr(), sums[1].data_ptr(), room.data_ptr(), 4 * room.stride(0),
            counter.ctypes.data, layout.units.ctypes.data, layout.segments.ctypes.data, shares.ctypes.data,
            len(layout.panels), kv_heads, layout.groups, dim, layout.row, layout.window, as_bits(ctx.scale),
        )  # fmt: skip
        collect_loop()(
            threads, min(num_tokens, 4 * threads), sums[0].data_ptr(), sums[1].data_ptr(), *turns, dk.data_ptr(),
            dv.data_ptr(), layout.token_panels.ctypes.data, num_tokens, len(shares) - 1, len(layout.panels) * TILE,
            kv_heads, dim,
        )  # fmt: skip
        return dq, dk, dv, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """x [T, heads, d] whose tokens lie anywhere, and whose heads one after the other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _addresses(cos: Tensor | None, sin: Tensor | None) -> tuple[int, int]:
    if cos is None or sin is None:
        return 0, 0
    assert cos.is_contiguous(), "rows are read by their addresses"
    assert sin.is_contiguous(), "rows are read by their addresses"
    return cos.data_ptr(), sin.data_ptr()


def _packed(x: Tensor, turns: tuple[int, int], layout: Layout, *, across: bool) -> tuple[Tensor, Tensor]:
    """x [T, kv_heads, d], turned, in panels: tokens by numbers [kv_heads, P TILE, d], and where wanted `across`,
    numbers by tokens [kv_heads, P, d, TILE]."""
    _, kv_heads, dim = x.shape
    size, threads = kv_heads * len(layout.panels) * TILE * dim, torch.get_num_threads()
    rows, columns = x.new_empty(size), x.new_empty(size if across else 0)
    pack_loop()(
        threads, min(len(layout.panels), 4 * threads), x.data_ptr(), 4 * x.stride(0), *turns, rows.data_ptr(),
        columns.data_ptr() if across else 0, layout.panels.ctypes.data, len(layout.panels), kv_heads, dim,
    )  # fmt: skip
    return rows, columns
