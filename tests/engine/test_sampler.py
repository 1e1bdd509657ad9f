"""The sampler against hand-computed distributions."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from honed.engine.sampler import check, draw, uniform
from honed.errors import BadRequest
from honed.types import Sampling

# probabilities of four tokens
ROW = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))


def counts(sampling: Sampling, num_draws: int = 4000) -> Counter[int]:
    rows = ROW.expand(num_draws, 4)
    draws = draw(rows, [sampling] * num_draws, [5] * num_draws, range(num_draws))
    return Counter(drawn.id for drawn in draws)


def logprobs(sampling: Sampling) -> dict[int, float]:
    """What the sampler says of each token that it draws."""
    draws = draw(ROW.expand(2000, 4), [sampling] * 2000, [1] * 2000, range(2000))
    return {drawn.id: drawn.logprob for drawn in draws}


def test_uniforms_are_spread_and_depend_on_seed_and_position() -> None:
    values = [uniform(3, position) for position in range(10000)]
    assert all(0.0 <= value < 1.0 for value in values)
    tenths = Counter(int(value * 10) for value in values)
    assert all(abs(tenths[i] - 1000) < 120 for i in range(10))
    assert uniform(3, 7) == uniform(3, 7)
    assert len({uniform(3, 7), uniform(4, 7), uniform(3, 8), uniform(-1, 7)}) == 4


def test_successive_uniforms_are_not_correlated() -> None:
    pairs = [(uniform(9, i) - 0.5, uniform(9, i + 1) - 0.5) for i in range(10000)]
    assert abs(sum(a * b for a, b in pairs) / len(pairs) * 12) < 0.05
    across = [(uniform(i, 4) - 0.5, uniform(i + 1, 4) - 0.5) for i in range(10000)]
    assert abs(sum(a * b for a, b in across) / len(across) * 12) < 0.05


def test_plain_sampling_follows_the_distribution() -> None:
    found = counts(Sampling())
    for id, share in enumerate((0.1, 0.4, 0.2, 0.3)):
        assert abs(found[id] / 4000 - share) < 0.03


def test_temperature_one_half_squares_the_probabilities() -> None:
    # squares 0.01, 0.16, 0.04, 0.09 over their sum 0.30
    expected = {0: 1 / 30, 1: 16 / 30, 2: 4 / 30, 3: 9 / 30}
    assert logprobs(Sampling(temperature=0.5)) == pytest.approx({i: math.log(p) for i, p in expected.items()}, abs=1e-5)


def test_top_k_keeps_the_likeliest_and_renormalises() -> None:
    assert logprobs(Sampling(top_k=2)) == pytest.approx({1: math.log(4 / 7), 3: math.log(3 / 7)}, abs=1e-5)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.05, {1: 1.0}), (0.4001, {1: 4 / 7, 3: 3 / 7}), (0.75, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9})],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: dict[int, float]) -> None:
    expected = {id: math.log(p) for id, p in kept.items()}
    assert logprobs(Sampling(top_p=top_p)) == pytest.approx(expected, abs=1e-5)


def test_top_p_comes_after_top_k() -> None:
    # of the two kept, 4/7 = 0.571 alone reaches 0.55 but not 0.6
    assert set(logprobs(Sampling(top_k=2, top_p=0.55))) == {1}
    assert set(logprobs(Sampling(top_k=2, top_p=0.6))) == {1, 3}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (2000, 0.5), (1500, 0.99), (7, 0.6), (0, 0.999)])
def test_filters_over_a_large_flat_vocabulary_equal_a_full_sort(top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    row = torch.log_softmax(torch.randn(5000) * 0.3, -1)
    values, order = row.sort(descending=True)
    probabilities = values[: top_k or None].exp()
    share = probabilities.cumsum(-1) / probabilities.sum()
    kept = set(order[: int((share < top_p).sum()) + 1].tolist())
    sampling = Sampling(top_k=top_k, top_p=top_p)
    draws = draw(row.expand(300, 5000), [sampling] * 300, [2] * 300, range(300))
    mass = math.log(sum(math.exp(row[id]) for id in kept))
    for drawn in draws:
        assert drawn.id in kept
        assert drawn.logprob == pytest.approx(row[drawn.id].item() - mass, abs=1e-3)


def test_min_p_keeps_what_reaches_a_share_of_the_likeliest() -> None:
    """.4 x .6 = .24 keeps .4 and .3; at temperature .5 (.16, .09) .6 of .16 keeps one."""
    assert logprobs(Sampling(min_p=0.6)) == pytest.approx({1: math.log(4 / 7), 3: math.log(3 / 7)}, abs=1e-5)
    assert set(logprobs(Sampling(min_p=0.6, temperature=0.5))) == {1}


def test_a_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    """Logits [1, 2, -1, 0] with 1 and 2 seen and a penalty of 2: [1, 1, -2, 0]."""
    row = torch.tensor([1.0, 2.0, -1.0, 0.0])
    bent = torch.log_softmax(torch.tensor([1.0, 1.0, -2.0, 0.0]), -1).tolist()
    sampling = Sampling(repetition_penalty=2.0)
    draws = draw(row.expand(2000, 4), [sampling] * 2000, [1] * 2000, range(2000), [[1, 2, 1]] * 2000)
    assert {drawn.id: drawn.logprob for drawn in draws} == pytest.approx(dict(enumerate(bent)), abs=1e-5)
    raw = torch.log_softmax(row, -1).tolist()
    assert {drawn.id: drawn.raw_logprob for drawn in draws} == pytest.approx(dict(enumerate(raw)), abs=1e-5)


def test_a_penalised_token_loses_the_greedy_choice() -> None:
    row, greedy = torch.tensor([1.9, 2.0]), Sampling(temperature=0.0, repetition_penalty=1.1)
    assert [drawn.id for drawn in draw(row.expand(2, 2), [greedy] * 2, [0] * 2, [0] * 2, [[1], []])] == [0, 1]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_draws_invert_the_cumulative_distribution_in_vocabulary_order(size: int) -> None:
    torch.manual_seed(size)
    row = torch.randn(size)
    row[torch.rand(size) < 0.3] = float("-inf")
    row[size // 2] = 1.0
    cumulative = torch.softmax(row.double(), -1).cumsum(-1)
    draws = draw(row.expand(400, size), [Sampling()] * 400, [7] * 400, range(400))
    for position, drawn in enumerate(draws):
        point = uniform(7, position)
        first = int((cumulative > point).nonzero()[0])
        near = min(abs(float(cumulative[id]) - point) for id in (drawn.id, first))
        assert drawn.id == first or near < 1e-6
        assert row[drawn.id] > float("-inf")


def test_a_temperature_too_near_to_zero_is_refused() -> None:
    for temperature in (1e-40, 9e-6):
        with pytest.raises(BadRequest, match="set it to 0"):
            check(Sampling(temperature=temperature))
    check(Sampling(temperature=1e-5))
    (drawn,) = draw(ROW[None] * 30, [Sampling(temperature=1e-5)], [0], [0])
    assert (drawn.id, drawn.logprob) == (1, 0.0)


def test_temperature_zero_takes_the_likeliest_with_certainty() -> None:
    (drawn,) = draw(ROW[None], [Sampling(temperature=0.0)], [0], [0])
    assert (drawn.id, drawn.logprob) == (1, 0.0)
    assert drawn.raw_logprob == pytest.approx(math.log(0.4))


def test_raw_logprobs_ignore_temperature_and_filters() -> None:
    (drawn,) = draw(ROW[None], [Sampling(temperature=0.7, top_k=1)], [0], [0])
    assert drawn.raw_logprob == pytest.approx(math.log(0.4))


def test_rows_with_different_samplings_do_not_disturb_each_other() -> None:
    samplings = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=1), Sampling(temperature=2.0, top_p=0.9)]
    seeds, positions = [1, 2, 3, 4], [10, 20, 30, 40]
    together = draw(ROW.expand(4, 4), samplings, seeds, positions)
    alone = [draw(ROW[None], [s], [a], [b])[0] for s, a, b in zip(samplings, seeds, positions, strict=True)]
    assert [row.id for row in together] == [row.id for row in alone]
    assert [row.logprob for row in together] == pytest.approx([row.logprob for row in alone])


def test_alternatives_are_as_many_as_asked_per_row() -> None:
    draws = draw(ROW.expand(3, 4), [Sampling(top_logprobs=n) for n in (0, 2, 9)], [0] * 3, [0] * 3)
    assert [len(drawn.top) for drawn in draws] == [0, 2, 4]
    assert [id for id, _ in draws[1].top] == [1, 3]
    assert draws[1].top[0][1] == pytest.approx(math.log(0.4))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_marked_and_the_others_are_not(value: float) -> None:
    rows = ROW.repeat(2, 1)
    rows[0, 2] = value
    assert [drawn.finite for drawn in draw(rows, [Sampling()] * 2, [0, 0], [0, 0])] == [False, True]


def test_a_masked_token_is_never_drawn() -> None:
    row = ROW.clone()
    row[3] = float("-inf")
    draws = draw(row.expand(500, 4), [Sampling()] * 500, [0] * 500, range(500))
    assert {drawn.id for drawn in draws} == {0, 1, 2}
    assert all(drawn.finite for drawn in draws)
