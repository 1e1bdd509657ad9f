"""A version as one model: base and adapter added, opened by anybody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from honed.errors import CorruptData, Refused
from honed.model import checkpoint, lora
from honed.model.load import load, prepare
from honed.model.lora import LoraSettings
from honed.model.merge import merge

from .tiny import directory, logits


def adapter(base: Path, folder: Path) -> tuple[str, torch.Tensor]:
    """A random adapter of `base` in `folder`; its digest and the adapted model's logits."""
    peft = lora.attach(load(base).model, LoraSettings(rank=3, alpha=5))
    with torch.no_grad():
        for tensor in lora.tensors(peft).values():
            tensor.normal_(0.0, 0.2)
    digest = checkpoint.write_adapter(folder, lora.tensors(peft), peft.peft_config["default"].to_dict())
    return digest, logits(peft.eval())


def test_a_merged_version_has_the_adapted_logits(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")
    digest, expected = adapter(base, tmp_path / "v1")
    written = merge(prepare(base), tmp_path / "v1", digest, tmp_path / "out")
    checkpoint.verify(tmp_path / "out", written)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected, atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(logits(load(base).model), expected, atol=1e-2)
    assert load(tmp_path / "out").model is not None  # tokenizer and all
    assert {path.name for path in tmp_path.iterdir()} == {"base", "v1", "out"}


def test_nothing_is_written_over_and_damage_is_named(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")
    digest, _ = adapter(base, tmp_path / "v1")
    with pytest.raises(Refused, match="is there already"):
        merge(prepare(base), tmp_path / "v1", digest, tmp_path / "base")
    with pytest.raises(CorruptData, match="holds another version"):
        merge(prepare(base), tmp_path / "v1", "0" * 64, tmp_path / "out")
    assert not (tmp_path / "out").exists()
