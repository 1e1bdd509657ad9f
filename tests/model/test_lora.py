import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from honed.config import parse
from honed.errors import ConfigError
from honed.model import checkpoint
from honed.model.lora import LoraSettings, attach, tensors

from . import tiny

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def attached(seed: int = 3, **settings: Any) -> Any:
    model = tiny.model()
    torch.manual_seed(seed)
    return attach(model, LoraSettings(**settings))


def trained(peft: Any) -> None:
    """Moves every adapter away from its beginning, where B is zero and the adapter does nothing."""
    torch.manual_seed(5)
    with torch.no_grad():
        for value in tensors(peft).values():
            value += 0.1 * torch.randn_like(value)


def exported(peft: Any, folder: Path) -> str:
    config = peft.peft_config["default"].to_dict()
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return checkpoint.write_adapter(folder, tensors(peft), config)


def test_every_linear_but_the_head_gets_an_adapter() -> None:
    found = tensors(attached(rank=4))
    names = {f"base_model.model.model.layers.{layer}.{kind}" for layer in (0, 1) for kind in _places()}
    assert set(found) == {f"{name}.lora_{side}.weight" for name in names for side in "AB"}
    assert list(found) == sorted(found)
    for name, value in found.items():
        assert value.shape[0 if "lora_A" in name else 1] == 4
        assert value.requires_grad


def test_nothing_else_is_trained() -> None:
    peft = attached()
    assert {name.replace(".default.", ".") for name, value in peft.named_parameters() if value.requires_grad} == set(
        tensors(peft)
    )


def test_a_fresh_adapter_does_nothing() -> None:
    peft = attached()
    assert all(not value.any() for name, value in tensors(peft).items() if "lora_B" in name)
    assert all(value.any() for name, value in tensors(peft).items() if "lora_A" in name)
    assert torch.equal(tiny.logits(peft), tiny.logits(tiny.model()))


def test_the_beginning_follows_the_seed() -> None:
    first, again, other = tensors(attached(seed=1)), tensors(attached(seed=1)), tensors(attached(seed=2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_the_update_is_b_a_times_alpha_over_rank() -> None:
    peft = attached(rank=2, alpha=8.0, targets=("q_proj",))
    trained(peft)
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    layer = peft.get_submodule(name)
    x = torch.randn(3, 32)
    a, b = tensors(peft)[f"{name}.lora_A.weight"], tensors(peft)[f"{name}.lora_B.weight"]
    expected = x @ layer.base_layer.weight.T + (8.0 / 2) * (x @ a.T) @ b.T
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def test_targets_can_be_named() -> None:
    found = tensors(attached(targets=("q_proj", "v_proj")))
    assert {name.split(".")[-3] for name in found} == {"q_proj", "v_proj"}


def test_a_target_that_the_model_has_not_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match=r"lora.targets = \['query'\]"):
        attached(targets=("query",))


def test_an_export_gives_equal_logits_in_peft(tmp_path: Path) -> None:
    peft = attached(rank=4, alpha=16.0)
    trained(peft)
    exported(peft, tmp_path)
    elsewhere = PeftModel.from_pretrained(tiny.model(), tmp_path).eval()
    assert not torch.equal(tiny.logits(elsewhere), tiny.logits(tiny.model()))
    assert torch.equal(tiny.logits(elsewhere), tiny.logits(peft.eval()))


def test_names_and_values_are_those_of_pefts_own_export(tmp_path: Path) -> None:
    peft = attached()
    trained(peft)
    digest = exported(peft, tmp_path / "ours")
    peft.save_pretrained(tmp_path / "theirs")
    ours, config = checkpoint.read_adapter(tmp_path / "ours", digest)
    from safetensors.torch import load_file

    theirs = load_file(tmp_path / "theirs" / checkpoint.WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    written = json.loads((tmp_path / "theirs" / checkpoint.CONFIG).read_text())
    assert {key: config[key] for key in ("r", "lora_alpha", "peft_type", "task_type", "bias")} == {
        key: written[key] for key in ("r", "lora_alpha", "peft_type", "task_type", "bias")
    }
    assert set(config["target_modules"]) == set(written["target_modules"]) == set(LINEARS)


def test_adapters_of_a_bfloat16_model_are_kept_in_float32() -> None:
    peft = attach(tiny.model().to(torch.bfloat16), LoraSettings())
    assert {value.dtype for value in tensors(peft).values()} == {torch.float32}


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"dropout": 0.1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        parse(LoraSettings, wrong)


def _places() -> list[str]:
    return [f"{'self_attn' if name in LINEARS[:4] else 'mlp'}.{name}" for name in LINEARS]
