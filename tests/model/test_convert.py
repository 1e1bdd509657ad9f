import hashlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from honed.model.load import load, prepare

from . import tiny
from .folders import write_gguf

SMOLLM_CHECK = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"
"""sha256 of str(ids) that the authors' tokenizer gives for CHECK_TEXT; llama.cpp tells pre-tokenisers apart by it."""

CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 3 "
    "33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= "
    "нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_becomes_the_model_that_it_was_made_of(tmp_path: Path, cache: Path, tied: bool) -> None:
    loaded = load(tiny.gguf(tmp_path / "tiny.gguf", tied=tied), cache=cache)
    assert loaded.config.tie_word_embeddings == tied
    torch.testing.assert_close(tiny.logits(loaded.model), tiny.logits(tiny.model(tied=tied)), rtol=0, atol=1e-6)
    assert json.loads((loaded.directory / "generation_config.json").read_text()) == {"eos_token_id": [2]}
    assert (loaded.directory / "chat_template.jinja").read_text() == tiny.TEMPLATE
    assert json.loads((loaded.directory / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_matrices_of_a_quantised_file_are_held_by_half_precision(tmp_path: Path, cache: Path) -> None:
    """A step of 8 bits is a 127th of the largest weight of 32; rounding moves it by a 4096th of itself."""
    made = write_gguf(tmp_path / "tiny.gguf", quantised=True)
    loaded = load(tmp_path / "tiny.gguf", cache=cache)
    for (name, found), exact in zip(loaded.model.named_parameters(), made.parameters(), strict=True):
        assert found.dtype == torch.float32
        if found.ndim > 1:
            assert torch.equal(found, found.half().float()), name
        torch.testing.assert_close(found, exact, rtol=2**-11, atol=float(exact.abs().max()) / 127)


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_the_pre_tokeniser_that_the_file_names_is_used(
    tmp_path: Path, cache: Path, pre: str, tokens: list[str]
) -> None:
    prepared = prepare(tiny.gguf(tmp_path / "tiny.gguf", pre=pre), cache)
    tokenizer = Tokenizer.from_file(str(prepared.directory / "tokenizer.json"))
    assert tokenizer.encode("hello12").tokens == ["hello", *tokens]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode(tokenizer.encode("naïve 😀 w").ids) == "naïve 😀 w"


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
