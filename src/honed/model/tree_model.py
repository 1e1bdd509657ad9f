"""A causal language model trained on trees of sequences: hidden states once a prefix, log-probabilities in chunks.

Before it is used it is compared with transformers' own forward pass on a few tokens: an architecture that the layout of
tree.py would compute wrongly is refused by name, never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from honed.errors import Refused
from honed.model import attention
from honed.model.fused import fuse
from honed.model.tree import NAME, Tree, build

try:
    from honed.model.dense_tree import DenseTree
except ImportError:  # numba is not installed
    DenseTree = None  # type: ignore[assignment, misc]

CHECKED = 12
"""Tokens of the comparison that a model must pass."""


class TreeModel:
    """A causal language model of transformers (LoRA layers injected or not) that reads trees.

    Raises Refused, naming it, for a model whose log-probabilities come out otherwise than transformers' own: one that
    is more than attention over keys and values, or whose logits are more than a scaled, capped product.
    """

    def __init__(self, causal: Any) -> None:
        ids = torch.arange(CHECKED) * 7 % causal.config.vocab_size
        expected = _own_logprobs(causal, ids)
        causal.set_attn_implementation(NAME)
        fuse(causal)
        self.causal, self.body = causal, causal.base_model
        self.head: torch.nn.Linear = causal.get_output_embeddings()
        self.vocabulary = self.head.out_features
        self.device = str(next(causal.parameters()).device)
        self.dtype: torch.dtype = next(causal.parameters()).dtype
        self.autocast: torch.dtype | None = None
        """The number format of the layers' products, where it is not that of the weights."""
        self._dense = None if DenseTree is None else DenseTree.of(causal)
        self._bend, self._limit = Bend.of(causal.config), attention.position_limit(causal.config)
        self._check(ids, expected)

    @property
    def has_kernels(self) -> bool:
        """Whether norms, gates and attention run in kernels."""
        return self._dense is not None

    def checkpoint(self) -> None:
        """From now on a backward pass computes each layer again instead of keeping what it needs of it.

        Only the layers' own flag is set, for transformers looks at it: their insides stay in evaluation mode, without
        dropout and without drawing experts.
        """
        if self._dense is not None:
            self._dense.checkpoint = True
        self.causal.activation_checkpointing_enable({"use_reentrant": False})
        for module in self.causal.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True

    def build(self, sequences: Sequence[np.ndarray]) -> Tree:
        """The tree of `sequences` on this model's device. Raises Refused for one that is too long for this model."""
        longest = max(map(len, sequences))
        if self._limit is not None and longest > self._limit:
            raise Refused(
                f"a sequence of {longest} tokens is over the {self._limit} up to which this model turns positions "
                "alike; shorten the samples."
            )
        return build(sequences, device=self.device)

    def hidden(self, tree: Tree) -> Tensor:
        """The last hidden states [T, hidden], after the final norm."""
        if self._dense is not None and self.autocast is None:
            return self._dense(tree)
        device = self.device.partition(":")[0]
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            output = self.body(
                input_ids=tree.tokens[None], position_ids=tree.positions[None], tree=tree, use_cache=False
            )
        return output.last_hidden_state[0].to(self.dtype)

    def logprobs(
        self, hidden: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor, num_chunk: int = 256
    ) -> Tensor:
        """Log-probability [N] of token targets[i] after row rows[i], at temperatures[i]: log_softmax(logits / T).

        At most `num_chunk` rows of logits exist at a time. N may be 0. A head that learns gets its gradient too.
        """
        if type(self.head) is not torch.nn.Linear:
            raise Refused("the output head has an adapter, which is not built here; leave lm_head out of lora.targets.")
        head = (self.head.weight, self.head.bias)
        product = _LearningHead if self.head.weight.requires_grad else _FrozenHead
        return product.apply(hidden[rows], *head, targets, temperatures, num_chunk, self._bend)

    def _check(self, ids: Tensor, expected: Tensor) -> None:
        name = type(self.causal).__name__
        try:
            with torch.no_grad():
                hidden = self.hidden(self.build([ids.numpy()]))
                rows = torch.arange(CHECKED - 1, device=self.device)
                ones = torch.ones(CHECKED - 1, dtype=self.dtype, device=self.device)
                found = self.logprobs(hidden, rows, ids[1:].to(self.device), ones).cpu()
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # a foreign forward pass
            raise Refused(f"a {name} cannot be trained on shared prefixes: {error}.") from error
        apart = float((found.double() - expected).norm() / (expected - expected.mean()).norm())
        if not apart <= (1e-3 if self.dtype in (torch.float32, torch.float64) else 0.2):
            raise Refused(
                f"a {name} would be trained wrongly: on shared prefixes its log-probabilities lie {apart:.1%} of their "
                "spread from transformers'. Something in it is not attention over keys and values, or bends its logits."
            )


