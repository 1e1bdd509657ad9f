import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from honed.config import parse
from honed.errors import ConfigError
from honed.model import checkpoint, lora
from honed.model.lora import LoraSettings

from .folders import HIDDEN, LAYERS, WIDTH, tiny_llama

IDS = torch.tensor([[5, 200, 37, 256, 9]])
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def attached(seed: int = 0, **settings: Any) -> Any:
    model = tiny_llama()
    torch.manual_seed(seed)
    return lora.attach(model, LoraSettings(**{"rank": 4, "alpha": 8.0, **settings}))


def trained(peft: Any) -> Any:
    """Gives B values, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in lora.tensors(peft).items():
            if "lora_B" in name:
                tensor.normal_(0.0, 0.1)
    return peft


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_every_linear_but_the_head_gets_an_adapter_of_the_right_shape() -> None:
    found = lora.tensors(attached())
    assert len(found) == 2 * len(NAMES) * LAYERS
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        assert found[f"{name}.lora_A.weight"].shape == (4, HIDDEN)
        assert found[f"{name}.lora_B.weight"].shape == (WIDTH, 4)
    assert list(found) == sorted(found)
    assert not any("lm_head" in name or "embed" in name for name in found)


def test_only_the_adapter_is_trained_and_it_starts_as_nothing() -> None:
    peft = attached()
    trainable = {id(parameter) for parameter in peft.parameters() if parameter.requires_grad}
    assert trainable == {id(tensor) for tensor in lora.tensors(peft).values()}
    assert all(not tensor.any() for name, tensor in lora.tensors(peft).items() if "lora_B" in name)
    torch.testing.assert_close(logits(peft), logits(tiny_llama()), atol=0, rtol=0)


def test_the_same_seed_gives_the_same_adapter() -> None:
    one, two, other = (lora.tensors(attached(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_the_update_is_scaled_by_alpha_over_rank() -> None:
    peft = trained(attached(alpha=12.0))
    name = "base_model.model.model.layers.0.mlp.up_proj"
    a, b = (lora.tensors(peft)[f"{name}.lora_{side}.weight"] for side in "AB")
    x = torch.linspace(-1, 1, WIDTH)[None]
    layer = peft.base_model.model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.base_layer(x) + 12.0 / 4 * (x @ a.T @ b.T))


def test_names_are_those_of_pefts_own_export(tmp_path: Path) -> None:
    peft = trained(attached())
    peft.save_pretrained(tmp_path)
    exported = load_file(tmp_path / "adapter_model.safetensors")
    ours = lora.tensors(peft)
    assert set(ours) == set(exported)
    assert all(torch.equal(ours[name], exported[name]) for name in exported)


def test_an_export_loads_in_peft_with_equal_logits(tmp_path: Path) -> None:
    peft = trained(attached())
    checkpoint.write_adapter(tmp_path, lora.tensors(peft), peft.peft_config["default"].to_dict())
    again = PeftModel.from_pretrained(tiny_llama(), str(tmp_path)).eval()
    assert not torch.equal(logits(again), logits(tiny_llama()))
    torch.testing.assert_close(logits(again), logits(peft.eval()), atol=0, rtol=0)


def test_an_adapter_of_a_bf16_model_is_kept_in_fp32() -> None:
    peft = lora.attach(tiny_llama().bfloat16(), LoraSettings(rank=2))
    assert {tensor.dtype for tensor in lora.tensors(peft).values()} == {torch.float32}


def test_targets_can_be_chosen_and_unknown_ones_are_the_users_error() -> None:
    found = lora.tensors(attached(targets=("q_proj", "v_proj")))
    assert {name.split(".")[-3] for name in found} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"lora\.targets.*zz_proj"):
        attached(targets=("zz_proj",))


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": 0.0}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse(LoraSettings, settings)


def test_the_settings_load_no_torch() -> None:
    program = "import sys, honed.model.lora, honed.model.checkpoint; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
