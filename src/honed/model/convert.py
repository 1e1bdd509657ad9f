"""A GGUF file made into a plain Hugging Face directory: safetensors, config, tokenizer, chat template.

transformers reads the weights of a GGUF file (it de-quantises them and undoes llama.cpp's permutations) and refuses to
save such a model, so the tensors are written here beside the plain config. The tokenizer of a byte-level BPE is built
from the file's own vocabulary, because the general conversion forgets the pre-tokeniser that the file names (SmolLM2
splits digits one by one). Matrices of a quantised file are rounded to half precision, in which their scales are given:
a five-hundredth of a step of four bits, a fifteenth of one of eight. The engine multiplies such weights twice as fast
(half.py), and everyone who reads the directory sees the same ones. No caching here: see load.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from honed.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4
"""GGUF's token types: special tokens, and added tokens that are plain text."""
UNQUANTISED = (0, 1, 32)
"""GGUF's file types of F32, F16 and BF16."""

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(source: Path, directory: Path) -> None:
    """Writes `source` (a GGUF file) into the existing `directory` as a Hugging Face model. Imports torch.

    Raises ConfigError when the file has no chat template or an unknown tokenizer.
    """
    metadata = read_metadata(source)
    if not metadata.get("tokenizer.chat_template"):
        raise ConfigError(f"{source} carries no chat template, so messages can't be rendered for it.")
    _write_tokenizer(source, metadata, directory)
    _write_weights(source, metadata, directory)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    stop_ids = sorted({int(id) for id in (eos, metadata.get("tokenizer.ggml.eot_token_id")) if id is not None})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}, indent=1))


def read_metadata(source: Path) -> dict[str, Any]:
    """The file's key-value metadata (no tensors). Raises ConfigError when it is no GGUF file."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(source))
    except (ValueError, OSError, IndexError) as error:
        raise ConfigError(f"{source} is not a GGUF file: {error}.") from error
    return {key: field.contents() for key, field in reader.fields.items()}


def _write_weights(source: Path, metadata: dict[str, Any], directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    logging.enable_progress_bar()
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["dtype"] = "float32"
    config["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True, default=str))
    quantised = metadata.get("general.file_type", 0) not in UNQUANTISED
    state = {
        name: tensor.half() if quantised and tensor.ndim > 1 else tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(source: Path, metadata: dict[str, Any], directory: Path) -> None:
    template = metadata["tokenizer.chat_template"]
    (directory / "chat_template.jinja").write_text(template)
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
        (directory / "chat_template.jinja").write_text(template)
        return
    _byte_level_tokenizer(source, metadata).save(str(directory / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if id is not None:
            config[f"{key}_token"] = tokens[int(id)]
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))


def _byte_level_tokenizer(source: Path, metadata: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(source, pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=int(kind) == CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if int(kind) in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def _pre_tokenizer(source: Path, name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return whole
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    digits = {"qwen2": "", "llama-bpe": "{1,3}"}.get(name)
    if digits is None:
        raise ConfigError(
            f"{source} names the pre-tokeniser {name!r}, which is not known here (known: gpt-2, smollm, qwen2, "
            "llama-bpe). Use the model's Hugging Face directory instead."
        )
    split = pre_tokenizers.Split(Regex(_GPT4 % digits), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
