"""Where keys and values live: rows for running sequences, blocks for what may be reused.

A running sequence owns one row of a bank whose rows are just long enough; rows are kept dense (the last one moves into
a hole), so that a decode step reads views and copies nothing. Finished or prefilled tokens are kept as blocks of 16 in
a tree keyed by (adapter, exact token ids), least recently used first to go. Copying a block costs about 1/100 of
computing it, so blocks are copied into rows, and need no reference counts. Cached blocks never cross adapters.

Both know how many tokens' memory they hold, rows and blocks that were freed among them, and can give back what is free
(model/bank.py).
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from honed.model.bank import Bank, Room

BLOCK = 16
SHORTEST_ROW = 256


@dataclass(frozen=True)
class Shape:
    """Of one token's keys and values."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str

    @property
    def num_bytes(self) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, device: str) -> Shape:
        """From a transformers config."""
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=device,
        )


class Rows:
    """Banks by row length (256, 512, ... up to the context), each with its rows dense from 0.

    Owners have `computed`, their tokens so far, and `need`, the most they can come to.
    """

    def __init__(self, shape: Shape, num_rows: int, context: int) -> None:
        self._shape, self._num_rows = shape, num_rows
        self._lengths = row_lengths(context)
        self._banks: dict[int, Bank] = {}
        self.owners: dict[int, list[Any]] = {length: [] for length in self._lengths}
        # by row, tokens whose memory it may have
        self._held: dict[int, list[int]] = {length: [0] * num_rows for length in self._lengths}

    @property
    def held(self) -> int:
        """Tokens whose memory is taken, or may be before the requests that run have ended."""
        return sum(sum(held) for held in self._held.values())

    def take(self, owner: Any, num_tokens: int) -> tuple[Bank, int]:
        """A row that can hold `num_tokens`. The caller sees to it that at most `num_rows` are taken."""
        length = next(length for length in self._lengths if length >= num_tokens)
        owners = self.owners[length]
        assert len(owners) < self._num_rows, "more rows taken than there are slots"
        owners.append(owner)
        row = len(owners) - 1
        self._held[length][row] = max(self._held[length][row], self._pages(num_tokens))
        return self.bank(length), row

    def bank(self, length: int) -> Bank:
        """The bank of that row length, made when first needed."""
        if length not in self._banks:
            s = self._shape
            self._banks[length] = Bank(s.num_layers, self._num_rows, s.kv_heads, length, s.head_dim, s.dtype, s.device)
        return self._banks[length]

    def give_back(self, bank: Bank, row: int) -> tuple[Any, int] | None:
        """Frees a row. Returns (owner, row) of the one moved into the hole, if any: its first `computed` tokens."""
        owners, held = self.owners[bank.length], self._held[bank.length]
        last = owners.pop()
        if row == len(owners):
            return None
        bank.move(len(owners), row, last.computed)
        owners[row] = last
        held[row] = max(held[row], self._pages(last.need))
        return last, row

    def release(self) -> None:
        """Gives back the memory of free rows, and of what running ones will not come to."""
        for length, bank in self._banks.items():
            owners, held = self.owners[length], self._held[length]
            if not bank.returns:
                continue
            if any(held[len(owners) :]):
                bank.release_rows(len(owners))
                held[len(owners) :] = [0] * (self._num_rows - len(owners))
            for row, owner in enumerate(owners):
                need = self._pages(owner.need)
                if held[row] > need:
                    bank.release_tokens(row, need)
                    held[row] = need

    def _pages(self, num_tokens: int) -> int:
        """Rounded up to whole pages of memory."""
        unit = max(BLOCK, mmap.PAGESIZE // (self._shape.head_dim * self._shape.dtype.itemsize))
        return -(-num_tokens // unit) * unit


@dataclass
class _Block:
    index: int
    parent: int
    key: tuple[int, tuple[int, ...]]
    id: int


class Blocks:
    """The tree of kept blocks. `limit` is the most tokens it may hold; `shrink` makes room for running requests."""

    def __init__(self, shape: Shape, limit: int) -> None:
        self._shape = shape
        self._count = max(limit // BLOCK, 1)
        self._room: Room | None = None
        self._held: set[int] = set()  # blocks whose memory is taken
        self._free = list(range(self._count))
        # Oldest first. A path is touched from its leaf up, so the oldest entry never has a child.
        self._nodes: OrderedDict[tuple[int, tuple[int, ...]], _Block] = OrderedDict()
        self._next_id = 1
        self._roots: dict[str, int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens kept."""
        return len(self._nodes) * BLOCK

    @property
    def held(self) -> int:
        """Tokens whose memory is taken."""
        return len(self._held) * BLOCK

    def release(self) -> None:
        """Gives back the memory of blocks that were freed."""
        if self._room is None or not self._room.returns:
            return
        for index in self._held.intersection(self._free):
            self._room.release(self._room.data[index])
            self._held.remove(index)

    def find(self, adapter: str, tokens: Sequence[int]) -> list[int]:
        """Indices of the longest kept chain of blocks that `tokens` begins with; marks it as used."""
        chain = self._chain(adapter, tokens)
        self._touch(chain)
        return [node.index for node in chain]

    def load(self, indices: Sequence[int], bank: Bank, row: int) -> None:
        """Copies blocks to the beginning of a row."""
        if not indices:
            return
        assert self._room is not None
        data = self._room.data
        picked = data[torch.as_tensor(indices, device=data.device)]
        n, layers, two, heads, _, dim = picked.shape
        whole = picked.permute(1, 2, 3, 0, 4, 5).reshape(layers, two, heads, n * BLOCK, dim)
        bank.data[:, :, row, :, : n * BLOCK] = whole

    def keep(self, adapter: str, tokens: Sequence[int], bank: Bank, row: int, limit_tokens: int) -> None:
        """Keeps the whole blocks of a row that holds `tokens`, within `limit_tokens` held in all."""
        limit_tokens = min(limit_tokens, self._count * BLOCK)
        chain = self._chain(adapter, tokens)
        self._touch(chain)
        start, parent = len(chain), chain[-1].id if chain else self._root(adapter)
        made: list[_Block] = []
        for number in range(start, len(tokens) // BLOCK):
            if (len(self._nodes) + 1) * BLOCK > limit_tokens and not self._evict({node.id for node in (*chain, *made)}):
                break
            if not self._free:
                break
            key = (parent, tuple(tokens[number * BLOCK : (number + 1) * BLOCK]))
            node = _Block(self._free.pop(), parent, key, self._next_id)
            self._next_id += 1
            self._nodes[key], parent = node, node.id
            made.append(node)
        if made:
            self._store([node.index for node in made], bank, row, start)
            self._touch([*chain, *made])

    def shrink(self, limit_tokens: int) -> None:
        """Forgets the least recently used blocks until at most `limit_tokens` are held."""
        while self._nodes and self.num_tokens > limit_tokens:
            self._evict(set())

    def forget(self, adapter: str) -> None:
        """Forgets every block of an adapter."""
        root = self._roots.pop(adapter, None)
        if root is None:
            return
        gone = {root}
        # Children are older than their parents in the order, so walk from the youngest.
        for node in list(reversed(self._nodes.values())):
            if node.parent in gone:
                gone.add(node.id)
                self._remove(node)

    def _chain(self, adapter: str, tokens: Sequence[int]) -> list[_Block]:
        chain: list[_Block] = []
        parent = self._root(adapter)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            node = self._nodes.get((parent, tuple(tokens[start : start + BLOCK])))
            if node is None:
                break
            chain.append(node)
            parent = node.id
        return chain

    def _root(self, adapter: str) -> int:
        if adapter not in self._roots:
            self._roots[adapter] = self._next_id
            self._next_id += 1
        return self._roots[adapter]

    def _touch(self, chain: Sequence[_Block]) -> None:
        for node in reversed(chain):
            self._nodes.move_to_end(node.key)

    def _evict(self, spare: set[int]) -> bool:
        node = next(iter(self._nodes.values()), None)
        if node is None or node.id in spare:
            return False
        self._remove(node)
        return True

    def _remove(self, node: _Block) -> None:
        del self._nodes[node.key]
        self._free.append(node.index)

    def _store(self, indices: list[int], bank: Bank, row: int, first: int) -> None:
        s = self._shape
        if self._room is None:
            shape = (self._count, s.num_layers, 2, s.kv_heads, BLOCK, s.head_dim)
            self._room = Room(shape, s.dtype, s.device)
        data = self._room.data
        part = bank.data[:, :, row, :, first * BLOCK : (first + len(indices)) * BLOCK]
        split = part.unflatten(3, (len(indices), BLOCK)).permute(3, 0, 1, 2, 4, 5)
        data[torch.as_tensor(indices, device=data.device)] = split
        self._held.update(indices)


def row_lengths(context: int) -> list[int]:
    """Lengths of rows: 256, 512, ... up to the context, whole blocks."""
    lengths, length = [], SHORTEST_ROW
    while length < context:
        lengths.append(length)
        length *= 2
    return [*lengths, -(-context // BLOCK) * BLOCK]
