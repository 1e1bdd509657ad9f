"""vLLM's CPU build, offline: its own scheduler, compiled unless `eager`, prefixes shared."""

from __future__ import annotations

import os
import time
from typing import Any

import answer

OPTIONS = answer.options()
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", str(OPTIONS["threads"]))


def main() -> None:
    started = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=OPTIONS["model"], dtype="float32", max_model_len=2048, max_num_seqs=128, enable_prefix_caching=True,
        enforce_eager=OPTIONS.get("eager", False),
    )  # fmt: skip
    loaded = time.perf_counter() - started

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids, _ in asked["requests"]]
        sampling = [
            SamplingParams(temperature=OPTIONS["temperature"], max_tokens=new, ignore_eos=True, detokenize=False)
            for _, new in asked["requests"]
        ]
        began = time.perf_counter()
        found = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(each.outputs[0].token_ids) for each in found)
        return {"tokens": tokens, "seconds": round(seconds, 3), "tok_s": round(tokens / seconds, 2)}

    answer.serve({"version": vllm.__version__, "load_s": round(loaded, 2)}, job)


if __name__ == "__main__":
    main()
