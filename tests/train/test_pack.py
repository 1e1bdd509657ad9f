import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.errors import Refused
from honed.model.tree import build
from honed.model.tree_model import TreeModel
from honed.train.pack import check, micro_batches, pack
from honed.train.policy import policy_gradient
from honed.train.settings import PolicySettings
from honed.types import Sample

from .models import VOCABULARY, family, gradient, relative, sample, tiny

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=10)


def total_gradient(batches: list[list[int]], samples: list[Sample]) -> torch.Tensor:
    model = tiny()
    reader = TreeModel(model)
    for indices in batches:
        batch = pack(reader, [samples[index] for index in indices])
        lp = reader.logprobs(reader.hidden(batch.tree), batch.rows, batch.targets, batch.temperatures)
        policy_gradient(lp, batch, PolicySettings(kl=0.1))[0].backward()
    return gradient(model)


@given(SEQUENCES, st.integers(1, 40), st.integers(0, 3))
def test_batches_hold_each_sample_once_within_the_budget(rows: list[list[int]], budget: int, num_pairs: int) -> None:
    samples = [sample(tokens, 1) for tokens in rows]
    for number in range(min(num_pairs, len(samples) // 2)):
        for index, side in ((2 * number, "chosen"), (2 * number + 1, "rejected")):
            samples[index] = msgspec.structs.replace(samples[index], pair=f"{number}:{side}")
    batches = micro_batches(samples, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
    for batch in batches:
        units = {samples[index].pair.split(":")[0] if samples[index].pair else f"alone {index}" for index in batch}
        assert len(units) == 1 or len(build([samples[index].tokens for index in batch])) <= budget
    for number in range(min(num_pairs, len(samples) // 2)):
        assert any({2 * number, 2 * number + 1} <= set(batch) for batch in batches)


@pytest.mark.parametrize("batches", [[[0], [1], [2], [3], [4], [5]], [[5, 3, 1], [0, 2, 4]]])
def test_the_cut_does_not_change_the_gradient(batches: list[list[int]]) -> None:
    samples = family()
    together = total_gradient([list(range(len(samples)))], samples)
    assert relative(total_gradient(batches, samples), together) < 1e-9


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 60))
def test_no_budget_changes_the_gradient(budget: int) -> None:
    samples = family()
    together = total_gradient([list(range(len(samples)))], samples)
    assert relative(total_gradient(micro_batches(samples, budget), samples), together) < 1e-9


def test_only_needed_rows_are_predicted_and_the_tail_is_not_run() -> None:
    reader = TreeModel(tiny())
    row = sample([1, 2, 3, 4, 5, 6], 2)
    weights = np.array([0, 0, 0.5, 0, 0, 0], np.float32)
    batch = pack(reader, [msgspec.structs.replace(row, weights=weights)])
    assert batch.tree.tokens.tolist() == [1, 2]
    assert (batch.rows.tolist(), batch.targets.tolist(), batch.weights.tolist()) == ([1], [3], [0.5])


def test_a_trunk_row_predicts_each_childs_own_next_token() -> None:
    batch = pack(TreeModel(tiny()), [sample([1, 2, 3, 9], 2), sample([1, 2, 4, 8, 9], 3)])
    assert batch.tree.tokens.tolist() == [1, 2, 3, 4, 8]
    assert batch.rows.tolist() == [1, 2, 1, 3, 4]
    assert batch.targets.tolist() == [3, 9, 4, 8, 9]
    assert batch.owner.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights": np.ones(4, np.float32)}, "first token"),
        ({"weights": np.zeros(3, np.float32)}, "weights has shape"),
        ({"advantages": np.array([0, 0, np.nan, 0], np.float32)}, "advantages holds"),
        ({"weights": np.array([0, 0, np.inf, 0], np.float32)}, "weights holds"),
        ({"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_malformed_samples_are_refused_by_name(change: dict, named: str) -> None:
    bad = msgspec.structs.replace(sample([1, 2, 3, 4], 2, branch="turn_3"), **change)
    with pytest.raises(Refused, match=named) as error:
        check(bad, VOCABULARY)
    assert "turn_3" in str(error.value)


def test_not_finite_on_context_is_nobodys_business() -> None:
    values = np.array([np.nan, -1, -1, -1], np.float32)
    check(msgspec.structs.replace(sample([1, 2, 3, 4], 2), logprobs=values), VOCABULARY)


def test_half_pairs_and_mixed_batches_are_refused() -> None:
    reader = TreeModel(tiny())
    one, other = sample([1, 2, 3], 1, pair="a:chosen"), sample([1, 2, 4], 1, pair="a:chosen")
    with pytest.raises(Refused, match="only its chosen side"):
        pack(reader, [one])
    with pytest.raises(Refused, match="one '<id>:chosen'"):
        pack(reader, [one, other])
    with pytest.raises(Refused, match="has no logprobs"):
        pack(reader, [sample([1, 2, 3], 1), sample([1, 2, 3], 1, logprobs=None)])
