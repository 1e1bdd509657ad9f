"""Tokens a second of training every weight: honed against TRL's SFTTrainer and transformers' own passes.

SFT: batches of 8 conversations of 64 to 512 tokens, the second half of each trained. Groups: one prompt of 512 tokens
and 8 attempts of 64, as reinforcement learning has them; honed reads the prompt once. `limit_share`: operations of
honed's SFT (6 a parameter and token) as a share of what a large sgemm reaches. Ratios above 1 are in honed's favour.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import arena

from honed.model.load import prepare

TRL = ("torch==2.13.0", "trl==1.16.0 peft", "datasets")
VOCABULARY = 49152


def conversations(seed: int) -> list[Any]:
    """Eight rows of (ids, number of prompt ids), short ones oftener."""
    draw = random.Random(seed)
    rows = []
    for _ in range(8):
        length = int(64 * 2 ** draw.uniform(0, 3))
        rows.append([draw.choices(range(100, VOCABULARY), k=length), length // 2])
    return rows


def group(seed: int) -> list[Any]:
    """Eight attempts at one prompt."""
    draw = random.Random(seed)
    prompt = draw.choices(range(100, VOCABULARY), k=512)
    return [[prompt + draw.choices(range(100, VOCABULARY), k=64), 512] for _ in range(8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    options: dict[str, Any] = {"model": str(prepare("smollm2").directory), "threads": given.threads}
    honed, trl, plain, sgemm = (
        arena.Contender("honed", "honed_learner.py", options={**options, "method": "full"}),
        arena.Contender("trl_sft", "trl_sft.py", TRL, options=options),
        arena.Contender("transformers", "transformers_train.py", options=options),
        arena.Contender("sgemm", "linears.py", options=options),
    )
    # two meetings, for not all of them fit into a laptop's memory at once
    by_trl = meeting([honed, trl, sgemm], "sft", given.rounds)
    by_transformers = meeting([honed, plain], "sft", given.rounds)
    groups = meeting([honed, plain], "group", given.rounds)
    # a forward pass is what the limit counts, and training is three of them
    limit = by_trl["sgemm"]
    contenders = (honed, trl, plain, sgemm)
    arena.finish({
        "ratio_sft": arena.ratio(by_trl["honed"], by_trl["trl_sft"]),
        "ratio_sft_transformers": arena.ratio(by_transformers["honed"], by_transformers["transformers"]),
        "ratio_group": arena.ratio(groups["honed"], groups["transformers"]),
        "limit_share": arena.ratio(by_trl["honed"], None if limit is None else limit / 3),
        "tok_s": {"sft": by_trl, "sft_transformers": by_transformers, "group": groups},
        "peak_gb": {each.name: each.peak_gb for each in contenders},
        "hello": {each.name: each.hello for each in contenders},
        "unavailable": {each.name: each.unavailable for each in contenders if each.unavailable},
    })  # fmt: skip


def meeting(contenders: list[arena.Contender], kind: str, rounds: int) -> dict[str, float | None]:
    """Median tokens a second of each, asked in turn."""
    rows, loss = {"sft": (conversations, "cross_entropy"), "group": (group, "policy_gradient")}[kind]
    answers: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
    try:
        for contender in contenders:
            contender.start()
            print(contender.name, contender.hello, contender.unavailable, file=sys.stderr, flush=True)
        arena.rounds(contenders, {"rows": rows(99), "loss": loss}, 1)  # warm
        for number in range(rounds):
            # half of the tokens are trained, and only they meet the output head
            found = arena.rounds(contenders, {"rows": rows(number), "loss": loss, "head_share": 0.5}, 1)
            for who, got in found.items():
                answers[who] += got
    finally:
        for contender in contenders:
            contender.close()
    return {who: arena.median(got, "tok_s") for who, got in answers.items()}


if __name__ == "__main__":
    main()
