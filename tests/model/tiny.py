"""A tiny random Llama in two forms: a Hugging Face directory and the GGUF file that llama.cpp would make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2")]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]


def model(*, tied: bool = True, seed: int = 0, vocab_size: int = len(VOCABULARY)) -> LlamaForCausalLM:
    """Two layers, width 32, four heads over two of keys and values."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    """[1, 9, vocabulary] of fixed ids."""
    with torch.no_grad():
        return model(torch.tensor([[1, 40, 41, 42, 99, 100, 7, 2, 1]])).logits


def directory(folder: Path, **options: Any) -> Path:
    """Saves `model(**options)` with a tokenizer, and returns the folder."""
    model(**options).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(VOCABULARY)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def gguf(path: Path, *, pre: str = "smollm", template: str | None = TEMPLATE, **options: Any) -> Path:
    """Writes `model(**options)` as a GGUF file of float32 tensors."""
    source = model(**options)
    writer = GGUFWriter(path, "llama")
    _metadata(writer, source.config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCABULARY])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    for add, id in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0)):
        add(id)
    if template is not None:
        writer.add_chat_template(template)
    for name, tensor in source.state_dict().items():
        if name != "lm_head.weight" or not source.config.tie_word_embeddings:
            writer.add_tensor(_gguf_name(name), _permuted(name, tensor, source.config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: GGUFWriter, config: LlamaConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.", "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def _gguf_name(name: str) -> str:
    for long, short in NAMES.items():
        name = name.replace(long, short)
    return name


def _permuted(name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions where Hugging Face rotates halves, so it reorders rows of q and k."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor.contiguous()
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).contiguous()
