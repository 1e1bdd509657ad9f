import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train.models import VOCABULARY, family, gradient, naive_logprobs, relative, tiny

from honed.errors import Refused
from honed.model import tree as trees
from honed.model.tree import TreeModel, build, common

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


@given(SEQUENCES)
def test_each_sequence_reads_back_and_each_prefix_stands_once(sequences: list[list[int]]) -> None:
    tree = build([np.array(sequence) for sequence in sequences])
    for sequence, rows in zip(sequences, tree.rows, strict=True):
        assert tree.tokens[rows].tolist() == sequence
        assert tree.positions[rows].tolist() == list(range(len(sequence)))
    prefixes = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert len(tree) == len(prefixes)


@given(SEQUENCES)
def test_a_row_sees_its_own_prefix_and_nothing_else(sequences: list[list[int]]) -> None:
    tree = build([np.array(sequence) for sequence in sequences])
    sees = np.zeros((len(tree), len(tree)), bool)
    for node in tree.nodes:
        keys = np.concatenate([np.arange(tree.nodes[i].start, tree.nodes[i].stop) for i in node.path])
        size = node.stop - node.start
        mask = np.tril(np.ones((size, size), bool)) if node.mask is None else (node.mask == 0).numpy()
        for row in range(size):
            sees[node.start + row, keys[mask[row]]] = True
    for rows in tree.rows:
        for index, row in enumerate(rows):
            assert np.flatnonzero(sees[row]).tolist() == sorted(rows[: index + 1].tolist())


def test_common() -> None:
    assert common(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2
    assert common(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert common(np.array([], int), np.array([1])) == 0


@settings(deadline=None, max_examples=15)
@given(SEQUENCES, st.integers(1, 7))
def test_hidden_states_and_logprobs_equal_those_of_each_sequence_alone(sequences: list[list[int]], chunk: int) -> None:
    model = tiny()
    arrays = [np.array([*sequence, 1]) for sequence in sequences]
    alone = [model(input_ids=torch.from_numpy(array)[None]).logits[0].log_softmax(-1) for array in arrays]
    reader = TreeModel(model)
    tree = reader.build(arrays)
    hidden = reader.hidden(tree)
    for array, rows, expected in zip(arrays, tree.rows, alone, strict=True):
        targets = torch.from_numpy(array[1:])
        ones = torch.ones(len(targets), dtype=torch.float64)
        found = reader.logprobs(hidden, torch.from_numpy(rows[:-1]), targets, ones, chunk)
        assert torch.allclose(found, expected[:-1].gather(1, targets[:, None])[:, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_gradients_equal_those_of_each_sample_alone(dtype: torch.dtype, tolerance: float) -> None:
    model, samples = tiny(dtype), family()
    for sample in samples:
        weights = torch.from_numpy(sample.weights[1:]).to(dtype)
        (naive_logprobs(model, sample) * weights).sum().backward()
    expected = gradient(model)
    reader = TreeModel(model)
    tree = reader.build([sample.tokens for sample in samples])
    rows = np.concatenate([rows[:-1] for rows in tree.rows])
    targets = torch.from_numpy(np.concatenate([sample.tokens[1:] for sample in samples]).astype(np.int64))
    weights = torch.from_numpy(np.concatenate([sample.weights[1:] for sample in samples])).to(dtype)
    ones = torch.ones(len(rows), dtype=dtype)
    lp = reader.logprobs(reader.hidden(tree), torch.from_numpy(rows), targets, ones, 5)
    (lp * weights).sum().backward()
    assert len(tree) < len(targets)
    assert relative(gradient(model), expected) < tolerance


def test_temperature_divides_the_logits() -> None:
    model = tiny()
    ids = torch.tensor([3, 1, 4])
    expected = (model(input_ids=ids[None]).logits[0, 1] / 0.5).log_softmax(-1)[4]
    reader = TreeModel(model)
    hidden = reader.hidden(reader.build([ids.numpy()]))
    half = torch.tensor([0.5], dtype=torch.float64)
    assert reader.logprobs(hidden, torch.tensor([1]), torch.tensor([4]), half).item() == pytest.approx(expected.item())


def test_no_rows_at_all() -> None:
    reader = TreeModel(tiny())
    hidden = reader.hidden(reader.build([np.array([1, 2])]))
    none = torch.zeros(0, dtype=torch.int64)
    assert reader.logprobs(hidden, none, none, torch.zeros(0, dtype=torch.float64)).shape == (0,)


def test_what_the_layout_cannot_honour_is_refused() -> None:
    tree = build([np.arange(5)])
    heads = torch.zeros(1, 2, 5, 4)
    for extra in ({"softcap": 30.0}, {"s_aux": heads}, {"sliding_window": 4}, {"dropout": 0.1}):
        with pytest.raises(Refused):
            trees.attend(torch.nn.Identity(), heads, heads, heads, None, tree=tree, **extra)
    trees.attend(torch.nn.Identity(), heads, heads, heads, None, tree=tree, sliding_window=5)
    with pytest.raises(Refused, match="tree"):
        trees.attend(torch.nn.Identity(), heads, heads, heads, None)


def test_bent_logits_and_a_trained_output_embedding_are_refused() -> None:
    model = tiny()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(Refused, match="final_logit_softcapping"):
        TreeModel(model)
    reader = TreeModel(tiny())
    reader.head.weight.requires_grad_(True)
    with pytest.raises(Refused, match="lm_head"):
        reader.logprobs(torch.zeros(1, 32), torch.tensor([0]), torch.tensor([VOCABULARY - 1]), torch.ones(1))
