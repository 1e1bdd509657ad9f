"""TRL's SFTTrainer: one job is some updates, a batch each, padded to its longest row (packing needs FlashAttention)."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import answer
import torch
import trl
from clock import Clock
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

OPTIONS = answer.options()


def main() -> None:
    torch.set_num_threads(OPTIONS["threads"])
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(OPTIONS["model"])
    model = AutoModelForCausalLM.from_pretrained(OPTIONS["model"], dtype=torch.float32, attn_implementation="sdpa")
    loaded = time.perf_counter() - started

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        rows = asked["rows"]
        data = Dataset.from_dict({
            "input_ids": [ids for ids, _ in rows],
            "completion_mask": [[0] * start + [1] * (len(ids) - start) for ids, start in rows],
        })  # fmt: skip
        config = SFTConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=len(rows), max_steps=2, learning_rate=1e-5,
            report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
            max_length=None, completion_only_loss=True, logging_steps=1,
        )  # fmt: skip
        clock = Clock()
        SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[clock]).train()
        tokens = sum(len(ids) for ids, _ in rows)
        return {"seconds": round(clock.seconds[-1], 4), "tokens": tokens, "tok_s": round(tokens / clock.seconds[-1], 2)}

    answer.serve({"version": trl.__version__, "torch": torch.__version__, "load_s": round(loaded, 2)}, job)


main()
