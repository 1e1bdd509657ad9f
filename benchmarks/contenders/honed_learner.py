"""honed's trainer beside its rollout engine, as the learner child holds them: GRPO steps, and training alone."""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

import answer
import msgspec
import numpy as np
import rewards
from tokenizers import Tokenizer

import honed
from honed.algo.grpo import Grpo, GrpoSettings
from honed.algo.sft import from_ids
from honed.engine.settings import EngineSettings
from honed.model.lora import LoraSettings
from honed.protocols import Request
from honed.runtime import learner
from honed.runtime.settings import LearnerSettings
from honed.train.settings import TrainSettings
from honed.types import Group, Message, Sample, Sampling, Score, Span, Trace, Turn

OPTIONS = answer.options()


class Learner:
    """The pair, its event loop, and the version that practises now."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        settings = LearnerSettings(
            blobs=tempfile.mkdtemp(), threads=OPTIONS["threads"], precision=OPTIONS.get("precision"),
            train=TrainSettings(
                method=OPTIONS["method"], threads=OPTIONS["threads"], micro_tokens=OPTIONS.get("micro_tokens", 2048)
            ),
            lora=LoraSettings(rank=16, alpha=32),
            engine=EngineSettings(
                slots=64, capacity=64 * 1024, context=1024, prefill_chunk=512, threads=OPTIONS["threads"]
            ),
        )  # fmt: skip
        self.engine, self.trainer = self.loop.run_until_complete(learner.make(OPTIONS["model"], settings))
        anchor = "trainer" if OPTIONS.get("precision") == "int8" else "sampler"
        self.grpo, self.steps = Grpo(GrpoSettings(anchor=anchor)), 0
        self.tokenizer = Tokenizer.from_file(f"{OPTIONS['model']}/tokenizer.json")

    async def attempt(self, asked: dict[str, Any], prompt: int, number: int, version: str) -> Trace:
        """One attempt at one prompt."""
        ids, cases = asked["prompts"][prompt], asked.get("cases")
        sampling = Sampling(
            temperature=1.0, max_tokens=asked["new"], precision=OPTIONS.get("precision") or "",
            stop_ids=tuple(asked.get("stop", ())), seed=1_000_003 * asked.get("seed", 0) + 1009 * self.steps + number,
        )  # fmt: skip
        output: list[int] = []
        logprobs: list[float] = []
        request = Request(id=f"r{self.steps}-{number}", ids=tuple(ids), sampling=sampling, version=version)
        async for chunk in self.engine.submit(request):
            output += chunk.ids
            logprobs += chunk.logprobs
        turn = Turn(
            id=request.id, trace=request.id, context=tuple(ids), reply=Message(role="assistant", content=""),
            output=tuple(output), logprobs=tuple(logprobs), sampling=sampling, model="bench",
            versions=(Span(version=version, count=len(output)),), finish="length", at=1.0,
        )  # fmt: skip
        said = self.tokenizer.decode(output, skip_special_tokens=False)
        score = Score(value=rewards.graded_call(cases[prompt], said) if cases else rewards.even(turn.output))
        return Trace(id=request.id, origin="rollout", line="bench", turns=(turn,), score=score, at=1.0)

    async def grpo_step(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Sample, compute advantages, update, hand the weights over."""
        began, version = time.perf_counter(), f"bench@0.{self.steps}" if self.steps else ""
        count, size = len(asked["prompts"]), asked["size"]
        traces = await asyncio.gather(
            *[self.attempt(asked, n, n * size + k, version) for n in range(count) for k in range(size)]
        )
        sampled = time.perf_counter()
        groups = [
            Group(id=f"g{n}", task=f"t{n}", traces=tuple(traces[n * size : (n + 1) * size])) for n in range(count)
        ]
        samples: list[Sample] = self.grpo(groups)
        if "old_logprobs" in self.grpo.needs:
            old = [np.asarray(scores.values, np.float32) for scores in await self.trainer.logprobs(samples)]
            samples = [msgspec.structs.replace(s, old_logprobs=lp) for s, lp in zip(samples, old, strict=True)]
        mismatch, skipped = None, ""
        if samples:  # else no group's attempts differed, and there is nothing to learn from
            result = await self.trainer.forward_backward(samples, "policy_gradient")
            await self.trainer.step(asked.get("rate", 1e-5))
            mismatch, skipped = result.metrics.get("mismatch_k3"), result.skipped
        await self.trainer.publish(f"bench@0.{self.steps + 1}")
        if self.steps:
            await self.engine.unload(version)
        self.steps += 1
        done = time.perf_counter()
        scores = [trace.score.value for trace in traces if trace.score is not None]
        return {
            "seconds": done - began,
            "sampling_s": sampled - began,
            "mismatch_k3": mismatch,
            "skipped": skipped,
            "reward": float(np.mean(scores)),
        }

    async def train(self, rows: list[Any], loss: str, rate: float) -> dict[str, Any]:
        """One update on given sequences: (ids, number of prompt tokens); `loss` is SFT's or the policy gradient's."""
        began = time.perf_counter()
        samples = from_ids([(ids, [False] * start + [True] * (len(ids) - start)) for ids, start in rows])
        if loss == "policy_gradient":
            samples = [
                msgspec.structs.replace(
                    sample,
                    advantages=np.full(len(sample.tokens), 1.0 if number % 2 else -1.0, np.float32),
                    logprobs=np.full(len(sample.tokens), -8.0, np.float32),
                )
                for number, sample in enumerate(samples)
            ]
        result = await self.trainer.forward_backward(samples, loss)
        await self.trainer.step(rate)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": result.tokens,
            "tok_s": result.tokens / seconds,
            "skipped": result.skipped,
        }

    def job(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What is asked."""
        if "save" in asked:
            snapshot = self.loop.run_until_complete(self.trainer.snapshot(asked["save"]))
            return {"folder": snapshot.uri, "digest": snapshot.digest}
        if "prompts" in asked:
            work = self.grpo_step(asked)
        else:
            work = self.train(asked["rows"], asked["loss"], asked.get("rate", 1e-5))
        found = self.loop.run_until_complete(work)
        if skipped := found.pop("skipped"):
            raise RuntimeError(f"the update was skipped: {skipped}")
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


def main() -> None:
    started = time.perf_counter()
    made = Learner()
    answer.serve({"version": honed.__version__, "load_s": round(time.perf_counter() - started, 2)}, made.job)


main()
