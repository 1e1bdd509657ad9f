"""Runs several sequences as one flat [1, T] row in which every shared prefix is computed once.

The sequences of a micro-batch (a group's attempts at one prompt, the branches of a conversation) form a prefix trie;
each node's tokens stand once in the row, at positions equal to their depth, and attend to their ancestors and causally
to themselves. Gradients equal those of the sequences run one by one. The tree travels to the attention function as the
forward keyword `tree`; there are no globals. What this does not do: losses (train/), serving's slots (attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from honed.errors import Refused

try:
    from honed.model import tree_attention
except ImportError:  # numba is not installed
    tree_attention = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from honed.model.tree_attention import Layout

NAME = "honed_tree"


class Node:
    """A run of tokens that several sequences share: [start, stop) of the flat row, after `path` (ancestors first) and
    so at the depths `before` and beyond."""

    __slots__ = ("_masks", "before", "path", "start", "stop")

    def __init__(self, start: int, stop: int, path: tuple[int, ...], before: int) -> None:
        self.start, self.stop, self.path, self.before = start, stop, path, before
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Additive [size, before + size] of like's type and place; None: plainly causal, no token before the node."""
        size, length = self.stop - self.start, self.before + self.stop - self.start
        window = None if window is None or window >= length else window
        if not self.before and window is None:
            return None
        if window not in self._masks:
            depths, keys = torch.arange(self.before, length)[:, None], torch.arange(length)
            hidden = keys > depths if window is None else (keys > depths) | (keys <= depths - window)
            mask = torch.zeros(size, length, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask.to(like.device)
        return self._masks[window]


class Tree:
    """The trie of some sequences, laid out flat, parents before children.

    tokens and positions: int64 [T]. `rows[i]` (int64 [len of sequence i]) says where each token of sequence i stands.
    """

    def __init__(self, tokens: Tensor, positions: Tensor, nodes: list[Node], rows: list[np.ndarray]) -> None:
        self.tokens, self.positions, self.nodes, self.rows = tokens, positions, nodes, rows
        self.sizes = [node.stop - node.start for node in nodes]
        self._layouts: dict[tuple[int, int], Layout] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def layout(self, groups: int, window: int) -> Layout:
        """As kernels read it, for `groups` query heads a key head; a window of 0 sees all."""
        if window and window >= max(node.before + node.stop - node.start for node in self.nodes):
            window = 0
        if (groups, window) not in self._layouts:
            self._layouts[groups, window] = tree_attention.Layout(self.nodes, groups, window)
        return self._layouts[groups, window]


class _Draft:
    """A trie node while sequences are still being inserted."""

    __slots__ = ("children", "index", "tokens")

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.children: dict[int, _Draft] = {}
        self.index = -1


def build(sequences: Sequence[np.ndarray], *, device: str = "cpu") -> Tree:
    """The tree of `sequences` (1-d int arrays, none empty)."""
    root = _Draft(np.empty(0, np.int64))
    for sequence in sequences:
        _insert(root, np.asarray(sequence, np.int64))
    nodes, tokens, positions = _lay_out(root)
    rows = [_walk(root, np.asarray(sequence, np.int64), nodes) for sequence in sequences]
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
        nodes.append(Node(offset, offset + size, (*path, draft.index), depth))
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

    Sliding windows, soft caps and attention sinks are honoured. Raises Refused without a tree, and for dropout.
    """
    if tree is None:
        raise Refused(f"the {NAME!r} attention runs only through model/tree.py, which passes the tree.")
    if kwargs.get("dropout"):
        raise Refused("attention dropout would differ between sequences that share a prefix; set it to 0.")
    softcap, sinks, window = (kwargs.get(name) for name in ("softcap", "s_aux", "sliding_window"))
    if softcap is None and sinks is None and _has_kernel(query, key, value):
        layout, scale = tree.layout(query.shape[1] // key.shape[1], window or 0), query.shape[-1] ** -0.5
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        mixed = tree_attention.TreeAttention.apply(*rows, None, None, layout, scale if scaling is None else scaling)
        return mixed[None], None
    queries, keys, values = (tensor.split(tree.sizes, dim=2) for tensor in (query, key, value))
    outputs = []
    for node, own in zip(tree.nodes, queries, strict=True):
        path_keys, path_values = (_along(node.path, parts) for parts in (keys, values))
        mask = node.mask(window, own)
        if softcap is None and sinks is None:
            output = functional.scaled_dot_product_attention(
                own, path_keys, path_values, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        else:
            output = _bent(own, path_keys, path_values, mask, scaling, softcap, sinks)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        tree_attention is not None and query.device.type == "cpu" and query.dtype == torch.float32
        and key.shape == value.shape and tree_attention.fit(query.shape[1], key.shape[1], query.shape[-1])
    )  # fmt: skip


def _along(path: tuple[int, ...], parts: Sequence[Tensor]) -> Tensor:
    return parts[path[0]] if len(path) == 1 else torch.cat([parts[index] for index in path], dim=2)


def _bent(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention whose scores are capped (cap tanh(s / cap)) or share their weight with a sink, a logit a head."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1).to(scores.dtype)], -1)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, -1, dtype=wide).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


AttentionInterface.register(NAME, attend)
