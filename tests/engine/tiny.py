"""Tiny random decoders for tests of the local engine: real architectures, a few thousand weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from honed.model.load import Loaded

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "attn_implementation": "sdpa",
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_experts": 4}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 24, "layer_types": ALTERNATING}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 24, "layer_types": ALTERNATING}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, **MIXTURE}),
    "olmoe": ("Olmoe", MIXTURE),
}
"""Windows are shorter than the tests' prompts, so that they hide something."""


def tiny(kind: str = "llama", *, halved: bool = False, **sizes: Any) -> Loaded:
    """A random model of that kind, the same every time. Weights are large enough that outputs differ clearly.

    `halved`: they are numbers that half precision holds.
    """
    torch.set_num_threads(1)
    torch.manual_seed(7)
    name, extra = KINDS[kind]
    suffix = "TextConfig" if kind == "gemma3" else "Config"
    if kind in ("gemma2", "gpt_oss"):  # transformers has no sdpa for what these do to scores
        extra = {**extra, "attn_implementation": "eager"}
    config = getattr(transformers, name + suffix)(**{**SIZES, **extra, **sizes})
    model = getattr(transformers, name + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if halved:
                parameter.copy_(parameter.half())
    return Loaded(model=model.eval(), config=config, directory=Path(), digest="tiny-" + kind)


def reference_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """transformers' own log-probabilities [len(ids), vocabulary] of what follows each position."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def adapter_pairs(model: torch.nn.Module, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """Random PEFT tensors for every Linear of the decoder layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not path.endswith("lm_head"):
            name = f"base_model.model.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * 0.2
    return tensors


ADAPTER_CONFIG = {"r": 4, "lora_alpha": 8}
