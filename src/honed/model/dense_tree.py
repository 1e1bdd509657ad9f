"""The forward pass of the plain dense decoder over a tree, with gradients, in as few passes over memory as it takes.

For the layers that dense.py serves, in single precision on a CPU. The products stay those of the model's own modules,
with whatever adapters they have; norms, gates and attention are kernels. Any other model keeps transformers' pass, and
either is compared with transformers' log-probabilities before it trains (tree_model.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import SiLUActivation

from honed.model.dense import PLAIN, turns, window_of
from honed.model.gradients import AddNormed, Gated, Normed
from honed.model.tree import Tree
from honed.model.tree_attention import TreeAttention, fit


class DenseTree:
    """Last hidden states of a model whose layers are all plain; see `DenseTree.of`."""

    def __init__(self, body: Any, config: Any) -> None:
        self._body = body
        self._windows = [window_of(layer, config) or 0 for layer in body.layers]
        attention = body.layers[0].self_attn
        self._dim, self._scale = int(attention.head_dim), float(attention.scaling)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.checkpoint = False
        """Whether a backward pass computes each layer again instead of keeping what it needs of it."""

    @classmethod
    def of(cls, causal: Any) -> DenseTree | None:
        """None for a model that is not plain, not in single precision, or not on a CPU where loops can run."""
        body, config = causal.base_model, causal.config
        layers = getattr(body, "layers", None) or ()
        if not layers or any(type(layer).__name__ not in PLAIN for layer in layers):
            return None
        weight, act = body.embed_tokens.weight, layers[0].mlp.act_fn
        plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and type(act) in (nn.SiLU, SiLUActivation)
        dim, heads, kv_heads = layers[0].self_attn.head_dim, config.num_attention_heads, config.num_key_value_heads
        return cls(body, config) if plain and fit(heads, kv_heads, dim) else None

    def __call__(self, tree: Tree) -> Tensor:
        """The last hidden states [T, hidden], after the final norm."""
        x = self._body.embed_tokens(tree.tokens)
        with torch.no_grad():
            cos, sin = turns(self._body.rotary_emb, x, tree.positions)
        more: Tensor | None = None
        for number in range(len(self._windows)):
            if self.checkpoint and torch.is_grad_enabled():
                x, more = checkpoint(self._layer, number, x, more, cos, sin, tree, use_reentrant=False)
            else:
                x, more = self._layer(number, x, more, cos, sin, tree)
        return _normed(self._body.norm, x, more)[1]

    def _layer(
        self, number: int, x: Tensor, more: Tensor | None, cos: Tensor, sin: Tensor, tree: Tree
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [T, hidden] as it is, and what is still to be added to it."""
        layer, num_tokens = self._body.layers[number], len(x)
        attention, mlp = layer.self_attn, layer.mlp
        x, hidden = _normed(layer.input_layernorm, x, more)
        q = attention.q_proj(hidden).view(num_tokens, self._heads, self._dim)
        k = attention.k_proj(hidden).view(num_tokens, self._kv_heads, self._dim)
        v = attention.v_proj(hidden).view(num_tokens, self._kv_heads, self._dim)
        if hasattr(attention, "q_norm"):
            q, k = self._head_normed(attention.q_norm, q), self._head_normed(attention.k_norm, k)
        layout = tree.layout(self._heads // self._kv_heads, self._windows[number])
        mixed = TreeAttention.apply(q, k, v, cos, sin, layout, self._scale)
        x, hidden = _normed(layer.post_attention_layernorm, x, attention.o_proj(mixed.view(num_tokens, -1)))
        return x, mlp.down_proj(Gated.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))

    def _head_normed(self, norm: Any, x: Tensor) -> Tensor:
        return Normed.apply(x.reshape(-1, self._dim), norm.weight, norm.variance_epsilon).view(x.shape)


def _normed(norm: Any, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + more, and that after the norm."""
    if more is None:
        return x, Normed.apply(x, norm.weight, norm.variance_epsilon)
    return AddNormed.apply(x, more, norm.weight, norm.variance_epsilon)
