"""Scheduling and the cache, without a model: what is admitted, what is reused, what is forgotten."""

from __future__ import annotations

import itertools

import torch

from honed.engine.cache import BLOCK, Blocks, Rows, Shape
from honed.engine.scheduler import Scheduler, Sequence
from honed.types import Sampling

SHAPE = Shape(num_layers=1, kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu")
_order = itertools.count()


def scheduler(slots: int = 4, capacity: int = 1024, prefill_chunk: int = 64, context: int = 512) -> Scheduler:
    return Scheduler(Rows(SHAPE, slots, context), Blocks(SHAPE, capacity), slots, capacity, prefill_chunk)


def sequence(tokens: list[int], max_tokens: int = 16, priority: int = 0) -> Sequence:
    return Sequence(
        id=str(next(_order)),
        tokens=tokens,
        version="",
        sampling=Sampling(max_tokens=max_tokens),
        sink=lambda item: None,
        order=(priority, next(_order)),
    )


def step(made: Scheduler) -> list[tuple[Sequence, int, int]]:
    """One step without a model: every piece that samples yields token 1."""
    pieces = made.plan()
    made.advance(pieces)
    for piece in pieces:
        if piece.samples:
            piece.sequence.tokens.append(1)
    return [(piece.sequence, piece.start, piece.end) for piece in pieces]


def test_a_prompt_is_read_in_chunks_beside_the_ones_that_decode() -> None:
    made = scheduler(prefill_chunk=10)
    short, long = sequence([5] * 4), sequence([6] * 25)
    made.add(short)
    assert step(made) == [(short, 0, 4)]
    made.add(long)
    assert step(made) == [(short, 4, 5), (long, 0, 10)]
    assert step(made) == [(short, 5, 6), (long, 10, 20)]
    assert step(made) == [(short, 6, 7), (long, 20, 25)]
    assert step(made) == [(short, 7, 8), (long, 25, 26)]


def test_admission_reserves_all_that_a_request_may_reach() -> None:
    made = scheduler(capacity=100)
    first, second, third = (sequence([n] * 30, max_tokens=20) for n in range(3))
    for item in (first, second, third):
        made.add(item)
    step(made)
    assert made.running == [first, second]
    assert made.reserved == 100
    made.remove(first)
    step(made)
    assert made.running == [second, third]


def test_slots_bound_what_runs() -> None:
    made = scheduler(slots=2)
    for n in range(5):
        made.add(sequence([n]))
    step(made)
    assert (len(made.running), len(made.waiting)) == (2, 3)


def test_identical_prompts_are_read_once() -> None:
    made = scheduler(prefill_chunk=16)
    prompt = list(range(40))
    group = [sequence(list(prompt)) for _ in range(3)]
    for item in group:
        made.add(item)
    assert step(made) == [(group[0], 0, 16)]
    assert step(made) == [(group[0], 16, 32)]
    assert step(made) == [(group[0], 32, 40), (group[1], 32, 40)]  # the budget of 16 ends there
    assert group[1].cached == group[2].cached == 32


def test_a_reader_that_is_cancelled_does_not_strand_those_that_wait_for_it() -> None:
    made = scheduler(prefill_chunk=16)
    prompt = list(range(40))
    group = [sequence(list(prompt)) for _ in range(2)]
    for item in group:
        made.add(item)
    step(made)
    made.remove(group[0])
    assert step(made) == [(group[1], 16, 32)]


def test_rows_stay_dense_and_what_moves_is_told() -> None:
    rows = Rows(SHAPE, 4, 512)
    owners = [sequence([n]) for n in range(3)]
    for n, owner in enumerate(owners):
        owner.bank, owner.row = rows.take(owner, 17)
        owner.computed = 1
        owner.bank.data[:, :, owner.row, :, 0] = float(n)
    bank = owners[0].bank
    assert bank is not None
    assert rows.give_back(bank, 0) == (owners[2], 0)
    assert bank.data[0, 0, 0, 0, 0].tolist() == [2.0] * 4
    assert rows.give_back(bank, 1) is None


def test_rows_are_as_long_as_needed() -> None:
    """Whole blocks of 16, the last one too."""
    rows = Rows(SHAPE, 4, 600)
    assert [rows.take(sequence([1]), n)[0].length for n in (1, 256, 257, 512, 513, 600)] == [
        256,
        256,
        512,
        512,
        608,
        608,
    ]


def filled(rows: Rows, tokens: list[int]) -> Sequence:
    """A sequence whose keys say which token they belong to."""
    made = sequence(tokens)
    made.bank, made.row = rows.take(made, len(tokens))
    made.bank.data[:, :, made.row, :, : len(tokens)] = torch.tensor(tokens, dtype=torch.float32)[:, None]
    return made


def test_kept_blocks_come_back_as_they_were() -> None:
    rows, blocks = Rows(SHAPE, 4, 512), Blocks(SHAPE, 1024)
    tokens = list(range(50))
    source, target = filled(rows, tokens), filled(rows, [0] * 50)
    assert source.bank is not None
    blocks.keep("a", tokens, source.bank, source.row, 1024)
    found = blocks.find("a", tokens[:40] + [999] * 10)
    assert len(found) == 2
    blocks.load(found, source.bank, target.row)
    assert source.bank.data[0, 1, target.row, 0, :48, 0].tolist() == [*range(32), *[0] * 16]


def test_blocks_never_cross_adapters() -> None:
    rows, blocks = Rows(SHAPE, 4, 512), Blocks(SHAPE, 1024)
    source = filled(rows, [1] * 64)
    assert source.bank is not None
    blocks.keep("a", [1] * 64, source.bank, source.row, 1024)
    assert blocks.find("b", [1] * 64) == []
    blocks.keep("b", [1] * 64, source.bank, source.row, 1024)
    blocks.forget("a")
    assert blocks.find("a", [1] * 64) == []
    assert len(blocks.find("b", [1] * 64)) == 4


def test_the_least_recently_used_leaves_go_first_and_a_parent_outlives_its_children() -> None:
    rows, blocks = Rows(SHAPE, 8, 512), Blocks(SHAPE, 1024)
    common = [7] * BLOCK
    branches = [common + [n] * BLOCK for n in range(3)]
    for tokens in branches:
        source = filled(rows, tokens)
        assert source.bank is not None
        blocks.keep("", tokens, source.bank, source.row, 1024)
    blocks.find("", branches[0])
    blocks.shrink(3 * BLOCK)
    assert [len(blocks.find("", tokens)) for tokens in branches] == [2, 1, 2]
    blocks.shrink(BLOCK)
    assert [len(blocks.find("", tokens)) for tokens in branches] == [1, 1, 1]
    blocks.shrink(0)
    assert blocks.num_tokens == 0


def test_what_is_kept_and_what_runs_share_one_capacity() -> None:
    made = scheduler(capacity=128)
    first = sequence(list(range(60)), max_tokens=4)
    made.add(first)
    step(made)
    made.remove(first)
    assert made.used == 48
    large = sequence([99] * 100, max_tokens=20)
    made.add(large)
    step(made)
    assert made.used <= 128
    assert made.running == [large]


def test_keeping_within_a_limit_drops_the_rest() -> None:
    rows, blocks = Rows(SHAPE, 4, 512), Blocks(SHAPE, 1024)
    source = filled(rows, list(range(100)))
    assert source.bank is not None
    blocks.keep("", list(range(100)), source.bank, source.row, 40)
    assert blocks.num_tokens == 32
    assert len(blocks.find("", list(range(100)))) == 2
