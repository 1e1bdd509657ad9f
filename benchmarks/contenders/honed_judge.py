"""Judges adapters, whoever trained them: what attempts at held-out support requests earn, and how many are right."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import answer
import rewards
from safetensors.torch import load_file
from tokenizers import Tokenizer

import honed
from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.model.load import load
from honed.protocols import Request
from honed.sync.memory import MemoryChannel
from honed.types import Sampling

OPTIONS = answer.options()


def main() -> None:
    started = time.perf_counter()
    channel, loop = MemoryChannel(), asyncio.new_event_loop()
    settings = EngineSettings(slots=64, capacity=64 * 1024, context=1024, threads=OPTIONS["threads"])
    engine = LocalEngine(load(OPTIONS["model"]), settings, channel)
    tokenizer = Tokenizer.from_file(f"{OPTIONS['model']}/tokenizer.json")

    async def attempt(asked: dict[str, Any], number: int, again: int, version: str) -> float:
        sampling = Sampling(
            temperature=1.0, max_tokens=asked["new"], seed=number * asked["attempts"] + again,
            stop_ids=tuple(asked["stop"]),
        )  # fmt: skip
        ids: list[int] = []
        request = Request(
            id=f"{version}-{number}-{again}", ids=tuple(asked["prompts"][number]), sampling=sampling, version=version
        )
        async for chunk in engine.submit(request):
            ids += chunk.ids
        return rewards.graded_call(asked["cases"][number], tokenizer.decode(ids, skip_special_tokens=False))

    async def judge(asked: dict[str, Any]) -> list[float]:
        version = ""
        if asked["adapter"]:
            folder, version = Path(asked["adapter"]), asked["adapter"]
            channel.config = json.loads((folder / "adapter_config.json").read_text())
            await channel.publish(version, load_file(folder / "adapter_model.safetensors"))
        found = await asyncio.gather(
            *[
                attempt(asked, number, again, version)
                for number in range(len(asked["prompts"]))
                for again in range(asked["attempts"])
            ]
        )
        if version:
            await engine.unload(version)
        return found

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        found = loop.run_until_complete(judge(asked))
        return {"reward": sum(found) / len(found), "success": found.count(1.0) / len(found)}

    answer.serve({"version": honed.__version__, "load_s": round(time.perf_counter() - started, 2)}, job)


main()
