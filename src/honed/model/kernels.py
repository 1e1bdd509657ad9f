"""What a plain decoder computes between its products, each in one pass over memory; on a CPU, in single precision.

Loops of compiled.py and the calls that hand them their addresses. A token's result is the same to the bit whatever runs
beside it and in whichever chunks its prompt is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from numba import carray
from torch import Tensor

from honed.model.bank import Bank
from honed.model.compiled import OPTIONS, WIDTH, Loop, as_bits, as_float, claim, dots, exp, floats, gomp, ints, mix

if TYPE_CHECKING:
    from honed.model.dense import Norm

MAX_GROUPS = 8
"""Query heads of a key head whose sums the registers hold."""
AT_ONCE = 4
"""Tokens whose values are mixed in one go."""
SMALL = 16384
"""Numbers that one thread is done with before another has woken."""
PARTS = 4
"""Of a loop, for each thread: who is late gets fewer."""

Member = tuple[Bank, int, int, int, int]
"""A stretch of a step's tokens: its bank and row, its first flat token, the positions from start to end."""


def fit(groups: int, dim: int) -> bool:
    """Whether loops can run here, and heads are of a kind that `Step` takes."""
    return gomp() is not None and dim % WIDTH == 0 and groups <= MAX_GROUPS


class Step:
    """Where a step's tokens write their keys and values, and which keys each query sees."""

    def __init__(self, groups: int, dim: int, members: Sequence[Member], alone: Sequence[Member]) -> None:
        """`members` write their keys and values; of them `alone` are attended to here, the others elsewhere."""
        self._groups, self._dim, self._threads = groups, dim, torch.get_num_threads()
        self._kv_heads = members[0][0].data.shape[3]
        self._places = _places(members)
        self._units = _units(alone, self._kv_heads)
        self._bounds = _shares(self._units[:, 4], self._threads)
        # a place for the scores of each part, on cache lines of its own
        self._room = -(-groups * int(self._units[:, 4].max(initial=0)) // 16) * 16 + 16
        self._scores = torch.empty((len(self._bounds) - 1) * self._room, dtype=torch.float32)

    def rotate(
        self, joined: Tensor, cos: Tensor, sin: Tensor, query_norm: Norm | None, key_norm: Norm | None, layer: int
    ) -> None:
        """joined [T, heads + 2 kv_heads, d], queries, keys and values: turns the first two by their positions, normed
        before where they have norms, and writes keys and values to their rows. cos and sin [T, d], sin with the sign
        of the half it is for."""
        _, heads, dim = joined.shape
        parts = _parts(len(self._places), heads * dim, self._threads)
        _rotate(dim)(
            self._threads, parts, joined.data_ptr(), 4 * joined.stride(0), cos.data_ptr(), sin.data_ptr(), layer,
            self._places.ctypes.data, len(self._places), heads - 2 * self._kv_heads, self._kv_heads,
            query_norm.weight.data_ptr() if query_norm else 0, key_norm.weight.data_ptr() if key_norm else 0,
            query_norm.bits if query_norm else 0,
        )  # fmt: skip

    def attend(self, queries: Tensor, out: Tensor, layer: int, window: int | None, scale: float) -> None:
        """queries and out [T, kv_heads, groups, d]: softmax of the scaled products, over the keys that each sees."""
        _attention(self._groups, self._dim)(
            self._threads, len(self._bounds) - 1, queries.data_ptr(), 4 * queries.stride(0), out.data_ptr(),
            4 * out.stride(0), layer, window or 0, self._scores.data_ptr(), 4 * self._room, self._units.ctypes.data,
            self._bounds.ctypes.data, as_bits(scale),
        )  # fmt: skip


def normed(x: Tensor, more: Tensor | None, norm: Norm, total: Tensor | None = None) -> Tensor:
    """Writes y = x + more to `total`, or to x, and returns y / sqrt(mean(y^2) + eps) times the weight. All [T, n]."""
    assert x.is_contiguous(), "rows are read by their addresses"
    assert more is None or more.is_contiguous(), "rows are read by their addresses"
    out, threads, (num_tokens, n) = torch.empty_like(x), torch.get_num_threads(), x.shape
    _norm()(
        threads, _parts(num_tokens, n, threads), x.data_ptr(), 0 if more is None else more.data_ptr(),
        norm.weight.data_ptr(), out.data_ptr(), num_tokens, n, norm.bits, (x if total is None else total).data_ptr(),
    )  # fmt: skip
    return out


def gated(hidden: Tensor) -> Tensor:
    """hidden [T, 2 n] -> silu(first half) times the second, [T, n]."""
    assert hidden.is_contiguous(), "rows are read by their addresses"
    num_tokens, width = hidden.shape
    out, threads = hidden.new_empty(num_tokens, width // 2), torch.get_num_threads()
    _gate()(threads, _parts(num_tokens, 2 * width, threads), hidden.data_ptr(), out.data_ptr(), num_tokens, width // 2)
    return out


def _rows(members: Sequence[Member]) -> tuple[np.ndarray, np.ndarray]:
    """Of each member [6] the address of its row; bytes from layer to layer, keys to values, head to head; its first
    position and flat token. And [members] how many tokens it has."""
    found = np.empty((len(members), 6), np.int64)
    for number, (bank, row, first, start, _) in enumerate(members):
        layer, part, a_row, head, *_ = bank.data.stride()
        found[number] = bank.data.data_ptr() + 4 * row * a_row, 4 * layer, 4 * part, 4 * head, start, first
    return found, np.array([end - start for *_, start, end in members], np.int64)


def _one_by_one(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Each row as often as it has tokens, position and flat token counting on."""
    found = np.repeat(rows, counts, 0)
    found[:, 4:] += (np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts))[:, None]
    return found


def _places(members: Sequence[Member]) -> np.ndarray:
    """[tokens, 6]: address of the row; bytes from layer to layer, keys to values, head to head; position; token."""
    return _one_by_one(*_rows(members))


def _units(members: Sequence[Member], kv_heads: int) -> np.ndarray:
    """[kv_heads tokens, 6]: address of the head's keys; bytes from layer to layer, keys to values; the head; how many
    keys are seen; the flat token. A head's tokens one after the other: they read the same keys."""
    rows, counts = _rows(members)
    heads = np.repeat(rows, kv_heads, 0)
    number = np.tile(np.arange(kv_heads), len(rows))
    heads[:, 0] += heads[:, 3] * number
    heads[:, 3] = number
    heads[:, 4] += 1
    return _one_by_one(heads, np.repeat(counts, kv_heads))


def _shares(costs: np.ndarray, threads: int) -> np.ndarray:
    """Bounds of parts that cost about the same, as many as make all threads end together."""
    if not len(costs):
        return np.zeros(1, np.int64)
    total = np.cumsum(costs)
    parts = min(len(costs), threads * PARTS)
    ends = np.searchsorted(total, total[-1] * np.arange(1, parts) / parts, side="left") + 1
    return np.array([0, *ends, len(costs)], np.int64)


def _parts(num_tokens: int, width: int, threads: int) -> int:
    return 1 if num_tokens * width < SMALL else min(num_tokens, threads * PARTS)


@functools.cache
def _attention(groups: int, dim: int) -> Loop:
    each, some, one = dots(groups, dim), mix(groups, dim, AT_ONCE), mix(groups, dim, 1)

    @numba.njit(**OPTIONS, inline="always")
    def unit(query: int, key: int, value: int, out: int, room: int, length: int, scale: float) -> None:
        scores = carray(floats(room), (groups * length,))
        for t in range(length):
            each(floats(query), floats(key + 4 * dim * t), floats(room + 4 * t), length)
        for g in range(groups):
            top = scores[g * length]
            for t in range(length):
                top = max(top, scores[g * length + t])
            total = np.float32(0)
            for t in range(length):
                weight = exp((scores[g * length + t] - top) * scale)
                scores[g * length + t] = weight
                total += weight
            inverse = np.float32(1) / total
            for t in range(length):
                scores[g * length + t] *= inverse
        mixed = carray(floats(out), (groups * dim,))
        for d in range(groups * dim):
            mixed[d] = np.float32(0)
        done = length // AT_ONCE * AT_ONCE
        for t in range(0, done, AT_ONCE):
            some(floats(out), floats(value + 4 * dim * t), floats(room + 4 * t), length)
        for t in range(done, length):
            one(floats(out), floats(value + 4 * dim * t), floats(room + 4 * t), length)

    def attention(a: Any) -> None:
        """As `Step.attend` lists its arguments."""
        units, bounds, scale, size = ints(a[10]), ints(a[11]), as_float(np.int32(a[12])), 4 * groups * dim
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            for u in range(bounds[part], bounds[part + 1]):
                base, a_layer, to_values, head, seen, token = (
                    units[6 * u], units[6 * u + 1], units[6 * u + 2], units[6 * u + 3], units[6 * u + 4],
                    units[6 * u + 5],
                )  # fmt: skip
                first = max(0, seen - a[7]) if a[7] else 0
                key = base + a[6] * a_layer + 4 * dim * first
                unit(
                    a[2] + token * a[3] + head * size, key, key + to_values, a[4] + token * a[5] + head * size,
                    a[8] + part * a[9], seen - first, scale,
                )  # fmt: skip

    return Loop(attention)


@functools.cache
def _rotate(dim: int) -> Loop:
    half = dim // 2

    @numba.njit(**OPTIONS, inline="always")
    def turn(head: int, cos: int, sin: int, norm: int, eps: float) -> None:
        x, c, s = carray(floats(head), (dim,)), carray(floats(cos), (dim,)), carray(floats(sin), (dim,))
        if norm:
            weight, squares = carray(floats(norm), (dim,)), np.float32(0)
            for d in range(dim):
                squares += x[d] * x[d]
            inverse = np.float32(1) / np.sqrt(squares * np.float32(1 / dim) + eps)
            for d in range(dim):
                x[d] = x[d] * inverse * weight[d]
        for d in range(half):
            left, right = x[d], x[d + half]
            x[d] = left * c[d] + right * s[d]
            x[d + half] = right * c[d + half] + left * s[d + half]

    @numba.njit(**OPTIONS, inline="always")
    def copy(source: int, target: int) -> None:
        x, y = carray(floats(source), (dim,)), carray(floats(target), (dim,))
        for d in range(dim):
            y[d] = x[d]

    def rotate(a: Any) -> None:
        """As `Step.rotate` lists its arguments."""
        places, count, heads, kv_heads, eps = ints(a[7]), a[8], a[9], a[10], as_float(np.int32(a[13]))
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            for i in range(part * count // a[1], (part + 1) * count // a[1]):
                token, position = places[6 * i + 5], places[6 * i + 4]
                cos, sin, own = a[4] + 4 * dim * token, a[5] + 4 * dim * token, a[2] + token * a[3]
                for h in range(heads):
                    turn(own + 4 * dim * h, cos, sin, a[11], eps)
                target = places[6 * i] + a[6] * places[6 * i + 1] + 4 * dim * position
                for h in range(kv_heads):
                    key = own + 4 * dim * (heads + h)
                    turn(key, cos, sin, a[12], eps)
                    copy(key, target + h * places[6 * i + 3])
                    copy(key + 4 * dim * kv_heads, target + places[6 * i + 2] + h * places[6 * i + 3])

    return Loop(rotate)


@functools.cache
def _norm() -> Loop:
    def norm(a: Any) -> None:
        """As `normed` lists its arguments."""
        count, n, eps = a[6], a[7], as_float(np.int32(a[8]))
        weight = carray(floats(a[4]), (n,))
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            for t in range(part * count // a[1], (part + 1) * count // a[1]):
                x, out = carray(floats(a[2] + 4 * n * t), (n,)), carray(floats(a[5] + 4 * n * t), (n,))
                total, squares = x, np.float32(0)
                if a[3]:
                    more, total = carray(floats(a[3] + 4 * n * t), (n,)), carray(floats(a[9] + 4 * n * t), (n,))
                    for i in range(n):
                        total[i] = x[i] + more[i]
                for i in range(n):
                    squares += total[i] * total[i]
                inverse = np.float32(1) / np.sqrt(squares / np.float32(n) + eps)
                for i in range(n):
                    out[i] = total[i] * inverse * weight[i]

    return Loop(norm)


@functools.cache
def _gate() -> Loop:
    def gate(a: Any) -> None:
        """As `gated` lists its arguments."""
        count, n = a[4], a[5]
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            for t in range(part * count // a[1], (part + 1) * count // a[1]):
                x, out = carray(floats(a[2] + 8 * n * t), (2 * n,)), carray(floats(a[3] + 4 * n * t), (n,))
                for i in range(n):
                    out[i] = x[i] / (np.float32(1) + exp(-x[i])) * x[n + i]

    return Loop(gate)
