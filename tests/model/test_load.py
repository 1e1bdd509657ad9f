import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.errors import ConfigError, CorruptData, NotFound, Refused
from honed.model.load import MANIFEST, _dtype, load, prepare
from honed.text import load_renderer
from honed.types import Message

from .folders import END, TEMPLATE, tokenizer, write_directory, write_gguf

IDS = torch.tensor([[5, 200, 37, 256, 9]])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_directory(tmp_path / "tiny")
    return tmp_path / "tiny"


# ------------------------------------------------------------------------------------------------------ GGUF


def test_a_gguf_file_becomes_the_model_that_was_written(tmp_path: Path, cache: Path) -> None:
    original = write_gguf(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf", cache=cache)
    torch.testing.assert_close(logits(loaded.model), logits(original), atol=1e-5, rtol=1e-5)
    assert not loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}


def test_its_tokenizer_template_and_stop_token_are_the_files_own(source: Path, cache: Path) -> None:
    directory = prepare(source, cache).directory
    renderer = load_renderer(directory)
    assert (directory / "chat_template.jinja").read_text() == TEMPLATE
    assert (
        renderer.start([Message(role="user", content="hey 12")])
        == tokenizer().encode(f"user: hey 12{END}assistant: ").ids
    )
    assert renderer.decode(renderer.stop_ids) == END


def test_a_conversion_is_made_once(source: Path, cache: Path) -> None:
    first = prepare(source, cache)
    made = (first.directory / MANIFEST).stat().st_ino
    second = prepare(source, cache)
    assert (second.directory, second.digest) == (first.directory, first.digest)
    assert (first.directory / MANIFEST).stat().st_ino == made
    assert first.directory.is_relative_to(cache)


def test_a_half_written_conversion_is_not_used(source: Path, cache: Path) -> None:
    first = prepare(source, cache)
    (first.directory / MANIFEST).unlink()
    (first.directory / "model.safetensors").write_bytes(b"half")
    second = prepare(source, cache)
    assert (second.directory, second.digest) == (first.directory, first.digest)
    assert not list(first.directory.parent.glob(".converting-*"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_conversion_is_refused_by_name(source: Path, cache: Path, name: str) -> None:
    directory = prepare(source, cache).directory
    (directory / name).write_bytes((directory / name).read_bytes() + b" ")
    with pytest.raises(CorruptData, match=name):
        prepare(source, cache)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", pre="nobody-knows")
    with pytest.raises(ConfigError, match="nobody-knows"):
        prepare(tmp_path / "odd.gguf", cache)
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_a_gguf_file_without_a_template_or_content_is_the_users_error(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "mute.gguf", template="")
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(tmp_path / "mute.gguf", cache)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        prepare(tmp_path / "text.gguf", cache)


def test_with_a_warm_cache_prepare_loads_no_torch(source: Path, cache: Path) -> None:
    expected = prepare(source, cache)
    program = (
        "import sys; from pathlib import Path; from honed.model.load import prepare\n"
        "print(prepare(sys.argv[1], Path(sys.argv[2])).digest)\n"
        "assert not {'torch', 'transformers', 'peft', 'gguf'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(source), str(cache)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected.digest), done.stderr


# ------------------------------------------------------------------------------------------------ directories


def test_a_directory_is_used_where_it_is(tmp_path: Path, cache: Path) -> None:
    original = write_directory(tmp_path / "tiny")
    loaded = load(tmp_path / "tiny", cache=cache)
    assert loaded.directory == tmp_path / "tiny"
    torch.testing.assert_close(logits(loaded.model), logits(original), atol=0, rtol=0)


def test_the_digest_follows_the_weights(directory: Path, cache: Path) -> None:
    before = prepare(directory, cache).digest
    assert prepare(directory, cache).digest == before
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert prepare(directory, cache).digest != before


def test_dtypes(directory: Path, cache: Path) -> None:
    assert next(load(directory, "bfloat16", cache=cache).model.parameters()).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="int8"):
        load(directory, "int8", cache=cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [("missing", "missing: .*layers.1.mlp.up_proj.weight"), ("extra", "unexpected: .*a.stranger"),
     ("shape", "mismatched: .*layers.1.mlp.up_proj.weight")],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(directory: Path, cache: Path, change: str, message: str) -> None:
    weights = load_file(directory / "model.safetensors")
    if change == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif change == "extra":
        weights["a.stranger"] = torch.zeros(2)
    else:
        weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptData, match=message):
        load(directory, cache=cache)


def test_pickles_are_refused_unopened(directory: Path, cache: Path, tmp_path: Path) -> None:
    (directory / "model.safetensors").unlink()
    opened = tmp_path / "opened"
    (directory / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {opened}'\ntR.".encode())
    with pytest.raises(Refused, match=r"pytorch_model\.bin"):
        load(directory, cache=cache)
    with pytest.raises(Refused, match="reads no other weights"):
        load(directory / "pytorch_model.bin", cache=cache)
    assert not opened.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory: Path, cache: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ConfigError, match=r"safetensors" if name.startswith("model") else name):
        prepare(directory, cache)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "mamba2"}, {"model_type": "lfm2"}, {"layer_types": ["full_attention", "linear_attention"]}],
)
def test_recurrent_models_are_refused(directory: Path, cache: Path, change: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(Refused, match="packing and prefix sharing"):
        prepare(directory, cache)


def test_a_tokenizer_of_another_model_is_refused(directory: Path, cache: Path) -> None:
    other = tokenizer()
    other.add_tokens(["a new word"])
    other.save(str(directory / "tokenizer.json"))
    with pytest.raises(ConfigError, match="a new word"):
        load(directory, cache=cache)


def test_what_does_not_exist_is_not_found(tmp_path: Path, cache: Path) -> None:
    for source in ("nothing", str(tmp_path / "nothing"), str(tmp_path / "nothing.gguf"), "./no/where"):
        with pytest.raises(NotFound):
            prepare(source, cache)


def test_a_hub_name_without_a_network_is_not_found(cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from honed.errors import NotFound; from honed.model.load import prepare\n"
        "try: prepare('nobody/has-this-model', Path(sys.argv[1]))\n"
        "except NotFound as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(cache)], capture_output=True, text=True, env=environment, check=False
    )
    assert "HF_HUB_OFFLINE is set" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("auto", "cuda:1", "bfloat16"),
        ("float16", "cpu", "float16"),
        ("float32", "cuda", "float32"),
    ],
)
def test_the_number_format_follows_the_device_where_nobody_says(dtype: str, device: str, expected: str) -> None:
    assert _dtype(dtype, device) == expected
