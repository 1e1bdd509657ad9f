"""Tiny models on disk: a Hugging Face directory and a GGUF file, both Llamas over bytes with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

END = "<|end|>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}{{ 'assistant: ' }}"
WIDTH, HIDDEN, HEADS, LAYERS = 32, 48, 4, 2
VOCABULARY = len(BYTES) + 2


def tokenizer() -> Tokenizer:
    """Every byte is a token; "he" is another, and END the last."""
    vocabulary = {token: id for id, token in enumerate([*BYTES, "he"])}
    made = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    return made


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """The same random model every time."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def write_directory(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """Saves the tiny model with its tokenizer as a Hugging Face directory."""
    model = tiny_llama(**changes)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return model


def write_gguf(
    path: Path, *, template: str = TEMPLATE, pre: str = "smollm", quantised: bool = False
) -> LlamaForCausalLM:
    """Writes the tiny model as a GGUF file, permuted as llama.cpp keeps queries and keys; `quantised`: its
    matrices in blocks of 32 numbers of 8 bits, where their rows are whole blocks."""
    model = tiny_llama()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*BYTES, "he", END])
    writer.add_token_types([1] * (VOCABULARY - 1) + [3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(VOCABULARY - 1)
    if template:
        writer.add_chat_template(template)
    if quantised:
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for name, tensor in _gguf_tensors(model).items():
        if quantised and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    found = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    for layer in range(LAYERS):
        for theirs, ours in names.items():
            value = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                heads = HEADS if ours == "attn_q" else 2
                value = value.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(value.shape)
            found[f"blk.{layer}.{ours}.weight"] = np.ascontiguousarray(value)
    return found
