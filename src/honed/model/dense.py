"""The forward pass of the plain dense decoder over a flat batch, in as few calls as it takes.

At one to eight rows half of the time of transformers' own pass on a CPU is not in its products but between them: some
150 small calls a layer. This is the same arithmetic in nine, four of them products and the others of kernels.py; or in
about thirty of torch's, where kernels can't run. Made for the layers named in PLAIN, whose code in transformers differs
by a bias, a norm or a window; any other model keeps transformers' pass, and before an engine serves, either is compared
with transformers' logits (engine/selfcheck.py). No autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from honed.model.attention import Flat, Style, attend_flat
from honed.model.linear import Product, Serving

try:
    from honed.model import compiled, kernels
except ImportError:  # numba is not installed
    compiled = kernels = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from honed.model.kernels import Member, Step

PLAIN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) times a weight [n], over the last dimension (Zhang and Sennrich 2019, eq. 4)."""

    weight: Tensor
    epsilon: float

    @functools.cached_property
    def _eps(self) -> Tensor:
        return self.weight.new_tensor(self.epsilon)

    @functools.cached_property
    def bits(self) -> int:
        """epsilon, for a kernel."""
        return compiled.as_bits(self.epsilon)

    def after(self, x: Tensor, more: Tensor | None) -> Tensor:
        """Of x + more, which x becomes, by a kernel."""
        return kernels.normed(x, more, self)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True)
        inverse = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, inverse).mul_(self.weight)


@dataclass(frozen=True)
class Layer:
    """What one decoder layer computes with."""

    before_attention: Norm
    before_mlp: Norm
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    query_norm: Norm | None
    key_norm: Norm | None
    style: Style


class Dense:
    """Logits of a `Serving` whose layers are all plain; see `Dense.of`."""

    def __init__(self, serving: Serving, config: Any) -> None:
        body: Any = serving.model.model
        self._embedding: Tensor = body.embed_tokens.weight
        self._rotary: nn.Module = body.rotary_emb
        self._layers = [_layer(serving.products, i, each, config) for i, each in enumerate(body.layers)]
        self._norm, self._head = _norm(body.norm), serving.products["lm_head"]
        self._act: Callable[[Tensor], Tensor] = body.layers[0].mlp.act_fn
        attention = body.layers[0].self_attn
        self._dim, self._scale = int(attention.head_dim), float(attention.scaling)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._groups = self._heads // self._kv_heads
        self.has_kernels = (
            kernels is not None and self._embedding.device.type == "cpu"
            and kernels.fit(self._groups, self._dim) and type(self._act) in (nn.SiLU, SiLUActivation)
        )  # fmt: skip

    @classmethod
    def of(cls, serving: Serving, config: Any) -> Dense | None:
        """None for a model that is not plain, or not in single precision."""
        layers = getattr(getattr(serving.model, "model", None), "layers", None) or ()
        plain = bool(layers) and all(type(layer).__name__ in PLAIN for layer in layers)
        plain = plain and serving.products["lm_head"].like.dtype == torch.float32
        return cls(serving, config) if plain else None

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor, flat: Flat) -> Tensor:
        """Logits [n, vocabulary] of the rows `wanted` [n], of a flat batch of ids and positions [T]."""
        x = functional.embedding(ids, self._embedding)
        cos, sin = turns(self._rotary, x, positions)
        if flat.step is not None:
            return self._head.compute(self._in_kernels(x, cos, sin, wanted, flat, flat.step))
        for number, layer in enumerate(self._layers):
            self._attention(x, layer, number, cos, sin, flat)
            hidden = layer.gate_up.compute(layer.before_mlp(x))
            half = hidden.shape[-1] // 2
            x.add_(layer.down.compute(self._act(hidden[:, :half]).mul_(hidden[:, half:])))
        return self._head.compute(self._norm(x[wanted]))

    def step(self, members: Sequence[Member], alone: Sequence[Member]) -> Step:
        """A step's layout for kernels; see kernels.Step."""
        return kernels.Step(self._groups, self._dim, members, alone)

    def _in_kernels(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor, flat: Flat, step: Step) -> Tensor:
        """The last norm's answer for `wanted`. What a half of a layer adds is added where the next norm reads."""
        num_tokens, heads, kv_heads, dim = len(x), self._heads, self._kv_heads, self._dim
        more: Tensor | None = None
        for number, layer in enumerate(self._layers):
            joined = layer.qkv.compute(layer.before_attention.after(x, more)).view(
                num_tokens, heads + 2 * kv_heads, dim
            )
            step.rotate(joined, cos, sin, layer.query_norm, layer.key_norm, number)
            queries = joined[:, :heads].view(num_tokens, kv_heads, self._groups, dim)
            mixed = attend_flat(queries, joined, flat, number, layer.style, self._scale)
            more = layer.out.compute(mixed.view(num_tokens, heads * dim))
            hidden = layer.gate_up.compute(layer.before_mlp.after(x, more))
            more = layer.down.compute(kernels.gated(hidden))
        assert more is not None, "a model without layers"
        return self._norm.after(x[wanted], more[wanted])

    def _attention(self, x: Tensor, layer: Layer, number: int, cos: Tensor, sin: Tensor, flat: Flat) -> None:
        """Adds what attention makes of x [T, hidden] to it."""
        num_tokens, heads, kv_heads, dim = len(x), self._heads, self._kv_heads, self._dim
        joined = layer.qkv.compute(layer.before_attention(x)).view(num_tokens, heads + 2 * kv_heads, dim)
        turned = joined[:, : heads + kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned[:, :heads] = layer.query_norm(turned[:, :heads])
            turned[:, heads:] = layer.key_norm(turned[:, heads:])
        swapped = turned.unflatten(-1, (2, dim // 2)).flip(-2).view(turned.shape)
        turned.mul_(cos[:, None]).addcmul_(swapped, sin[:, None])
        queries = joined[:, :heads].view(num_tokens, kv_heads, heads // kv_heads, dim)
        new = joined[:, heads:].view(num_tokens, 2, kv_heads, dim)
        mixed = attend_flat(queries, new, flat, number, layer.style, self._scale)
        x.add_(layer.out.compute(mixed.view(num_tokens, heads * dim)))


def turns(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, d] of rotary positions [T] (Su et al. 2021), sin with the sign of the half it is for."""
    cos, sin = (part[0] for part in rotary(x[None], positions[None]))
    half = cos.shape[-1] // 2
    return cos.contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], -1)


def window_of(layer: Any, config: Any) -> int | None:
    """How many tokens a plain layer sees, its own among them; None: all."""
    told = config if type(layer).__name__ == "MistralDecoderLayer" else layer.self_attn
    return getattr(told, "sliding_window", None)


def _layer(products: dict[str, Product], number: int, layer: Any, config: Any) -> Layer:
    path, attention = f"model.layers.{number}", layer.self_attn
    return Layer(
        before_attention=_norm(layer.input_layernorm),
        before_mlp=_norm(layer.post_attention_layernorm),
        qkv=products[f"{path}.self_attn.q_proj+k_proj+v_proj"],
        out=products[f"{path}.self_attn.o_proj"],
        gate_up=products[f"{path}.mlp.gate_proj+up_proj"],
        down=products[f"{path}.mlp.down_proj"],
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        style=Style(window=window_of(layer, config)),
    )


def _norm(module: Any) -> Norm:
    weight: Tensor = module.weight
    return Norm(weight, float(module.variance_epsilon))
