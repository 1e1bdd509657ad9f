"""Damage that load.py must name: what a download, a crash or an editor leaves behind."""

import json
from pathlib import Path

import pytest

from honed.errors import ConfigError, CorruptData
from honed.model.load import load, prepare

from . import tiny


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.directory(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_missing_shard_is_named(directory: Path, cache: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptData, match=r"model-00002-of-00002\.safetensors"):
        prepare(directory, cache)


def test_a_broken_config_is_named(directory: Path, cache: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        prepare(directory, cache)


def test_an_architecture_that_nobody_knows_is_the_users_error(directory: Path, cache: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "nobody"}))
    with pytest.raises(ConfigError, match="nobody"):
        load(directory, cache=cache)


def test_a_truncated_weights_file_is_damage(directory: Path, cache: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CorruptData, match="damaged"):
        load(directory, cache=cache)


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, cache: Path) -> None:
    source = tiny.gguf(tmp_path / "tiny.gguf")
    first = prepare(source, cache)
    (first.directory / "manifest.json").unlink()
    (first.directory / "model.safetensors").write_bytes(b"half")
    left = first.directory.parent / f".converting-{first.directory.name}-killed"
    left.mkdir()
    assert prepare(source, cache).digest == first.digest
    assert not left.exists()


def test_a_manifest_that_can_not_be_read_is_named(tmp_path: Path, cache: Path) -> None:
    source = tiny.gguf(tmp_path / "tiny.gguf")
    (prepare(source, cache).directory / "manifest.json").write_text("{")
    with pytest.raises(CorruptData, match=r"manifest\.json can't be read"):
        prepare(source, cache)


def test_a_rewrite_in_the_same_tick_of_the_clock_is_seen(directory: Path, cache: Path) -> None:
    path = directory / "model.safetensors"
    before = prepare(directory, cache).digest
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert prepare(directory, cache).digest != before
