"""transformers' own forward and backward pass on padded halves, logits of trained positions only, and AdamW."""

from __future__ import annotations

import time
from typing import Any

import answer
import torch
import transformers
from transformers import AutoModelForCausalLM

OPTIONS = answer.options()


def main() -> None:
    torch.set_num_threads(OPTIONS["threads"])
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(OPTIONS["model"], dtype=torch.float32, attn_implementation="sdpa")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loaded = time.perf_counter() - started

    def backward(rows: list[Any], loss: str, total: int) -> None:
        longest, first = max(len(ids) for ids, _ in rows), min(start for _, start in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        trained = torch.zeros_like(ids, dtype=torch.bool)
        for row, (own, start) in enumerate(rows):
            ids[row, : len(own)] = torch.tensor(own)
            mask[row, : len(own)] = 1
            trained[row, start : len(own)] = True
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=longest - first + 1).logits[:, :-1]
        targets, wanted = ids[:, first:], trained[:, first:]
        logprobs = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
        signs = torch.tensor([1.0 if row % 2 else -1.0 for row in range(len(rows))])[:, None]
        weight = signs if loss == "policy_gradient" else torch.ones_like(signs)
        (-(weight * logprobs * wanted).sum() / total).backward()

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        # by length, half at a time: less padding, and memory that others fit beside
        rows = sorted(asked["rows"], key=lambda row: len(row[0]))
        trained = sum(len(ids) - start for ids, start in rows)
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            backward(half, asked["loss"], trained)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        tokens = sum(len(own) for own, _ in rows)
        return {"seconds": round(seconds, 4), "tokens": tokens, "tok_s": round(tokens / seconds, 2)}

    answer.serve({"version": transformers.__version__, "torch": torch.__version__, "load_s": round(loaded, 2)}, job)


main()
