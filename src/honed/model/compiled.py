"""Loops compiled by numba for this CPU and run by torch's own threads, where torch has no good call for them.

A loop is a function of whole numbers: a[0] counts the parts that threads have claimed, a[1] is how many there are, the
rest are its own (addresses, sizes). Threads of numba's own would fight torch's for the cores: its workers spin between
products; so libgomp, whose team torch uses, runs it. What was compiled is kept on disk for the next process, beside
this file or in the user's cache.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WIDTH = 8
"""Numbers of a vector (LLVM splits it where registers are narrower)."""
TILE = 2 * WIDTH
"""Columns of a product that registers hold."""
VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
SIGNATURE = types.void(types.CPointer(types.int64))
OPTIONS = {"fastmath": True, "error_model": "numpy"}
FLOATS = types.CPointer(types.float32)


@functools.cache
def gomp() -> ctypes.CDLL | None:
    """The libgomp whose team torch's products run on; None where there is none, or more than one."""
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
    found = [path for path in loaded if path.startswith(os.path.dirname(torch.__file__))] or list(loaded)
    if len(found) != 1:
        return None
    library = ctypes.CDLL(found[0])
    library.GOMP_parallel.restype = None
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return library


class Loop:
    """A compiled function of an array of whole numbers."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        try:
            made = numba.cfunc(SIGNATURE, **OPTIONS, cache=True)(function)
        except RuntimeError:  # no folder may be written
            made = numba.cfunc(SIGNATURE, **OPTIONS)(function)
        self._kept = made
        self._address = int(made.address)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, threads: int, parts: int, *own: int) -> None:
        """Runs its parts on up to `threads` threads; one is the caller's. `own`: its arguments from a[2] on."""
        arguments = (ctypes.c_int64 * (len(own) + 2))(0, parts, *own)
        library = gomp()
        if threads == 1 or parts == 1 or library is None:
            self._alone(arguments)
        else:
            library.GOMP_parallel(self._address, arguments, min(threads, parts), 0)


@functools.cache
def as_bits(value: float) -> int:
    """A number in single precision as a whole number."""
    return int(np.float32(value).view(np.int32))


@intrinsic
def floats(context: Any, address: Any) -> Any:
    """A whole number as the address of single precision numbers."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return FLOATS(types.int64), made


@intrinsic
def ints(context: Any, address: Any) -> Any:
    """A whole number as the address of whole numbers."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), made


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    """32 bits as a number in single precision."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), made


@intrinsic
def claim(context: Any, counter: Any) -> Any:
    """The number of a part that no other thread has claimed."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), made


LOG2E, LN2_HIGH, LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
C0, C1, C2, C3, C4, C5 = (
    np.float32(each) for each in (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666666e-1, 5e-1)
)
LEAST, MOST, HALF, ONE = np.float32(-87), np.float32(88), np.float32(0.5), np.float32(1)


@numba.njit(**OPTIONS, inline="always")
def exp(x: Any) -> Any:
    """e^x to 2 units in the last place, x held to -87 ... 88: 2^n times a polynomial (Cephes' expf). Fills vectors."""
    bounded = min(max(x, LEAST), MOST)
    n = np.floor(bounded * LOG2E + HALF)
    r = bounded - n * LN2_HIGH - n * LN2_LOW
    p = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    return (p * r * r + r + ONE) * as_float((np.int32(n) + np.int32(127)) << np.int32(23))


class Vectors:
    """Vector instructions on addresses of numbers, as LLVM's builder writes them."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def at(self, pointer: Any, index: Any) -> Any:
        """The address of a number."""
        where = ir.Constant(ir.IntType(64), index) if isinstance(index, int) else index
        return self._builder.gep(pointer, [where])

    def load(self, pointer: Any, index: int) -> Any:
        """WIDTH numbers."""
        found = self._builder.load(self._builder.bitcast(self.at(pointer, index), VECTOR.as_pointer()))
        found.align = 4
        return found

    def store(self, value: Any, pointer: Any, index: int) -> None:
        """WIDTH numbers."""
        kept = self._builder.store(value, self._builder.bitcast(self.at(pointer, index), VECTOR.as_pointer()))
        kept.align = 4

    def spread(self, number: Any) -> Any:
        """A vector of one number."""
        none = ir.Constant(VECTOR, ir.Undefined)
        first = self._builder.insert_element(none, number, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
        return self._builder.shuffle_vector(first, none, zeros)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x y + z."""
        return self._builder.call(self._function(f"llvm.fma.v{WIDTH}f32", VECTOR, [VECTOR] * 3), [x, y, z])

    def total(self, x: Any) -> Any:
        """The sum of a vector's numbers."""
        function = self._function(f"llvm.vector.reduce.fadd.v{WIDTH}f32", ir.FloatType(), [ir.FloatType(), VECTOR])
        return self._builder.call(function, [ir.Constant(ir.FloatType(), -0.0), x], fastmath=("reassoc",))

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self._builder.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)


