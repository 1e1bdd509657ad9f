"""Runs several sequences as one flat [1, T] row in which every shared prefix is computed once.

The sequences of a micro-batch (a group's attempts at one prompt, the branches of a conversation) form a prefix trie;
each node's tokens stand once in the row, at positions equal to their depth, and attend to their ancestors and causally
to themselves. Gradients equal those of the sequences run one by one. The tree travels to the attention function as the
forward keyword `tree`; there are no globals. What this does not do: losses (train/), serving's slots (attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from honed.errors import Refused
from honed.model.fused import fuse

NAME = "honed_tree"
LOGIT_SCALERS = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
"""Config keys by which some models bend their logits, with the value that bends nothing."""


class Node:
    """A run of tokens that several sequences share: [start, stop) of the flat row, after `path` (ancestors first)."""

    __slots__ = ("mask", "path", "start", "stop")

    def __init__(self, start: int, stop: int, path: tuple[int, ...]) -> None:
        self.start, self.stop, self.path = start, stop, path
        self.mask: Tensor | None = None


class Tree:
    """The trie of some sequences, laid out flat, parents before children.

    tokens and positions: int64 [T]. `rows[i]` (int64 [len of sequence i]) says where each token of sequence i stands.
    """

    def __init__(self, tokens: Tensor, positions: Tensor, nodes: list[Node], rows: list[np.ndarray]) -> None:
        self.tokens, self.positions, self.nodes, self.rows = tokens, positions, nodes, rows
        self.sizes = [node.stop - node.start for node in nodes]

    def __len__(self) -> int:
        return len(self.tokens)


class _Draft:
    """A trie node while sequences are still being inserted."""

    __slots__ = ("children", "index", "tokens")

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.children: dict[int, _Draft] = {}
        self.index = -1


def build(sequences: Sequence[np.ndarray], *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tree:
    """The tree of `sequences` (1-d int arrays, none empty), with the masks that attention in `dtype` needs."""
    root = _Draft(np.empty(0, np.int64))
    for sequence in sequences:
        _insert(root, np.asarray(sequence, np.int64))
    nodes, tokens, positions = _lay_out(root)
    rows = [_walk(root, np.asarray(sequence, np.int64), nodes) for sequence in sequences]
    for node in nodes:
        if len(node.path) > 1:
            before = sum(nodes[index].stop - nodes[index].start for index in node.path[:-1])
            node.mask = _causal_after(before, node.stop - node.start, dtype).to(device)
    return Tree(torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device), nodes, rows)


def common(first: np.ndarray, second: np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def _insert(root: _Draft, sequence: np.ndarray) -> None:
    node, rest = root, sequence
    while len(rest):
        child = node.children.get(int(rest[0]))
        if child is None:
            node.children[int(rest[0])] = _Draft(rest)
            return
        shared = common(child.tokens, rest)
        if shared < len(child.tokens):  # the child parts here: its tail becomes a child of its head
            tail = _Draft(child.tokens[shared:])
            tail.children = child.children
            child.tokens, child.children = child.tokens[:shared], {int(tail.tokens[0]): tail}
        node, rest = child, rest[shared:]


def _lay_out(root: _Draft) -> tuple[list[Node], np.ndarray, np.ndarray]:
    nodes: list[Node] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    stack: list[tuple[_Draft, tuple[int, ...], int]] = [(child, (), 0) for child in reversed(root.children.values())]
    offset = 0
    while stack:
        draft, path, depth = stack.pop()
        draft.index, size = len(nodes), len(draft.tokens)
        nodes.append(Node(offset, offset + size, (*path, draft.index)))
        tokens.append(draft.tokens)
        positions.append(np.arange(depth, depth + size, dtype=np.int64))
        offset += size
        stack += [(child, nodes[-1].path, depth + size) for child in reversed(draft.children.values())]
    return nodes, np.concatenate(tokens), np.concatenate(positions)


def _walk(root: _Draft, sequence: np.ndarray, nodes: list[Node]) -> np.ndarray:
    node, rest, found = root, sequence, []
    while len(rest):
        node = node.children[int(rest[0])]
        found.append(np.arange(nodes[node.index].start, nodes[node.index].stop, dtype=np.int64))
        rest = rest[len(node.tokens) :]
    return np.concatenate(found)


def _causal_after(before: int, size: int, dtype: torch.dtype) -> Tensor:
    """Additive [size, before + size]: row i sees all `before` keys and its own up to i."""
    mask = torch.zeros(size, before + size, dtype=dtype)
    mask[:, before:] = torch.full((size, size), float("-inf"), dtype=dtype).triu(1)
    return mask


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].

    Raises Refused for what the layout can't honour: no tree, soft caps, attention sinks, a window shorter than a path.
    """
    if tree is None:
        raise Refused(f"the {NAME!r} attention runs only through model/tree.py, which passes the tree.")
    _refuse_extras(tree, kwargs)
    queries, keys, values = (tensor.split(tree.sizes, dim=2) for tensor in (query, key, value))
    outputs = []
    for node, own in zip(tree.nodes, queries, strict=True):
        path_keys, path_values = (_along(node.path, parts) for parts in (keys, values))
        output = functional.scaled_dot_product_attention(
            own, path_keys, path_values, node.mask, is_causal=node.mask is None, scale=scaling, enable_gqa=True
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _along(path: tuple[int, ...], parts: Sequence[Tensor]) -> Tensor:
    return parts[path[0]] if len(path) == 1 else torch.cat([parts[index] for index in path], dim=2)


def _refuse_extras(tree: Tree, kwargs: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise Refused(f"this model's attention uses {name!r}, which training on shared prefixes does not honour.")
    window = kwargs.get("sliding_window")
    if window is not None and max(len(row) for row in tree.rows) > window:
        raise Refused(f"a sequence is longer than the model's sliding window of {window} tokens; shorten the samples.")
    if kwargs.get("dropout"):
        raise Refused("attention dropout would differ between sequences that share a prefix; set it to 0.")


AttentionInterface.register(NAME, attend)


class TreeModel:
    """A causal language model of transformers (LoRA layers injected or not) that reads trees.

    Raises Refused for a model whose logits are not its last hidden state times the output embedding.
    """

    def __init__(self, causal: Any) -> None:
        for key, neutral in LOGIT_SCALERS.items():
            if getattr(causal.config, key, None) not in (None, neutral):
                raise Refused(f"this model sets {key!r}, so its logits are more than a product; it can't be trained.")
        causal.set_attn_implementation(NAME)
        fuse(causal)
        self.causal, self.body = causal, causal.base_model
        self.head: torch.nn.Linear = causal.get_output_embeddings()
        self.vocabulary = self.head.out_features
        self.device = str(next(causal.parameters()).device)
        self.dtype: torch.dtype = next(causal.parameters()).dtype

    def build(self, sequences: Sequence[np.ndarray]) -> Tree:
        """The tree of `sequences` on this model's device, in its dtype."""
        return build(sequences, device=self.device, dtype=self.dtype)

    def hidden(self, tree: Tree) -> Tensor:
        """The last hidden states [T, hidden], after the final norm."""
        output = self.body(input_ids=tree.tokens[None], position_ids=tree.positions[None], tree=tree, use_cache=False)
        return output.last_hidden_state[0]

    def logprobs(
        self, hidden: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor, num_chunk: int = 256
    ) -> Tensor:
        """Log-probability [N] of token targets[i] after row rows[i], at temperatures[i]: log_softmax(logits / T).

        At most `num_chunk` rows of logits exist at a time. N may be 0.
        """
        if self.head.weight.requires_grad or not isinstance(self.head, torch.nn.Linear):
            raise Refused("the output embedding is being trained, which needs its full logits; leave lm_head out.")
        return _Logprobs.apply(hidden[rows], self.head.weight, self.head.bias, targets, temperatures, num_chunk)


class _Logprobs(torch.autograd.Function):
    """log softmax(h W' / T)[target] per row, with its gradient by h kept instead of the logits.

    d/dh = (W[target] - softmax(h W' / T) W) / T is one vector a row, so the forward pass makes it while the logits are
    at hand: memory is rows x hidden, and the backward pass has no product left to do.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor, chunk: int
    ) -> Tensor:
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        pieces = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            inverse = temperatures[part, None].reciprocal()
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            logits = functional.linear(hidden[part], weight, bias).to(wide).mul_(inverse)
            logits -= logits.logsumexp(-1, keepdim=True)
            pieces.append(logits.gather(1, targets[part, None])[:, 0])
            if slopes is not None:
                expected = logits.exp_().to(weight.dtype) @ weight
                slopes[part] = (weight[targets[part]] - expected) * inverse.to(weight.dtype)
        ctx.save_for_backward(slopes)
        return torch.cat(pieces) if pieces else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None].to(slopes.dtype) * slopes, None, None, None, None, None
