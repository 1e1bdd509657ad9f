"""Flat attention against the definition, row by row."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from honed.errors import ConfigError
from honed.model.attention import (
    Bank,
    Decode,
    Flat,
    Prefill,
    Write,
    attend,
    decode_mask,
    position_limit,
    prefill_mask,
    refuse_unsupported,
)

KV_HEADS, GROUPS, DIM = 2, 3, 8
HEADS = KV_HEADS * GROUPS
LAYER: Any = SimpleNamespace(layer_idx=0)


def naive(
    query: Tensor, keys: Tensor, values: Tensor, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """query [heads, d] at the last position of keys, values [kv_heads, L, d] -> [heads, d]."""
    out = []
    for head in range(HEADS):
        k, v = keys[head // GROUPS], values[head // GROUPS]
        scores = k @ query[head] / math.sqrt(DIM)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1]])
        out.append(torch.softmax(scores, -1)[: len(v)] @ v)
    return torch.stack(out)


STYLES: Any = [
    {},
    {"sliding_window": 3},
    {"sliding_window": 30},
    {"softcap": 0.5},
    {"s_aux": torch.linspace(-1, 3, HEADS)},
    {"sliding_window": 5, "softcap": 0.5, "s_aux": torch.linspace(-1, 3, HEADS)},
]


def seen(style: dict[str, Any], end: int) -> slice:
    """The positions that the query at end - 1 sees."""
    return slice(max(0, end - style.get("sliding_window", end)), end)


def bent(style: dict[str, Any]) -> dict[str, Any]:
    return {"softcap": style.get("softcap"), "sinks": style.get("s_aux")}


def bank(num_rows: int = 4, length: int = 32) -> Bank:
    made = Bank(1, num_rows, KV_HEADS, length, DIM, torch.float32, "cpu")
    made.data.normal_(generator=torch.Generator().manual_seed(1))
    return made


def tensors(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, HEADS, num_tokens, DIM, generator=generator)
    key = torch.randn(1, KV_HEADS, num_tokens, DIM, generator=generator)
    return query, key, torch.randn(1, KV_HEADS, num_tokens, DIM, generator=generator)


def write(target: Bank, rows: list[int], positions: list[int]) -> Write:
    return Write(target, torch.arange(len(rows)), torch.tensor(rows), torch.tensor(positions))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shared", [0, 4])
def test_decode_over_ragged_rows(shared: int, style: dict[str, Any]) -> None:
    made, rows, lengths = bank(), [2, 0], [9, 14]  # row 1 has no query
    made.data[:, :, 2, :, :shared] = made.data[:, :, 0, :, :shared]
    query, key, value = tensors(2)
    decode = Decode(
        bank=made,
        gather=torch.tensor([1, 0, 0]),
        rows=torch.tensor(rows),
        index=torch.tensor([0, 1]),
        lengths=[14, 14, 9],
        dtype=torch.float32,
        shared=shared,
        shared_row=2,
    )
    flat = Flat([write(made, rows, [8, 13])], [decode], [])
    out, _ = attend(LAYER, query, key, value, None, honed=flat, **style)
    for token, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        keys, values = made.layer(0)
        assert torch.equal(keys[row, :, length - 1], key[0, :, token])
        part = seen(style, length)
        expected = naive(query[0, :, token], keys[row, :, part], values[row, :, part], **bent(style))
        torch.testing.assert_close(out[0, token], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("start", [0, 5])
def test_prefill_is_causal_from_where_it_starts(start: int, style: dict[str, Any]) -> None:
    made, count = bank(), 6
    query, key, value = tensors(count)
    flat = Flat(
        [write(made, [1] * count, list(range(start, start + count)))],
        [],
        [Prefill(made, 1, 0, count, start + count, GROUPS, torch.float32, "cpu")],
    )
    out, _ = attend(LAYER, query, key, value, None, honed=flat, **style)
    keys, values = made.layer(0)
    for token in range(count):
        end = start + token + 1
        part = seen(style, end)
        expected = naive(query[0, :, token], keys[1, :, part], values[1, :, part], **bent(style))
        torch.testing.assert_close(out[0, token], expected, rtol=1e-5, atol=1e-5)


def test_masks() -> None:
    low = float("-inf")
    assert decode_mask(torch.tensor([3, 1]), 1, 4, torch.float32)[:, 0].tolist() == [[0, 0, low], [low, low, low]]
    assert prefill_mask(2, 3, 1, torch.float32, "cpu").tolist() == [[0, 0, low], [0, 0, 0]]
    assert prefill_mask(2, 3, 2, torch.float32, "cpu").shape == (4, 3)
    assert decode_mask(torch.tensor([3, 2]), 0, 3, torch.float32, 2)[:, 0].tolist() == [[low, 0, 0], [0, 0, low]]
    assert prefill_mask(2, 3, 1, torch.float32, "cpu", 2).tolist() == [[0, 0, low], [low, 0, 0]]


def test_rows_move_and_clear() -> None:
    made = bank()
    before = made.data[:, :, 3, :, :5].clone()
    made.move(3, 0, 5)
    assert torch.equal(made.data[:, :, 0, :, :5], before)
    made.clear(0, 3)
    assert not made.data[:, :, 0, :, :3].any()
    assert torch.equal(made.data[:, :, 0, :, 3:5], before[:, :, :, 3:])


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "kind linear_attention"),
        ({"layer_types": ["full_attention", "conv"]}, "kind conv"),
        ({"layer_types": ["chunked_attention"]}, "kind chunked_attention"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        ({"per_layer_attributes": {"head_dim"}}, "per_layer_attributes"),
    ],
)
def test_models_with_other_attention_are_refused_by_name(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        refuse_unsupported(SimpleNamespace(**config))


def test_windows_that_the_attention_is_not_told_of_are_refused() -> None:
    refuse_unsupported(transformers.Qwen2MoeConfig())
    with pytest.raises(ConfigError, match="sliding windows of a qwen2_moe"):
        refuse_unsupported(transformers.Qwen2MoeConfig(use_sliding_window=True, sliding_window=64))
    refuse_unsupported(transformers.MistralConfig(sliding_window=64))


def test_positions_that_depend_on_the_longest_neighbour_have_a_limit() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
    long = transformers.Phi3Config(
        rope_parameters=factors, original_max_position_embeddings=4096, max_position_embeddings=131072
    )
    assert position_limit(long) == 4096
    assert position_limit(transformers.LlamaConfig()) is None
    assert position_limit(transformers.Gemma3TextConfig()) is None


@pytest.mark.parametrize("name", ["NemotronH", "Jamba", "Zamba2", "FalconH1", "Qwen3Next", "Mamba2", "DeepseekV3"])
def test_hybrids_are_refused_by_their_own_configs(name: str) -> None:
    with pytest.raises(ConfigError, match="local engine has no"):
        refuse_unsupported(getattr(transformers, name + "Config")())
