"""The memory of keys and values: taken page by page as it is written, and given back while the rest is in use."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

RETURNS = sys.platform.startswith("linux")
"""Whether this system takes pages back and reads them as zeros from then on."""


class Room:
    """A tensor `data` of zeros. On a CPU a page of memory is taken when first written; torch.zeros would take all."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str) -> None:
        self._map: mmap.mmap | None = None
        if device != "cpu":
            self.data = torch.zeros(*shape, dtype=dtype, device=device)
            return
        size = max(1, math.prod(shape) * dtype.itemsize)
        # pages of its own, not of a file in memory, which would keep them
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if RETURNS else {}
        self._map = mmap.mmap(-1, size, **private)
        if RETURNS:
            self._map.madvise(mmap.MADV_NOHUGEPAGE)  # a large page comes back only whole
        self.data = torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape)).view(*shape)

    @property
    def returns(self) -> bool:
        """Whether `release` does anything."""
        return self._map is not None and RETURNS

    def release(self, part: Tensor) -> None:
        """Gives back the pages that lie wholly in `part`, a contiguous view of `data`; they are zeros from then on."""
        if self._map is None or not RETURNS:
            return
        assert part.is_contiguous(), "what is not in one piece has no pages of its own"
        first = part.data_ptr() - self.data.data_ptr()
        assert 0 <= first < self.data.nbytes, "a copy is not a view"
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (first + part.numel() * part.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


class Bank:
    """Keys and values of up to `num_rows` sequences of up to `length` tokens.

    data [layers, 2, rows, kv_heads, length, head_dim]: zeros at first, because what is masked is still multiplied, and
    must be finite.
    """

    def __init__(
        self, num_layers: int, num_rows: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        self.num_rows, self.length = num_rows, length
        self._room = Room((num_layers, 2, num_rows, kv_heads, length, head_dim), dtype, device)
        self.data = self._room.data

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [rows, kv_heads, length, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    @property
    def returns(self) -> bool:
        """Whether what is released is free for others."""
        return self._room.returns

    def clear(self, row: int, num_tokens: int) -> None:
        """Zeroes the first `num_tokens` of a row, after values that were not finite."""
        self.data[:, :, row, :, :num_tokens] = 0

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` of a row over another row."""
        self.data[:, :, target, :, :num_tokens] = self.data[:, :, source, :, :num_tokens]

    def release_rows(self, first: int) -> None:
        """Gives back the memory of the rows from `first` on."""
        for part in self.data.flatten(0, 1):
            self._room.release(part[first:])

    def release_tokens(self, row: int, first: int) -> None:
        """Gives back the memory of a row's tokens from `first` on."""
        for part in self.data.flatten(0, 1):
            for head in part[row]:
                self._room.release(head[first:])
