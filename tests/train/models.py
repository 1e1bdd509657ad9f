"""Tiny random models for the tests of training: a few thousand parameters, exact in float64 where that matters."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from honed.model.tree_model import TreeModel
from honed.protocols import Trainer
from honed.types import Sample

VOCABULARY = 53


def tiny(dtype: torch.dtype = torch.float64, *, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A Llama with grouped queries whose projections are trained. In float64 its norms compute in float64 too, which
    transformers' own do not."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config(layers)).to(dtype).eval()
    if dtype == torch.float64:
        for layer in model.model.layers:
            layer.input_layernorm, layer.post_attention_layernorm = _norm(dtype), _norm(dtype)
        model.model.norm = _norm(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" in name)
    return model


def config(layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )


def naive_logprobs(model: LlamaForCausalLM, sample: Sample) -> torch.Tensor:
    """[T - 1]: one sequence, transformers' own attention (eager takes its softmax in float32), full logits."""
    model.set_attn_implementation("sdpa")
    ids = torch.from_numpy(sample.tokens.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, :-1] / sample.temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


async def scored(trainer: Trainer, samples: list[Sample]) -> list[list[float]]:
    """The trainer's log-probabilities; what they cost is above 0."""
    found = await trainer.logprobs(samples)
    assert all(each.seconds > 0 for each in found)
    return [each.values for each in found]


def gradient(model: nn.Module) -> torch.Tensor:
    """All gradients as one vector, taken away from the model."""
    found = [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


def shared_gradient(model: LlamaForCausalLM, samples: list[Sample]) -> tuple[torch.Tensor, int]:
    """The gradient of the weighted log-probabilities on shared prefixes, and how many tokens were computed."""
    reader = TreeModel(model)
    tree = reader.build([sample.tokens for sample in samples])
    rows = np.concatenate([rows[:-1] for rows in tree.rows])
    targets = torch.from_numpy(np.concatenate([sample.tokens[1:] for sample in samples]).astype(np.int64))
    weights = torch.from_numpy(np.concatenate([sample.weights[1:] for sample in samples])).to(reader.dtype)
    ones = torch.ones(len(rows), dtype=reader.dtype)
    lp = reader.logprobs(reader.hidden(tree), torch.from_numpy(rows), targets, ones, 5)
    (lp * weights).sum().backward()
    return gradient(model), len(tree)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def sample(tokens: list[int] | np.ndarray, num_trained: int, seed: int = 0, **fields: object) -> Sample:
    """A sample whose last `num_trained` tokens have random weights, advantages and log-probabilities."""
    rng = np.random.default_rng(seed)
    tokens = np.asarray(tokens, np.int32)
    mask = np.arange(len(tokens)) >= len(tokens) - num_trained
    arrays = {
        "weights": np.where(mask, rng.uniform(0.1, 1, len(tokens)), 0).astype(np.float32),
        "advantages": np.where(mask, rng.normal(size=len(tokens)), 0).astype(np.float32),
        "logprobs": np.where(mask, -rng.uniform(1, 6, len(tokens)), 0).astype(np.float32),
        "reference": np.where(mask, -rng.uniform(1, 6, len(tokens)), 0).astype(np.float32),
    }
    return Sample(tokens=tokens, **{**arrays, **fields})


def family(count: int = 5, *, trunk: int = 12, seed: int = 0) -> list[Sample]:
    """Samples that share prefixes of several lengths, two of them identical."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, trunk)
    made = []
    for index in range(count):
        own = rng.integers(0, VOCABULARY, 4 + index)
        made.append(sample(np.concatenate([shared[: trunk - 3 * (index % 3)], own]), 4, seed + index))
    return [*made, made[-1]]


def _norm(dtype: torch.dtype) -> nn.RMSNorm:
    return nn.RMSNorm(32, eps=1e-6, dtype=dtype)
