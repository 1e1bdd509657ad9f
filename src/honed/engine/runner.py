"""Runs one step of a serving model: the pieces laid out flat, one forward pass, the head on the rows that matter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from honed.engine import sampler
from honed.engine.cache import BLOCK
from honed.engine.scheduler import Piece
from honed.model import attention
from honed.model.attention import TILE, Decode, Flat, Prefill, Tiles, Write
from honed.model.bank import Bank
from honed.model.dense import Dense
from honed.model.linear import Lane, Serving, serving_copy
from honed.types import Precision

SHARED = 128
"""Tokens that all rows of a bank begin with, from which on kernels that read a row at a time are the slower way."""


class Runner:
    """Turns pieces into logits. Sets the model's attention implementation once, on its own copy of the config."""

    def __init__(self, serving: Serving, config: Any, dtype: torch.dtype, device: str, *, tiled: bool = False) -> None:
        self._serving, self._dtype, self._device, self._tiled = serving, dtype, device, tiled
        self._dense = Dense.of(serving, config)
        heads = config.num_attention_heads
        self._groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
        config_of_copy: Any = serving.model.config
        config_of_copy._attn_implementation = attention.NAME

    @torch.inference_mode()
    def run(self, pieces: list[Piece]) -> tuple[list[Piece], Tensor]:
        """Computes the pieces (stretches of one adapter side by side).

        Returns the pieces that sample and their logits [n, vocabulary], in order. Scoring pieces get theirs here.
        """
        ids: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        for piece in pieces:
            starts.append(len(ids))
            ids += piece.sequence.tokens[piece.start : piece.end]
            positions += range(piece.start, piece.end)
        flat = self._flat(pieces, starts)
        self._serving.lanes.lanes = _lanes(pieces, starts)
        wanted = [i for piece, start in zip(pieces, starts, strict=True) for i in _wanted(piece, start)]
        logits = self._logits(self._ints(ids), self._ints(positions), self._ints(wanted), flat)
        return self._distribute(pieces, logits)

    def _logits(self, ids: Tensor, positions: Tensor, wanted: Tensor, flat: Flat) -> Tensor:
        if self._dense is not None:
            return self._dense(ids, positions, wanted, flat)
        found = self._serving.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted, honed=flat
        )
        logits: Tensor = found.logits[0]
        return logits

    def _distribute(self, pieces: list[Piece], logits: Tensor) -> tuple[list[Piece], Tensor]:
        sampling, kept, at = [], [], 0
        for piece in pieces:
            if piece.samples:
                sampling.append(piece)
                kept.append(at)
                at += 1
            elif piece.sequence.scores is not None:
                targets = piece.sequence.tokens[piece.start + 1 : piece.end + 1]
                wanted, step = self._ints(targets), 1 if self._tiled else max(1, len(targets))
                for first in range(0, len(targets), step):
                    rows = slice(at + first, at + first + step)
                    piece.sequence.scores += sampler.scores(
                        logits[rows], wanted[first : first + step], piece.sequence.sampling.temperature
                    )
                at += len(targets)
        return sampling, logits if len(kept) == len(logits) else logits[self._ints(kept)]

    def _flat(self, pieces: list[Piece], starts: list[int]) -> Flat:
        flat = Flat()
        by_bank: dict[Bank, list[tuple[Piece, int]]] = defaultdict(list)
        for piece, start in zip(pieces, starts, strict=True):
            assert piece.sequence.bank is not None, "a piece without a row"
            by_bank[piece.sequence.bank].append((piece, start))
        if self._dense is not None and self._dense.has_kernels:
            self._lay_out_step(self._dense, flat, by_bank)
            return flat
        for bank, members in by_bank.items():
            flat.writes.append(self._write(bank, members, starts[-1] + pieces[-1].count))
            if self._tiled:
                flat.tiles.extend(self._tiles(bank, members))
                continue
            decoding = [member for member in members if member[0].count == 1]
            if decoding:
                flat.decodes.append(self._decode(bank, decoding, _shared_prefix(decoding)))
            for piece, start in members:
                if piece.count > 1:
                    place = (bank, piece.sequence.row, start, start + piece.count, piece.end)
                    flat.prefills.append(Prefill(*place, self._groups, self._dtype, self._device))
        return flat

    def _lay_out_step(self, dense: Dense, flat: Flat, by_bank: dict[Bank, list[tuple[Piece, int]]]) -> None:
        """Each token attends alone, but for rows with much in common: that they read together."""
        every, alone = [], []
        for bank, members in by_bank.items():
            decoding = [member for member in members if member[0].count == 1]
            shared = 0 if self._tiled else _shared_prefix(decoding)
            if shared >= SHARED:
                flat.decodes.append(self._decode(bank, decoding, shared))
            for piece, start in members:
                every.append((bank, piece.sequence.row, start, piece.start, piece.end))
                if shared < SHARED or piece.count > 1:
                    alone.append(every[-1])
        flat.step = dense.step(every, alone)

    def _write(self, bank: Bank, members: list[tuple[Piece, int]], num_tokens: int) -> Write:
        index = [start + i for piece, start in members for i in range(piece.count)]
        rows = [piece.sequence.row for piece, _ in members for _ in range(piece.count)]
        positions = [i for piece, _ in members for i in range(piece.start, piece.end)]
        every = len(index) == num_tokens  # in order, for members are
        return Write(bank, None if every else self._ints(index), self._ints(rows), self._ints(positions))

    def _tiles(self, bank: Bank, members: list[tuple[Piece, int]]) -> list[Tiles]:
        """The members' stretches, those of one number side by side."""
        stretches: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        for piece, start in members:
            for number in range(piece.start // TILE, (piece.end - 1) // TILE + 1):
                first = max(piece.start, number * TILE)
                last = min(piece.end, (number + 1) * TILE)
                stretches[number].append((piece.sequence.row, start + first - piece.start, first % TILE, last - first))
        found = []
        for number, stretch in stretches.items():
            gather = [[flat] * TILE for _, flat, _, _ in stretch]
            index: list[int] = []
            which: list[int] = []
            for place, (_, flat, offset, count) in enumerate(stretch):
                gather[place][offset : offset + count] = range(flat, flat + count)
                index += range(flat, flat + count)
                which += range(place * TILE + offset, place * TILE + offset + count)
            rows = self._ints([row for row, _, _, _ in stretch])
            places = torch.tensor(gather, dtype=torch.long, device=self._device)
            found.append(Tiles(bank, number, rows, places, self._ints(index), self._ints(which), self._dtype))
        return found

    def _decode(self, bank: Bank, members: list[tuple[Piece, int]], shared: int) -> Decode:
        rows = [piece.sequence.row for piece, _ in members]
        num_rows = max(rows) + 1
        gather, lengths = [0] * num_rows, [max(piece.end for piece, _ in members)] * num_rows
        for piece, start in members:
            gather[piece.sequence.row], lengths[piece.sequence.row] = start, piece.end
        in_order = gather == list(range(gather[0], gather[0] + len(members)))
        return Decode(
            bank=bank,
            gather=self._ints(gather),
            rows=self._ints(rows),
            index=self._ints([start for _, start in members]),
            lengths=lengths,
            dtype=self._dtype,
            shared=shared,
            shared_row=rows[0],
            start=gather[0] if in_order else None,
        )

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


@dataclass(frozen=True)
class Servings:
    """How a model is laid out for serving: in which precisions, in tiles or not. `largest`: see int8.calibrate."""

    precisions: tuple[Precision, ...]
    config: Any
    dtype: torch.dtype
    device: str
    tiled: bool
    largest: Mapping[str, Tensor] | None

    def copies(self, model: nn.Module) -> dict[Precision, Serving]:
        """A copy of the model for each precision."""
        return {
            precision: serving_copy(model, tiled=self.tiled, largest=self.largest if precision == "int8" else None)
            for precision in self.precisions
        }

    def runners(self, model: nn.Module) -> dict[Precision, Runner]:
        """What runs them."""
        return {precision: self.runner(copy) for precision, copy in self.copies(model).items()}

    def runner(self, serving: Serving) -> Runner:
        """What runs one of them."""
        return Runner(serving, self.config, self.dtype, self.device, tiled=self.tiled)


def _wanted(piece: Piece, start: int) -> range:
    """Flat rows whose logits are needed."""
    if piece.samples:
        return range(start + piece.count - 1, start + piece.count)
    if piece.sequence.scores is None:
        return range(0)
    return range(start, start + min(piece.end, len(piece.sequence.tokens) - 1) - piece.start)


def _lanes(pieces: list[Piece], starts: list[int]) -> list[Lane]:
    lanes: list[Lane] = []
    for piece, start in zip(pieces, starts, strict=True):
        adapter = piece.sequence.adapter
        if adapter is None:
            continue
        if lanes and lanes[-1].adapter is adapter and lanes[-1].end == start:
            lanes[-1] = Lane(lanes[-1].start, start + piece.count, adapter)
        else:
            lanes.append(Lane(start, start + piece.count, adapter))
    return lanes


def _shared_prefix(members: list[tuple[Piece, int]]) -> int:
    """Tokens (whole blocks) that every piece's sequence begins with, the newest token of each left out."""
    if len(members) < 2:
        return 0
    pieces = [piece for piece, _ in members]
    first = pieces[0].sequence
    if any(piece.sequence.adapter is not first.adapter for piece in pieces):
        return 0
    common = min(piece.start for piece in pieces)
    for piece in pieces[1:]:
        common = _agree(first.tokens, piece.sequence.tokens, common)
    return common // BLOCK * BLOCK


def _agree(a: list[int], b: list[int], limit: int) -> int:
    """Length of the common beginning of two lists, at most `limit` (by halving: slices compare at C speed)."""
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
