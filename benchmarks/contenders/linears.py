"""The limit: the model's matrix products alone, as large as they get, and one large product of the machine (sgemm)."""

from __future__ import annotations

import time
from typing import Any

import answer
import torch
from transformers import AutoConfig

OPTIONS = answer.options()


def main() -> None:
    torch.set_num_threads(OPTIONS["threads"])
    config = AutoConfig.from_pretrained(OPTIONS["model"])
    wide = config.num_attention_heads + 2 * config.num_key_value_heads
    dim = config.hidden_size // config.num_attention_heads
    shapes = [
        (config.hidden_size, wide * dim), (config.hidden_size, config.hidden_size),
        (config.hidden_size, 2 * config.intermediate_size), (config.intermediate_size, config.hidden_size),
    ]  # fmt: skip
    body = 2 * config.num_hidden_layers * sum(a * b for a, b in shapes)
    head = 2 * config.hidden_size * config.vocab_size

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        """GFLOP/s of a large product, and the tokens a second that it would allow."""
        size = 2048
        one, other = torch.randn(size, size), torch.randn(size, size)
        one @ other
        began = time.perf_counter()
        for _ in range(5):
            one @ other
        flops = 5 * 2 * size**3 / (time.perf_counter() - began)
        per_token = body + head * asked.get("head_share", 1.0)
        return {"gflop_s": round(flops / 1e9, 1), "tok_s": round(flops / per_token, 1)}

    answer.serve({"torch": torch.__version__, "gflop_per_token": (body + head) / 1e9}, job)


main()
