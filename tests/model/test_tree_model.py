from typing import Any

import numpy as np
import pytest
import torch
from engine.tiny import KINDS
from engine.tiny import tiny as architecture
from hypothesis import given, settings
from hypothesis import strategies as st
from train.models import VOCABULARY, family, gradient, naive_logprobs, relative, shared_gradient, tiny

from honed.errors import Refused
from honed.model.tree_model import Bend, TreeModel

try:
    from honed.model.compiled import gomp
except ImportError:  # numba is not installed
    gomp = lambda: None  # noqa: E731

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


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
    found, num_distinct = shared_gradient(model, samples)
    assert num_distinct < sum(len(sample.tokens) - 1 for sample in samples)
    assert relative(found, expected) < tolerance


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_has_the_gradients_of_each_sequence_alone(kind: str) -> None:
    """Prefixes and tails longer than the windows; norms are trained, whose gradients pass through every layer."""
    model = architecture(kind).model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    same_gradients(model, 1e-4)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_plain_layers_run_in_kernels_with_the_same_gradients(kind: str, checkpoint: bool) -> None:
    """Every weight is trained."""
    if gomp() is None:
        pytest.skip("torch's threads are not libgomp's here")
    reader = same_gradients(architecture(kind, head_dim=16).model.float(), 1e-5, checkpoint)
    assert reader.has_kernels


def same_gradients(model: Any, tolerance: float, checkpoint: bool = False) -> TreeModel:
    """Compares with transformers' own, sequence by sequence, and returns the reader."""
    rng = np.random.default_rng(5)
    trunk = rng.integers(0, 97, 40)
    sequences = [np.concatenate([trunk[: 40 - 9 * i], rng.integers(0, 97, 30 + i)]) for i in range(3)]
    model.set_attn_implementation("eager")
    for ids in map(torch.from_numpy, sequences):
        logits = model(input_ids=ids[None]).logits[0, :-1]
        logits.log_softmax(-1).gather(1, ids[1:, None]).sum().backward()
    expected = gradient(model)
    reader = TreeModel(model)
    if checkpoint:
        reader.checkpoint()
    tree = reader.build(sequences)
    rows = torch.from_numpy(np.concatenate([rows[:-1] for rows in tree.rows]))
    targets = torch.from_numpy(np.concatenate([ids[1:] for ids in sequences]))
    reader.logprobs(reader.hidden(tree), rows, targets, torch.ones(len(rows)), 16).sum().backward()
    assert relative(gradient(model), expected) < tolerance
    return reader


def test_checkpointing_keeps_less_and_changes_no_gradient() -> None:
    kept: dict[bool, int] = {}
    gradients = {}
    for checkpoint in (False, True):
        reader = TreeModel(tiny(layers=4))
        if checkpoint:
            reader.checkpoint()
        samples, sizes = family(), []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        )
        with hooks:
            tree = reader.build([sample.tokens for sample in samples])
            rows = torch.from_numpy(np.concatenate([rows[:-1] for rows in tree.rows]))
            targets = torch.from_numpy(np.concatenate([sample.tokens[1:] for sample in samples]).astype(np.int64))
            ones = torch.ones(len(rows), dtype=torch.float64)
            lp = reader.logprobs(reader.hidden(tree), rows, targets, ones)
            kept[checkpoint] = sum(sizes)
        lp.sum().backward()
        gradients[checkpoint] = gradient(reader.causal)
    assert torch.equal(gradients[True], gradients[False])
    assert kept[True] < kept[False] / 4


def test_checkpointing_leaves_everything_inside_the_layers_in_evaluation_mode() -> None:
    reader = TreeModel(architecture().model)
    reader.checkpoint()
    layers = list(reader.causal.model.layers)
    assert all(layer.training for layer in layers)
    assert not any(module.training for layer in layers for module in list(layer.modules())[1:])


def test_a_sequence_over_the_limit_of_its_positions_is_refused() -> None:
    reader = TreeModel(tiny())
    reader._limit = 4
    reader.build([np.arange(4)])
    with pytest.raises(Refused, match="a sequence of 5 tokens is over the 4"):
        reader.build([np.arange(5)])


@pytest.mark.parametrize("bend", [Bend(), Bend(0.5), Bend(1.0, 3.0), Bend(0.25, 2.0)])
def test_bent_logits_have_the_gradient_of_the_formula(bend: Bend) -> None:
    reader = TreeModel(tiny())
    reader._bend = bend
    hidden = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rows, targets = torch.tensor([0, 2, 5]), torch.tensor([1, 7, 3])
    product = hidden[rows] @ reader.head.weight.T * bend.scale
    logits = product if bend.cap is None else torch.tanh(product / bend.cap) * bend.cap
    temperatures = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    expected = (logits / temperatures[:, None]).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (wanted,) = torch.autograd.grad(expected.sum(), hidden)
    found = reader.logprobs(hidden, rows, targets, temperatures, 2)
    (slope,) = torch.autograd.grad(found.sum(), hidden)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert torch.allclose(slope, wanted, rtol=1e-10, atol=1e-12)


def test_what_would_be_trained_wrongly_is_refused_by_name() -> None:
    model = tiny()
    model.config.final_logit_softcapping = 3.0  # a Llama never applies it
    with pytest.raises(Refused, match="a LlamaForCausalLM would be trained wrongly"):
        TreeModel(model)


def test_a_head_with_an_adapter_is_refused() -> None:
    reader = TreeModel(tiny())
    reader.head = torch.nn.Sequential(reader.head)
    with pytest.raises(Refused, match="lm_head"):
        reader.logprobs(torch.zeros(1, 32), torch.tensor([0]), torch.tensor([VOCABULARY - 1]), torch.ones(1))
