import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from honed.errors import Refused
from honed.model import tree as trees
from honed.model.tree import Node, build, common

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


@given(SEQUENCES)
def test_each_sequence_reads_back_and_each_prefix_stands_once(sequences: list[list[int]]) -> None:
    tree = build([np.array(sequence) for sequence in sequences])
    for sequence, rows in zip(sequences, tree.rows, strict=True):
        assert tree.tokens[rows].tolist() == sequence
        assert tree.positions[rows].tolist() == list(range(len(sequence)))
    prefixes = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert len(tree) == len(prefixes)


def _sees(node: Node) -> np.ndarray:
    size, mask = node.stop - node.start, node.mask(None, torch.zeros(0))
    return np.tril(np.ones((size, size), bool)) if mask is None else (mask == 0).numpy()


@given(SEQUENCES)
def test_a_row_sees_its_own_prefix_and_nothing_else(sequences: list[list[int]]) -> None:
    tree = build([np.array(sequence) for sequence in sequences])
    sees = np.zeros((len(tree), len(tree)), bool)
    for node in tree.nodes:
        keys = np.concatenate([np.arange(tree.nodes[i].start, tree.nodes[i].stop) for i in node.path])
        mask = _sees(node)
        for row in range(node.stop - node.start):
            sees[node.start + row, keys[mask[row]]] = True
    for rows in tree.rows:
        for index, row in enumerate(rows):
            assert np.flatnonzero(sees[row]).tolist() == sorted(rows[: index + 1].tolist())


def test_common() -> None:
    assert common(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2
    assert common(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert common(np.array([], int), np.array([1])) == 0


def test_a_window_hides_what_lies_further_back() -> None:
    """[0 1 2 3 4] and [0 1 2 5] under a window of 2: each token sees itself and the one before."""
    tree = build([np.arange(5), np.array([0, 1, 2, 5])])
    like = torch.zeros(0)
    trunk, own, other = tree.nodes
    low = float("-inf")
    assert trunk.mask(None, like) is None
    assert trunk.mask(2, like).tolist() == [[0, low, low], [0, 0, low], [low, 0, 0]]
    assert own.mask(2, like).tolist() == [[low, low, 0, 0, low], [low, low, low, 0, 0]]
    assert other.mask(2, like).tolist() == [[low, low, 0, 0]]
    assert other.mask(9, like) is other.mask(None, like)


def test_what_the_layout_cannot_honour_is_refused() -> None:
    tree = build([np.arange(5)])
    heads = torch.zeros(1, 2, 5, 4)
    with pytest.raises(Refused, match="dropout"):
        trees.attend(torch.nn.Identity(), heads, heads, heads, None, tree=tree, dropout=0.1)
    with pytest.raises(Refused, match="tree"):
        trees.attend(torch.nn.Identity(), heads, heads, heads, None)
