"""transformers: `generate` on a left-padded batch, or its continuous batching where `mode` is "continuous"."""

from __future__ import annotations

import time
from typing import Any

import answer
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

OPTIONS = answer.options()


def main() -> None:
    torch.set_num_threads(OPTIONS["threads"])
    started = time.perf_counter()
    attention = "sdpa" if OPTIONS["mode"] == "generate" else "paged|sdpa"
    model = AutoModelForCausalLM.from_pretrained(OPTIONS["model"], dtype=torch.float32, attn_implementation=attention)
    model.eval()
    loaded = time.perf_counter() - started
    sampling: dict[str, Any] = {"do_sample": OPTIONS["temperature"] > 0, "pad_token_id": 0, "eos_token_id": None}
    if OPTIONS["temperature"] > 0:
        sampling |= {"temperature": OPTIONS["temperature"], "top_k": 0, "top_p": 1.0}

    def padded(requests: list[Any]) -> dict[str, Any]:
        """One batch as long as its longest request, which is what `generate` offers."""
        longest, new = max(len(ids) for ids, _ in requests), max(new for _, new in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (own, _) in enumerate(requests):
            ids[row, longest - len(own) :] = torch.tensor(own)
            mask[row, longest - len(own) :] = 1
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **sampling)
        return {"tokens": sum(new for _, new in requests)}

    def continuous(requests: list[Any]) -> dict[str, Any]:
        config = GenerationConfig(max_new_tokens=max(new for _, new in requests), **sampling)
        found = model.generate_batch(inputs=[ids for ids, _ in requests], generation_config=config, progress_bar=False)
        return {"tokens": sum(len(each.generated_tokens) for each in found.values())}

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        done = (padded if OPTIONS["mode"] == "generate" else continuous)(asked["requests"])
        seconds = time.perf_counter() - began
        return {**done, "seconds": round(seconds, 3), "tok_s": round(done["tokens"] / seconds, 2)}

    answer.serve({"version": transformers.__version__, "torch": torch.__version__, "load_s": round(loaded, 2)}, job)


main()
