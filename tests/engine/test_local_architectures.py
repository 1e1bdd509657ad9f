"""Every architecture in the flat layout gives transformers' own logits; what would not is refused by name."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.test_local import SETTINGS, ask, check_raw, prompt
from engine.tiny import KINDS, SIZES, tiny
from honed.engine.local import LocalEngine
from honed.errors import ConfigError
from honed.model.load import Loaded


@pytest.mark.parametrize(("kind", "halved"), [*((kind, False) for kind in KINDS), ("llama", True), ("gemma2", True)])
async def test_greedy_equals_transformers(kind: str, halved: bool) -> None:
    """Prompts of every length side by side, four of them with a prefix in common, many longer than the windows."""
    loaded = tiny(kind, halved=halved)
    engine = LocalEngine(loaded, SETTINGS)
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 2, 15, 16, 17, 33, 70, 130))]
    prompts += [prompt(50, 60) + prompt(60 + i, 3 + 5 * i) for i in range(4)]
    answers = await asyncio.gather(*[ask(engine, ids) for ids in prompts])
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.ids == greedy(loaded.model, ids, len(answer.ids))
        check_raw(loaded.model, ids, answer, 2e-5)
    await engine.close()


def greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """The likeliest continuation by transformers' forward pass over the whole sequence, without a cache."""
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids[-num_tokens:]


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("DiffLlama", {}, "would compute a DiffLlamaForCausalLM wrongly"),
        (
            "Bloom",
            {"n_head": 6, "n_layer": 3, "attn_implementation": "eager"},
            "would compute a BloomForCausalLM wrongly",
        ),
        ("Falcon", {}, "cannot run a FalconForCausalLM"),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "no layers of kind conv"),
    ],
)
def test_what_would_be_served_wrongly_is_refused(name: str, sizes: dict[str, Any], reason: str) -> None:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, name + "Config")(**{**SIZES, **special, **sizes})
    torch.manual_seed(0)
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    with pytest.raises(ConfigError, match=reason):
        LocalEngine(Loaded(model=model, config=config, directory=Path(), digest="x"))