def _own_logprobs(causal: Any, ids: Tensor) -> Tensor:
    """Log-probabilities [len(ids) - 1] by transformers' own forward pass."""
    causal.set_attn_implementation("eager")
    with torch.no_grad():
        logits = causal(input_ids=ids[None].to(next(causal.parameters()).device), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1).cpu().gather(1, ids[1:, None])[:, 0]


class Bend(NamedTuple):
    """How logits come from the product x with the output embedding: s = scale x, or cap tanh(s / cap) where capped."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Bend:
        """From a transformers config: Cohere multiplies, Granite divides, Gemma and others cap."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def apply(self, product: Tensor) -> Tensor:
        """The logits, in place."""
        if self.scale != 1.0:
            product *= self.scale
        return product if self.cap is None else product.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logit / d product, from the logits."""
        return self.scale if self.cap is None else (1 - (logits / self.cap).square()) * self.scale


class _FrozenHead(torch.autograd.Function):
    """log softmax(b(h W') / T)[target] per row, with its gradient by h kept instead of the logits.

    d/dh = ((one hot of target - softmax) b') W / T is one vector a row, so the forward pass makes it while the logits
    are at hand: memory is rows x hidden, and the backward pass has no product left to do.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor,
        chunk: int, bend: Bend,
    ) -> Tensor:  # fmt: skip
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        pieces = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            inverse, wanted = temperatures[part, None].reciprocal(), targets[part, None]
            logits = bend.apply(_product(hidden[part], weight, bias))
            slope = bend.slope(logits)
            logits.mul_(inverse)
            logits -= logits.logsumexp(-1, keepdim=True)
            pieces.append(logits.gather(1, wanted)[:, 0])
            if slopes is not None:
                expected = logits.exp_() if isinstance(slope, float) else logits.exp_().mul_(slope)
                own = slope if isinstance(slope, float) else slope.gather(1, wanted).to(weight.dtype)
                pulled = expected.to(weight.dtype) @ weight
                if isinstance(slope, float) and slope != 1.0:
                    pulled *= slope
                slopes[part] = (weight[targets[part]] * own - pulled) * inverse.to(weight.dtype)
        ctx.save_for_backward(slopes)
        return torch.cat(pieces) if pieces else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None].to(slopes.dtype) * slopes, None, None, None, None, None, None


class _LearningHead(torch.autograd.Function):
    """The same where W' and its bias learn too. Their gradient mixes rows by what comes in from above, which is known
    only in the backward pass: there the logits are made again, a chunk at a time, instead of being kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor,
        chunk: int, bend: Bend,
    ) -> Tensor:  # fmt: skip
        pieces, normalisers = [], []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = bend.apply(_product(hidden[part], weight, bias)).mul_(temperatures[part, None].reciprocal())
            normalisers.append(logits.logsumexp(-1, keepdim=True))
            pieces.append((logits.gather(1, targets[part, None]) - normalisers[-1])[:, 0])
        kept = torch.cat(normalisers) if normalisers else hidden.new_zeros(0, 1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, kept)
        ctx.chunk, ctx.bend = chunk, bend
        return torch.cat(pieces) if pieces else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, targets, temperatures, normalisers = ctx.saved_tensors
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            inverse = temperatures[part, None].reciprocal()
            logits = ctx.bend.apply(_product(hidden[part], weight, bias))
            slope = ctx.bend.slope(logits) * (inverse * grads[0][part, None]).to(logits.dtype)
            # d/dlogits = one hot of the target - softmax
            delta = logits.mul_(inverse).sub_(normalisers[part]).exp_().neg_()
            delta.scatter_add_(1, targets[part, None], torch.ones_like(delta[:, :1]))
            delta = delta.mul_(slope).to(weight.dtype)
            dhidden[part] = delta @ weight
            dweight.addmm_(delta.t(), hidden[part])
            if dbias is not None:
                dbias += delta.sum(0)
        return dhidden, dweight, dbias, None, None, None, None


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In single precision at least: the softmax of half precision would lose the small ones."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return functional.linear(hidden, weight, bias).to(wide)
