"""transformers: `generate` on left-padded batches of requests of like length, or its continuous batching."""

from __future__ import annotations

import time
from typing import Any

import answer
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

OPTIONS = answer.options()


def main() -> None:
    torch.set_num_threads(OPTIONS["threads"])
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(OPTIONS["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    loaded = time.perf_counter() - started
    sampling: dict[str, Any] = {"do_sample": OPTIONS["temperature"] > 0, "pad_token_id": 0, "eos_token_id": -1}
    if OPTIONS["temperature"] > 0:
        sampling |= {"temperature": OPTIONS["temperature"], "top_k": 0, "top_p": 1.0}

    def padded(requests: list[Any]) -> dict[str, Any]:
        """Batches of up to 64, longest prompts first where they differ: each as long as its longest request."""
        alike = len({(len(ids), new) for ids, new in requests}) == 1
        ordered = requests if alike else sorted(requests, key=lambda each: (-each[1], -len(each[0])))
        size = len(requests) if alike else 64
        for start in range(0, len(ordered), size):
            one_batch(ordered[start : start + size])
        return {"tokens": sum(new for _, new in requests)}

    def one_batch(requests: list[Any]) -> None:
        longest, new = max(len(ids) for ids, _ in requests), max(new for _, new in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (own, _) in enumerate(requests):
            ids[row, longest - len(own) :] = torch.tensor(own)
            mask[row, longest - len(own) :] = 1
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **sampling)

    def continuous(manager: Any, requests: list[Any]) -> dict[str, Any]:
        waiting = {manager.add_request(ids, max_new_tokens=new, eos_token_id=-1) for ids, new in requests}
        tokens = 0
        while waiting:
            result = manager.get_result(timeout=1.0)
            if result is None and not manager.is_running():
                raise RuntimeError("the manager ended")
            if result is not None and result.is_finished():
                waiting.discard(result.request_id)
                tokens += len(result.generated_tokens)
        return {"tokens": tokens}

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        """A manager is there before the clock starts, as in a server, and gone afterwards: its thread polls."""
        manager = None
        if OPTIONS["mode"] == "continuous":
            with torch.inference_mode():
                manager = model.init_continuous_batching(
                    generation_config=GenerationConfig(max_new_tokens=128, **sampling),
                    continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.2),  # all else has to fit
                )
                manager.start()
            continuous(manager, [[[1, 2, 3], 1]])
        began = time.perf_counter()
        done = padded(asked["requests"]) if manager is None else continuous(manager, asked["requests"])
        seconds = time.perf_counter() - began
        if manager is not None:
            manager.stop(block=True)
        return {**done, "seconds": round(seconds, 3), "tok_s": round(done["tokens"] / seconds, 2)}

    answer.serve({"version": transformers.__version__, "torch": torch.__version__, "load_s": round(loaded, 2)}, job)


main()
