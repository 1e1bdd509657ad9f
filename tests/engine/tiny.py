"""Tiny random decoders for tests of the local engine: real architectures, a few thousand weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
KINDS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def tiny(kind: str = "llama", **sizes: Any) -> Loaded:
    """A random model of that kind, the same every time. Weights are large enough that outputs differ clearly."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config_class, model_class, extra = KINDS[kind]
    config = config_class(**{**SIZES, **extra, **sizes})
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
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
