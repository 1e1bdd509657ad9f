import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from honed.errors import CorruptData
from honed.model.checkpoint import CONFIG, MANIFEST, WEIGHTS, read_adapter, verify, write_adapter

SETTINGS = {"r": 2, "lora_alpha": 4.0, "target_modules": ["q", "v"]}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "b.lora_B.weight": torch.randn(6, 2, generator=generator),
        "a.lora_A.weight": torch.randn(2, 6, generator=generator).to(torch.bfloat16),
    }


def test_what_was_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "v1", weights(), SETTINGS)
    tensors, settings = read_adapter(tmp_path / "v1", digest)
    assert settings == SETTINGS
    assert set(tensors) == set(weights())
    for name, tensor in weights().items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    verify(tmp_path / "v1", digest)


def test_the_same_content_has_the_same_digest_whatever_its_order(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", weights(), SETTINGS)
    turned = dict(reversed(weights().items()))
    two = write_adapter(tmp_path / "two", turned, dict(reversed(SETTINGS.items())))
    assert one == two == write_adapter(tmp_path / "one", weights(), SETTINGS)


def test_the_digest_does_not_depend_on_the_process(tmp_path: Path) -> None:
    tensors = {"a.lora_A.weight": torch.ones(2, 3), "a.lora_B.weight": torch.zeros(3, 2)}
    program = (
        "import sys, torch; from pathlib import Path; from honed.model.checkpoint import write_adapter\n"
        "t = {'a.lora_A.weight': torch.ones(2, 3), 'a.lora_B.weight': torch.zeros(3, 2)}\n"
        "print(write_adapter(Path(sys.argv[1]), t, {'target_modules': {'q', 'k', 'v', 'o', 'up', 'down'}}))"
    )
    here = write_adapter(tmp_path / "here", tensors, {"target_modules": {"q", "k", "v", "o", "up", "down"}})
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / seed)],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert done.stdout.strip() == here


def test_other_content_has_another_digest(tmp_path: Path) -> None:
    base = write_adapter(tmp_path / "a", weights(), SETTINGS)
    assert write_adapter(tmp_path / "b", weights(), {**SETTINGS, "r": 3}) != base
    changed = weights()
    changed["b.lora_B.weight"][0, 0] += 1e-6
    assert write_adapter(tmp_path / "c", changed, SETTINGS) != base


def test_a_view_is_written_as_its_own_values(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    digest = write_adapter(tmp_path, {"x": whole.T, "y": whole}, {})
    tensors, _ = read_adapter(tmp_path, digest)
    assert torch.equal(tensors["x"], whole.detach().T)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    digest = write_adapter(tmp_path, weights(), SETTINGS)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(bytes(data) if damage == "flipped" else bytes(data[:-7]))
    with pytest.raises(CorruptData, match=name):
        read_adapter(tmp_path, digest)


def test_a_half_written_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "v7", weights(), SETTINGS)
    (tmp_path / "v7" / MANIFEST).unlink()
    with pytest.raises(CorruptData, match=r"v7.*half-written"):
        read_adapter(tmp_path / "v7", digest)
    with pytest.raises(CorruptData, match="v8"):
        read_adapter(tmp_path / "v8", digest)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": [1]}', '{"files": {"../../etc/passwd": "0"}}'])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    digest = write_adapter(tmp_path / "v7", weights(), SETTINGS)
    (tmp_path / "v7" / MANIFEST).write_text(text)
    with pytest.raises(CorruptData, match="v7"):
        read_adapter(tmp_path / "v7", digest)


def test_a_whole_checkpoint_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    wanted = write_adapter(tmp_path / "v1", weights(), SETTINGS)
    write_adapter(tmp_path / "v2", weights(), {**SETTINGS, "r": 3})
    with pytest.raises(CorruptData, match=r"v2.*another version"):
        read_adapter(tmp_path / "v2", wanted)


def test_writing_over_another_version_never_leaves_a_mixture_that_passes(tmp_path: Path) -> None:
    old = write_adapter(tmp_path, weights(), SETTINGS)
    save_file(weights(), tmp_path / "other.safetensors")
    # As a crash between the first file and the manifest would leave it:
    (tmp_path / CONFIG).write_text(json.dumps({**SETTINGS, "r": 3}))
    with pytest.raises(CorruptData, match=CONFIG):
        read_adapter(tmp_path, old)


def test_no_pickle_is_written_or_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, weights(), SETTINGS)
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG, WEIGHTS, MANIFEST}
