import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from honed.errors import CorruptData
from honed.model.checkpoint import CONFIG, MANIFEST, WEIGHTS, read_adapter, verify, write_adapter

SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"b.lora_B.weight": torch.full((3, 2), value), "a.lora_A.weight": torch.arange(8.0).reshape(2, 4)}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "deep" / "one", tensors(), SETTINGS)
    found, config = read_adapter(tmp_path / "deep" / "one", digest)
    assert config == SETTINGS
    assert found.keys() == tensors().keys()
    assert all(torch.equal(found[name], value) for name, value in tensors().items())


def test_the_files_are_those_that_others_load(tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors(), SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG, WEIGHTS, MANIFEST])
    assert (CONFIG, WEIGHTS) == ("adapter_config.json", "adapter_model.safetensors")
    assert torch.equal(load_file(tmp_path / WEIGHTS)["b.lora_B.weight"], torch.ones(3, 2))


def test_the_digest_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "a", tensors(), SETTINGS)
    turned = dict(reversed(tensors().items()))
    assert write_adapter(tmp_path / "b", turned, dict(reversed(SETTINGS.items()))) == first
    assert write_adapter(tmp_path / "c", tensors(1.001), SETTINGS) != first
    assert write_adapter(tmp_path / "d", tensors(), {**SETTINGS, "r": 4}) != first
    assert write_adapter(tmp_path / "a", tensors(), SETTINGS) == first


def test_a_view_of_a_parameter_is_written_as_its_values(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    digest = write_adapter(tmp_path, {"x": parameter.T}, {})
    found, _ = read_adapter(tmp_path, digest)
    assert found["x"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert not found["x"].requires_grad


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    digest = write_adapter(tmp_path, tensors(), SETTINGS)
    path = tmp_path / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CorruptData, match=f"{name}.*release another version"):
        read_adapter(tmp_path, digest)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path, tensors(), SETTINGS)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(CorruptData, match="is no checkpoint: it has no manifest.json"):
        verify(tmp_path, digest)
    with pytest.raises(CorruptData, match="is no checkpoint"):
        verify(tmp_path / "nowhere", digest)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"digest": "x"}'])
def test_a_manifest_that_can_not_be_read_is_named(tmp_path: Path, text: str) -> None:
    digest = write_adapter(tmp_path, tensors(), SETTINGS)
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CorruptData, match="manifest.json can't be read"):
        verify(tmp_path, digest)


def test_another_version_in_its_place_is_told(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "a", tensors(), SETTINGS)
    second = write_adapter(tmp_path / "b", tensors(2.0), SETTINGS)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(CorruptData, match=f"holds another version .*{second[:12]}, not {first[:12]}"):
        read_adapter(tmp_path / "a", first)


def test_a_manifest_can_not_vouch_for_itself(tmp_path: Path) -> None:
    """Whoever rewrites both a file and its line in the manifest still fails the digest that the store remembers."""
    digest = write_adapter(tmp_path, tensors(), SETTINGS)
    write_adapter(tmp_path, tensors(9.0), SETTINGS)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "digest": digest}))
    with pytest.raises(CorruptData, match="another version"):
        verify(tmp_path, digest)


def test_files_beside_the_listed_ones_are_not_read(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path, tensors(), SETTINGS)
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle")
    assert verify(tmp_path, digest).keys() == {CONFIG, WEIGHTS}
