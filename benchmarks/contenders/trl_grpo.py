"""TRL's GRPOTrainer: one trainer over all steps of a job, whose seconds are those between its callbacks."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import answer
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OPTIONS = answer.options()


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even ids."""
    return [sum(id % 2 == 0 for id in ids) / max(1, len(ids)) for ids in completion_ids]


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step begins and ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def main() -> None:
    torch.set_num_threads(OPTIONS["threads"])
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(OPTIONS["model"])
    loaded = time.perf_counter() - started

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(OPTIONS["model"], dtype=torch.float32, attn_implementation="sdpa")
        count, size = len(asked["prompts"]), asked["size"]
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=count * size, num_generations=size,
            max_completion_length=asked["new"], max_steps=asked["steps"], learning_rate=1e-5, temperature=1.0, beta=0.0,
            logging_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
            disable_tqdm=True, generation_kwargs={"min_new_tokens": asked["new"]}, **OPTIONS.get("config", {}),
        )  # fmt: skip
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        rows = Dataset.from_dict({"prompt": [tokenizer.decode(ids) for ids in asked["prompts"]]})
        clock = Clock()
        GRPOTrainer(
            model=model, args=config, train_dataset=rows, reward_funcs=reward, processing_class=tokenizer,
            peft_config=lora if OPTIONS["method"] == "lora" else None, callbacks=[clock],
        ).train()  # fmt: skip
        return {
            "steps": [round(seconds, 3) for seconds in clock.seconds],
            "seconds": sorted(clock.seconds[1:])[len(clock.seconds[1:]) // 2],
        }

    answer.serve({"version": trl.__version__, "torch": torch.__version__, "load_s": round(loaded, 2)}, job)


main()
