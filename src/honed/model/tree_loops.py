"""The loops of attention over a tree (tree_attention.py): packing, the two passes, and the sums at their end.

Segments, units and panels are those of its `Layout`; addresses are in bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba import carray

from honed.model.compiled import OPTIONS, TILE, Loop, as_float, claim, exp, floats, ints, tile

ROWS = 48
"""Rows of a block, a query head of a token each; a multiple of HIGH."""
HIGH, LOW = 6, 4
"""Rows of a product that registers hold; of TILE keys HIGH, HIGH and LOW."""


@numba.njit(**OPTIONS, inline="always")
def _turned(source: int, target: int, cos: int, sin: int, dim: int, scale: float) -> None:
    """A head's numbers times scale, turned."""
    x, y = carray(floats(source), (dim,)), carray(floats(target), (dim,))
    if cos:
        c, s, half = carray(floats(cos), (dim,)), carray(floats(sin), (dim,)), dim // 2
        for d in range(half):
            y[d] = (x[d] * c[d] + x[d + half] * s[d]) * scale
            y[d + half] = (x[d + half] * c[d + half] + x[d] * s[d + half]) * scale
    else:
        for d in range(dim):
            y[d] = x[d] * scale


@numba.njit(**OPTIONS, inline="always")
def _turned_back(source: int, target: int, cos: int, sin: int, dim: int, scale: float) -> None:
    """The gradient of `_turned`."""
    y, x = carray(floats(source), (dim,)), carray(floats(target), (dim,))
    if cos:
        c, s, half = carray(floats(cos), (dim,)), carray(floats(sin), (dim,)), dim // 2
        for d in range(half):
            x[d] = (y[d] * c[d] + y[d + half] * s[d + half]) * scale
            x[d + half] = (y[d + half] * c[d + half] + y[d] * s[d]) * scale
    else:
        for d in range(dim):
            x[d] = y[d] * scale


@numba.njit(**OPTIONS, inline="always")
def _zero(target: int, count: int) -> None:
    x = carray(floats(target), (count,))
    for i in range(count):
        x[i] = np.float32(0)


@numba.njit(**OPTIONS, inline="always")
def _seen(segments: Any, s: int, position: int, window: int) -> tuple[int, int, int]:
    """Of a segment's columns the first that a query at `position` sees, the one after the last, and how many."""
    wide, start = segments[4 * s + 1] * TILE, segments[4 * s + 2]
    low = min(wide, max(0, position - window + 1 - start)) if window else 0
    return low, max(low, min(wide, min(segments[4 * s + 3], position + 1) - start)), wide


@numba.njit(**OPTIONS, inline="always")
def _softmax(scores: int, position: int, window: int, segments: Any, begin: int, end: int) -> Any:
    """Weights of one row, not yet divided by their sum, in place of the scores; its greatest score and the sum."""
    top, total, column = np.float32(-3.0e38), np.float32(0), 0
    for s in range(begin, end):
        low, high, wide = _seen(segments, s, position, window)
        x = carray(floats(scores + 4 * (column + low)), (high - low,))
        for j in range(high - low):
            top = max(top, x[j])
        column += wide
    column = 0
    for s in range(begin, end):
        low, high, wide = _seen(segments, s, position, window)
        _zero(scores + 4 * column, low)
        x = carray(floats(scores + 4 * (column + low)), (high - low,))
        for j in range(high - low):
            weight = exp(x[j] - top)
            x[j] = weight
            total += weight
        _zero(scores + 4 * (column + high), wide - high)
        column += wide
    return top, total


