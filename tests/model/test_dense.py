"""The plain decoder's own pass is used where it holds, and computes what transformers does (see also the engine's)."""

import math

import pytest
import torch
from engine.tiny import KINDS, tiny

from honed.model.attention import Decode, Flat, Write
from honed.model.bank import Bank
from honed.model.dense import Dense, Norm
from honed.model.linear import serving_copy


def test_a_norm_by_hand() -> None:
    """(3, 4) has a mean square of 12.5."""
    norm = Norm(torch.tensor([2.0, 1.0]), 0.5)
    found = norm(torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(found, torch.tensor([[6.0, 4.0]]) / math.sqrt(13.0))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_models_are_known_by_their_layers(kind: str) -> None:
    loaded = tiny(kind)
    found = Dense.of(serving_copy(loaded.model), loaded.config)
    assert (found is not None) == (kind in ("llama", "qwen2", "qwen3", "mistral"))


def test_other_number_formats_keep_transformers_pass() -> None:
    loaded = tiny()
    assert Dense.of(serving_copy(loaded.model.to(torch.bfloat16)), loaded.config) is None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokens_read_one_by_one_give_transformers_logits(kind: str) -> None:
    """Two rows side by side, in the bank's order and against it."""
    loaded = tiny(kind)
    config = loaded.config
    dense = Dense.of(serving_copy(loaded.model), config)
    assert dense is not None
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = loaded.model(ids, use_cache=False).logits[:, -1]
        for order in ([0, 1], [1, 0]):
            bank = Bank(config.num_hidden_layers, 2, config.num_key_value_heads, 48, dim, torch.float32, "cpu")
            rows = torch.tensor(order)
            for at in range(40):
                decode = Decode(
                    bank, rows, rows, torch.tensor([0, 1]), [at + 1, at + 1], torch.float32,
                    start=0 if order == [0, 1] else None,
                )  # fmt: skip
                positions = torch.full((2,), at)
                flat = Flat([Write(bank, None, rows, positions)], [decode])
                logits = dense(ids[rows, at], positions, torch.arange(2), flat)
            torch.testing.assert_close(logits, expected[rows], rtol=2e-5, atol=2e-5)
