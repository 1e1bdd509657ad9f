"""TRL's GRPOTrainer: one trainer over all steps of a job, whose seconds are those between its callbacks."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import answer
import rewards
import torch
import trl
from clock import Clock
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OPTIONS = answer.options()
AT_ONCE = 4000
"""Tokens of a backward pass, some 13 GB for a model of 135 million weights that all learn."""


class Keep(TrainerCallback):  # type: ignore[misc]
    """Writes the adapter after some of the steps."""

    def __init__(self, steps: list[int], folder: str) -> None:
        self.steps, self.folder = steps, folder

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.steps:
            model.save_pretrained(f"{self.folder}/{state.global_step}")


def main() -> None:
    torch.set_num_threads(OPTIONS["threads"])
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(OPTIONS["model"])
    loaded = time.perf_counter() - started

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """By the case where there is one, else the share of even ids."""
        if "case" in columns:
            texts = [tokenizer.decode(ids) for ids in completion_ids]
            return [rewards.graded_call(case, text) for case, text in zip(columns["case"], texts, strict=True)]
        return [rewards.even(ids) for ids in completion_ids]

    def job(asked: dict[str, Any]) -> dict[str, Any]:
        """Steps over the prompts in their order, `count` prompts a step, `size` attempts each."""
        model = AutoModelForCausalLM.from_pretrained(OPTIONS["model"], dtype=torch.float32, attn_implementation="sdpa")
        count, size = asked.get("count", len(asked["prompts"])), asked["size"]
        # as many at once as its memory allows: logits of a whole vocabulary for each token
        pieces = 1 + count * size * (len(asked["prompts"][0]) + asked["new"]) // AT_ONCE
        while size * count % pieces:
            pieces += 1
        fixed = {} if asked.get("cases") else {"generation_kwargs": {"min_new_tokens": asked["new"]}}
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=count * size // pieces,
            gradient_accumulation_steps=pieces, num_generations=size,
            max_completion_length=asked["new"], max_steps=asked["steps"], learning_rate=asked.get("rate", 1e-5),
            lr_scheduler_type="constant", temperature=1.0, beta=0.0, loss_type="dapo", scale_rewards="none",
            shuffle_dataset=False, seed=asked.get("seed", 0), logging_steps=1, report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False, save_strategy="no", disable_tqdm=True, **fixed,
        )  # fmt: skip
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        columns: dict[str, list[Any]] = {"prompt": [tokenizer.decode(ids) for ids in asked["prompts"]]}
        if asked.get("cases"):
            columns["case"] = asked["cases"]
        clock, keep = Clock(), Keep(asked.get("save_at", []), asked.get("folder", ""))
        GRPOTrainer(
            model=model, args=config, train_dataset=Dataset.from_dict(columns), reward_funcs=reward,
            processing_class=tokenizer, peft_config=lora if OPTIONS["method"] == "lora" else None,
            callbacks=[clock, keep],
        ).train()  # fmt: skip
        kept = sorted(clock.seconds[1:])
        return {"steps": [round(seconds, 3) for seconds in clock.seconds], "seconds": kept[len(kept) // 2]}

    answer.serve({"version": trl.__version__, "torch": torch.__version__, "load_s": round(loaded, 2)}, job)


main()