@numba.njit(**OPTIONS, inline="always")
def _slopes(
    scores: int, pulls: int, logarithm: float, delta: float, position: int, window: int, segments: Any, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Of one row: weights p in place of the scores, and p (pull - delta) in place of the pulls."""
    column = 0
    for s in range(begin, end):
        low, high, wide = _seen(segments, s, position, window)
        _zero(scores + 4 * column, low)
        _zero(pulls + 4 * column, low)
        x = carray(floats(scores + 4 * (column + low)), (high - low,))
        y = carray(floats(pulls + 4 * (column + low)), (high - low,))
        for j in range(high - low):
            weight = exp(x[j] - logarithm)
            x[j] = weight
            y[j] = weight * (y[j] - delta)
        _zero(scores + 4 * (column + high), wide - high)
        _zero(pulls + 4 * (column + high), wide - high)
        column += wide


@numba.njit(**OPTIONS, inline="always")
def _dot(left: int, right: int, dim: int) -> Any:
    x, y, total = carray(floats(left), (dim,)), carray(floats(right), (dim,)), np.float32(0)
    for d in range(dim):
        total += x[d] * y[d]
    return total


@functools.cache
def pack_loop() -> Loop:
    """Copies keys or values into panels."""
    turned, zero = _turned, _zero

    def pack(a: Any) -> None:
        """As `_packed` lists its arguments."""
        x, x_row, cos, sin, rows, columns = a[2], a[3], a[4], a[5], a[6], a[7]
        panels, count, kv_heads, dim, one = ints(a[8]), a[9], a[10], a[11], np.float32(1)
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            for p in range(part * count // a[1], (part + 1) * count // a[1]):
                first, size = panels[2 * p], panels[2 * p + 1]
                for h in range(kv_heads):
                    place = 4 * (h * count + p) * TILE * dim
                    for j in range(size):
                        token = first + j
                        c, s = (cos + 4 * dim * token, sin + 4 * dim * token) if cos else (0, 0)
                        turned(x + token * x_row + 4 * h * dim, rows + place + 4 * j * dim, c, s, dim, one)
                    zero(rows + place + 4 * size * dim, (TILE - size) * dim)
                    if columns:
                        tokens = carray(floats(rows + place), (TILE * dim,))
                        numbers = carray(floats(columns + place), (TILE * dim,))
                        for d in range(dim):
                            for j in range(TILE):
                                numbers[d * TILE + j] = tokens[j * dim + d]

    return Loop(pack)


@functools.cache
def _products() -> Any:
    """The three products of a block: scores = rows panels', rows = weights panels, and panels += weights' rows."""
    fresh, more, more_low = tile(HIGH, False), tile(HIGH, True), tile(LOW, True)

    @numba.njit(**OPTIONS, inline="always")
    def scores(
        rows: int, panels: int, out: int, high: int, dim: int, row: int, segments: Any, begin: int, end: int
    ) -> None:  # fmt: skip
        column = 0
        for s in range(begin, end):
            panel, wide = segments[4 * s], segments[4 * s + 1]
            for p in range(panel, panel + wide):
                for r in range(0, high, HIGH):
                    fresh(
                        floats(rows + 4 * r * dim), floats(panels + 4 * p * TILE * dim),
                        floats(out + 4 * (r * row + column)), dim, 1, TILE, row, dim,
                    )  # fmt: skip
                column += TILE

    @numba.njit(**OPTIONS, inline="always")
    def mixed(
        weights: int, panels: int, out: int, high: int, dim: int, row: int, segments: Any, begin: int, end: int
    ) -> None:  # fmt: skip
        column = 0
        for s in range(begin, end):
            panel, steps = segments[4 * s], segments[4 * s + 1] * TILE
            for r in range(0, high, HIGH):
                for d in range(0, dim, TILE):
                    left, right = weights + 4 * (r * row + column), panels + 4 * (panel * TILE * dim + d)
                    if s == begin:
                        fresh(floats(left), floats(right), floats(out + 4 * (r * dim + d)), row, 1, dim, dim, steps)
                    else:
                        more(floats(left), floats(right), floats(out + 4 * (r * dim + d)), row, 1, dim, dim, steps)
            column += steps

    @numba.njit(**OPTIONS, inline="always")
    def spread(
        weights: int, rows: int, panels: int, count: int, dim: int, row: int, segments: Any, begin: int, end: int
    ) -> None:  # fmt: skip
        column = 0
        for s in range(begin, end):
            panel, wide = segments[4 * s], segments[4 * s + 1]
            for p in range(panel, panel + wide):
                for d in range(0, dim, TILE):
                    left, out = weights + 4 * column, panels + 4 * (p * TILE * dim + d)
                    more(floats(left), floats(rows + 4 * d), floats(out), 1, row, dim, dim, count)
                    more(
                        floats(left + 4 * HIGH), floats(rows + 4 * d), floats(out + 4 * HIGH * dim), 1, row, dim, dim,
                        count,
                    )  # fmt: skip
                    more_low(
                        floats(left + 8 * HIGH), floats(rows + 4 * d), floats(out + 8 * HIGH * dim), 1, row, dim, dim,
                        count,
                    )  # fmt: skip
                column += TILE

    return scores, mixed, spread


@functools.cache
def forward_loop() -> Loop:
    """Blocks of queries over their paths: outputs, and the logarithm of each row's sum."""
    turned, zero, softmax = _turned, _zero, _softmax
    products, mixed, _ = _products()

    def forward(a: Any) -> None:
        """As `TreeAttention.forward` lists its arguments."""
        q, q_row, cos, sin, keys, values, out, logs, room = a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
        units, segments, panels, kv_heads, groups = ints(a[13]), ints(a[14]), a[15], a[16], a[17]
        dim, row, window, scale = a[18], a[19], a[20], as_float(np.int32(a[21]))
        scores = room + claim(ints(a[12])) * a[11]
        queries = scores + 4 * ROWS * row
        sums = queries + 4 * ROWS * dim
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            u, h = 5 * (part // kv_heads), part % kv_heads
            first, count, position, begin = units[u], units[u + 1], units[u + 2], units[u + 3]
            end, rows, panel = begin + units[u + 4], count * groups, 4 * h * panels * TILE * dim
            high = (rows + HIGH - 1) // HIGH * HIGH
            for t in range(count):
                c, s = (cos + 4 * dim * (first + t), sin + 4 * dim * (first + t)) if cos else (0, 0)
                for g in range(groups):
                    source = q + (first + t) * q_row + 4 * dim * (h * groups + g)
                    turned(source, queries + 4 * dim * (t * groups + g), c, s, dim, scale)
            zero(queries + 4 * dim * rows, (high - rows) * dim)
            products(queries, keys + panel, scores, high, dim, row, segments, begin, end)
            logarithms = carray(floats(logs + 4 * kv_heads * groups * first), (count * kv_heads * groups,))
            for r in range(rows):
                top, total = softmax(scores + 4 * r * row, position + r // groups, window, segments, begin, end)
                logarithms[r // groups * kv_heads * groups + h * groups + r % groups] = top + np.log(total)
                inverse = np.float32(1) / total
                carray(floats(queries), (ROWS,))[r] = inverse  # the queries are done with
            for r in range(rows, high):
                zero(scores + 4 * r * row, row)
            mixed(scores, values + panel, sums, high, dim, row, segments, begin, end)
            for r in range(rows):
                inverse = carray(floats(queries), (ROWS,))[r]
                place = 4 * dim * ((first + r // groups) * kv_heads * groups + h * groups + r % groups)
                source, target = carray(floats(sums + 4 * r * dim), (dim,)), carray(floats(out + place), (dim,))
                for d in range(dim):
                    target[d] = source[d] * inverse

    return Loop(forward)


@functools.cache
def backward_loop() -> Loop:
    """Gradients of queries, and of each share the sums for keys and values."""
    turned, turned_back, zero, slopes, dot = _turned, _turned_back, _zero, _slopes, _dot
    products, mixed, spread = _products()

    def backward(a: Any) -> None:
        """As `TreeAttention.backward` lists its arguments."""
        q, q_row, cos, sin, keys_across, keys, values_across = a[2], a[3], a[4], a[5], a[6], a[7], a[8]
        out, logs, dout, dout_row, dq, dkeys, dvalues, room = a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16]
        units, segments, shares, panels, kv_heads, groups = ints(a[19]), ints(a[20]), ints(a[21]), a[22], a[23], a[24]
        dim, row, window, scale, one = a[25], a[26], a[27], as_float(np.int32(a[28])), np.float32(1)
        scores = room + claim(ints(a[18])) * a[17]
        pulls, queries = scores + 4 * ROWS * row, scores + 8 * ROWS * row
        slope, sums = queries + 4 * ROWS * dim, queries + 8 * ROWS * dim
        heads, size, deltas = kv_heads * groups, panels * TILE * dim, carray(floats(sums + 4 * ROWS * dim), (ROWS,))
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            h, share = part % kv_heads, part // kv_heads
            dk, dv, panel = dkeys + 4 * part * size, dvalues + 4 * part * size, 4 * h * size
            zero(dk, size)
            zero(dv, size)
            for unit in range(shares[share], shares[share + 1]):
                u = 5 * unit
                first, count, position, begin = units[u], units[u + 1], units[u + 2], units[u + 3]
                end, rows = begin + units[u + 4], count * groups
                high = (rows + HIGH - 1) // HIGH * HIGH
                for r in range(rows):
                    token, head = first + r // groups, h * groups + r % groups
                    c, s = (cos + 4 * dim * token, sin + 4 * dim * token) if cos else (0, 0)
                    turned(q + token * q_row + 4 * dim * head, queries + 4 * dim * r, c, s, dim, scale)
                    source = dout + token * dout_row + 4 * dim * head
                    turned(source, slope + 4 * dim * r, 0, 0, dim, one)
                    deltas[r] = dot(source, out + 4 * dim * (token * heads + head), dim)
                zero(queries + 4 * dim * rows, (high - rows) * dim)
                zero(slope + 4 * dim * rows, (high - rows) * dim)
                products(queries, keys_across + panel, scores, high, dim, row, segments, begin, end)
                products(slope, values_across + panel, pulls, high, dim, row, segments, begin, end)
                logarithms = carray(floats(logs + 4 * heads * first), (count * heads,))
                for r in range(rows):
                    logarithm = logarithms[r // groups * heads + h * groups + r % groups]
                    slopes(
                        scores + 4 * r * row, pulls + 4 * r * row, logarithm, deltas[r], position + r // groups, window,
                        segments, begin, end,
                    )  # fmt: skip
                for r in range(rows, high):
                    zero(pulls + 4 * r * row, row)
                spread(scores, slope, dv, rows, dim, row, segments, begin, end)
                spread(pulls, queries, dk, rows, dim, row, segments, begin, end)
                mixed(pulls, keys + panel, sums, high, dim, row, segments, begin, end)
                for r in range(rows):
                    token, head = first + r // groups, h * groups + r % groups
                    c, s = (cos + 4 * dim * token, sin + 4 * dim * token) if cos else (0, 0)
                    turned_back(sums + 4 * r * dim, dq + 4 * dim * (token * heads + head), c, s, dim, scale)

    return Loop(backward)


@functools.cache
def collect_loop() -> Loop:
    """Adds the shares up."""
    turned_back = _turned_back

    def collect(a: Any) -> None:
        """Sums over the shares, turned back: as `TreeAttention.backward` lists its arguments."""
        dkeys, dvalues, cos, sin, dk, dv, places = a[2], a[3], a[4], a[5], a[6], a[7], ints(a[8])
        count, shares, panel_rows, kv_heads, dim, one = a[9], a[10], a[11], a[12], a[13], np.float32(1)
        while True:
            part = claim(a)
            if part >= a[1]:
                break
            for t in range(part * count // a[1], (part + 1) * count // a[1]):
                c, s = (cos + 4 * dim * t, sin + 4 * dim * t) if cos else (0, 0)
                for h in range(kv_heads):
                    place, target = 4 * dim * (h * panel_rows + places[t]), 4 * dim * (t * kv_heads + h)
                    k, v = carray(floats(dkeys + place), (dim,)), carray(floats(dvalues + place), (dim,))
                    for share in range(1, shares):
                        further = place + 4 * dim * share * kv_heads * panel_rows
                        x, y = carray(floats(dkeys + further), (dim,)), carray(floats(dvalues + further), (dim,))
                        for d in range(dim):
                            k[d] += x[d]
                            v[d] += y[d]
                    turned_back(dkeys + place, dk + target, c, s, dim, one)
                    turned_back(dvalues + place, dv + target, 0, 0, dim, one)

    return Loop(collect)
