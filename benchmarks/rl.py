"""Seconds of a GRPO step: honed against TRL's GRPOTrainer, whole model and LoRA, short prompts and long ones.

Short: 4 prompts of 45 tokens, 8 attempts each of 32 new tokens. Long: 2 prompts of 384 tokens, 8 attempts each of 48.
The same model, number format, learning rate and reward; attempts have a fixed length, so both sample the same number of
tokens. A job is four steps; the first, which warms up, is left out. Ratios above 1 are in honed's favour.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import arena

from honed.model.load import prepare

TRL = ("torch==2.13.0", "trl==1.16.0 peft", "datasets", "msgspec numpy")
SHORT: dict[str, Any] = {"count": 4, "length": 45, "size": 8, "new": 32}
LONG: dict[str, Any] = {"count": 2, "length": 384, "size": 8, "new": 48}
STEPS = 4


def prompts(tokenizer: Any, count: int, length: int, seed: int) -> list[list[int]]:
    """Ids that read the same after they were written as text and read again, as TRL's prompts are."""
    draw = random.Random(seed)
    words = ["river", "mountain", "parcel", "order", "seven", "late", "green", "window", "please", "Berlin", "refund"]
    found = []
    for _ in range(count):
        ids = tokenizer.encode(" ".join(draw.choices(words, k=2 * length)), add_special_tokens=False).ids
        found.append(ids[:length])
    return found


def honed_step(contender: arena.Contender, job: dict[str, Any]) -> dict[str, Any] | None:
    """The median step of a job."""
    answers = [contender.ask(job) for _ in range(job["steps"])]
    if any(each is None for each in answers):
        return None
    kept = sorted(each["seconds"] for each in answers[1:] if each)
    last = answers[-1] or {}
    return {
        "seconds": kept[len(kept) // 2],
        "mismatch_k3": last.get("mismatch_k3"),
        "sampling_s": last.get("sampling_s"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    given = parser.parse_args()
    from tokenizers import Tokenizer

    model = prepare("smollm2").directory
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    options: dict[str, Any] = {"model": str(model), "threads": given.threads}
    ours, figures, peaks, hello, missing = {}, {}, {}, {}, {}
    for method in given.methods:
        pair = [
            arena.Contender(f"honed_{method}", "honed_learner.py", options={**options, "method": method}),
            arena.Contender(f"trl_{method}", "trl_grpo.py", TRL, options={**options, "method": method}),
        ]
        if method == "lora":
            pair.append(
                arena.Contender(
                    "honed_lora_int8", "honed_learner.py", options={**options, "method": method, "precision": "int8"}
                )
            )
        # one at a time: each takes a third of a machine's memory or more
        for name, shape in {"short": SHORT, "long": LONG}.items():
            for number in range(given.rounds):
                asked = prompts(tokenizer, shape["count"], shape["length"], number)
                job = {"prompts": asked, "size": shape["size"], "new": shape["new"], "steps": STEPS}
                for contender in pair:
                    try:
                        contender.start()
                        ask = honed_step if contender.name.startswith("honed") else arena.Contender.ask
                        found = ask(contender, job)
                    finally:
                        contender.close()
                    peaks[f"{contender.name}_{name}"] = contender.peak_gb
                    hello[contender.name] = contender.hello
                    if found is None:
                        missing[f"{contender.name}_{name}"] = contender.unavailable
                        contender.unavailable = ""
                        continue
                    figures.setdefault(f"{contender.name}_{name}", []).append(found)
                    print(contender.name, name, found, peaks[f"{contender.name}_{name}"], file=sys.stderr, flush=True)
    ours = {key: arena.median(found, "seconds") for key, found in figures.items()}
    result = {
        f"ratio_trl_{name}": arena.ratio(ours.get(f"trl_full_{name}"), ours.get(f"honed_full_{name}"))
        for name in ("short", "long")
    }
    for name in ("short", "long"):
        result[f"ratio_trl_lora_{name}"] = arena.ratio(ours.get(f"trl_lora_{name}"), ours.get(f"honed_lora_{name}"))
    arena.finish({
        **result, "ratio_trl_lora": result["ratio_trl_lora_short"],
        "ratio_int8_fp32": {
            name: arena.ratio(ours.get(f"honed_lora_{name}"), ours.get(f"honed_lora_int8_{name}"))
            for name in ("short", "long")
        },
        "seconds": ours, "steps": figures, "peak_gb": peaks, "hello": hello, "unavailable": missing,
    })  # fmt: skip


if __name__ == "__main__":
    main()
