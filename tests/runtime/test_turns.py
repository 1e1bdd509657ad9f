import asyncio

import pytest

from honed.runtime.turns import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_run_together_and_a_pass_alone() -> None:
    turns, events, release = Turns(), [], asyncio.Event()

    async def generate(name: str) -> None:
        async with turns.generating():
            events.append(f"{name} in")
            await release.wait()
            events.append(f"{name} out")

    async def train() -> None:
        async with turns.training():
            events.append("train in")
            await settle()
            events.append("train out")

    running = [asyncio.create_task(generate("a")), asyncio.create_task(generate("b"))]
    await settle()
    running.append(asyncio.create_task(train()))
    await settle()
    running.append(asyncio.create_task(generate("late")))
    await settle()
    assert events == ["a in", "b in"], "the pass waits for both, and who comes after it waits for the pass"
    release.set()
    await asyncio.gather(*running)
    assert events == ["a in", "b in", "a out", "b out", "train in", "train out", "late in", "late out"]


async def test_passes_run_one_at_a_time() -> None:
    turns, inside = Turns(), 0

    async def train() -> None:
        nonlocal inside
        async with turns.training():
            inside += 1
            assert inside == 1
            await settle()
            inside -= 1

    await asyncio.gather(*(train() for _ in range(5)))


async def test_a_cancelled_wait_and_a_failure_free_the_turn() -> None:
    turns = Turns()
    async with turns.generating():
        waiting = asyncio.create_task(turns.training().__aenter__())
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(5), turns.generating():
            pass
    with pytest.raises(RuntimeError):
        async with turns.training():
            raise RuntimeError
    async with asyncio.timeout(5), turns.generating():
        pass