def dots(groups: int, dim: int) -> Any:
    """dots(queries [groups, dim], key [dim], scores, stride): scores[g stride] = queries[g] . key."""

    def write(builder: Any, query: Any, key: Any, scores: Any, stride: Any) -> None:
        v = Vectors(builder)
        sums: list[Any] = [None] * groups
        for i in range(0, dim, WIDTH):
            numbers = v.load(key, i)
            for g in range(groups):
                other = v.load(query, g * dim + i)
                sums[g] = builder.fmul(other, numbers) if i == 0 else v.fma(other, numbers, sums[g])
        for g in range(groups):
            builder.store(v.total(sums[g]), v.at(scores, builder.mul(stride, stride.type(g))))

    return _word(write)


def mix(groups: int, dim: int, tokens: int) -> Any:
    """mix(out [groups, dim], values [tokens, dim], weights, stride): out[g] += weights[g stride + t] values[t]."""

    def write(builder: Any, out: Any, values: Any, weights: Any, stride: Any) -> None:
        v, kind = Vectors(builder), stride.type
        spread = [
            [
                v.spread(builder.load(v.at(weights, builder.add(builder.mul(stride, kind(g)), kind(t)))))
                for t in range(tokens)
            ]
            for g in range(groups)
        ]
        for i in range(0, dim, WIDTH):
            numbers = [v.load(values, t * dim + i) for t in range(tokens)]
            for g in range(groups):
                total = v.load(out, g * dim + i)
                for t in range(tokens):
                    total = v.fma(spread[g][t], numbers[t], total)
                v.store(total, out, g * dim + i)

    return _word(write)


def tile(rows: int, add: bool) -> Any:
    """tile(a, b, c, a_row, a_step, b_step, c_row, steps): c[r c_row + j] = sum over k of a[r a_row + k a_step]
    b[k b_step + j], r < rows and j < TILE, in registers; on top of what is in c where `add`. steps >= 1."""

    @intrinsic
    def word(context: Any, a: Any, b: Any, c: Any, a_row: Any, a_step: Any, b_step: Any, c_row: Any, steps: Any) -> Any:
        def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b, c, a_row, a_step, b_step, c_row, steps = arguments
            v, kind, parts = Vectors(builder), steps.type, TILE // WIDTH
            zero = ir.Constant(VECTOR, [ir.Constant(ir.FloatType(), 0.0)] * WIDTH)
            targets = [v.at(c, builder.mul(c_row, kind(r))) for r in range(rows)]
            sums = [v.load(targets[r], p * WIDTH) if add else zero for r in range(rows) for p in range(parts)]
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(kind)
            held = [builder.phi(VECTOR) for _ in sums]
            columns = v.at(b, builder.mul(k, b_step))
            across = [v.load(columns, p * WIDTH) for p in range(parts)]
            found = []
            for r in range(rows):
                where = builder.add(builder.mul(a_row, kind(r)), builder.mul(k, a_step))
                number = v.spread(builder.load(v.at(a, where)))
                found += [v.fma(number, across[p], held[r * parts + p]) for p in range(parts)]
            later = builder.add(k, kind(1))
            builder.cbranch(builder.icmp_signed("<", later, steps), loop, after)
            k.add_incoming(kind(0), before)
            k.add_incoming(later, loop)
            for phi, first, more in zip(held, sums, found, strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(more, loop)
            builder.position_at_end(after)
            for r in range(rows):
                for p in range(parts):
                    v.store(found[r * parts + p], targets[r], p * WIDTH)
            return context.get_dummy_value()

        return types.void(FLOATS, FLOATS, FLOATS, *[types.int64] * 5), made

    return word


def _word(write: Callable[..., None]) -> Any:
    """What a loop can call, of three addresses of numbers and a whole number."""

    @intrinsic
    def word(context: Any, first: Any, second: Any, third: Any, stride: Any) -> Any:
        def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write(builder, *arguments)
            return context.get_dummy_value()

        return types.void(FLOATS, FLOATS, FLOATS, types.int64), made

    return word
