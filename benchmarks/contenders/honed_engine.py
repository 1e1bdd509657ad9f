"""honed's local engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import answer

import honed
from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.model.load import load
from honed.protocols import Request
from honed.types import Sampling

OPTIONS = answer.options()


def main() -> None:
    started = time.perf_counter()
    settings = EngineSettings(
        slots=128, capacity=80_000, context=2048, prefill_chunk=512, threads=OPTIONS["threads"],
        precision=OPTIONS["precision"], deterministic=OPTIONS.get("deterministic", False),
    )  # fmt: skip
    engine = LocalEngine(load(OPTIONS["model"]), settings)
    loaded = time.perf_counter() - started
    loop = asyncio.new_event_loop()

    async def one(number: int, ids: list[int], new: int) -> tuple[int, float]:
        sampling = Sampling(temperature=OPTIONS["temperature"], max_tokens=new, seed=number)
        count, first = 0, 0.0
        async for chunk in engine.submit(
            Request(id=f"r{number}-{time.perf_counter_ns()}", ids=tuple(ids), sampling=sampling)
        ):
            first = first or time.perf_counter()
            count += len(chunk.ids)
        return count, first

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        async def run() -> list[tuple[int, float]]:
            return await asyncio.gather(*[one(n, ids, new) for n, (ids, new) in enumerate(asked["requests"])])

        began = time.perf_counter()
        counts = loop.run_until_complete(run())
        seconds = time.perf_counter() - began
        tokens = sum(count for count, _ in counts)
        return {"tokens": tokens, "seconds": round(seconds, 3), "tok_s": round(tokens / seconds, 2)}

    answer.serve({"version": honed.__version__, "load_s": round(loaded, 2)}, job)


main()
