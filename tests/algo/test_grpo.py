import numpy as np
import pytest

from honed.algo.grpo import Grpo, GrpoSettings, judge
from honed.config import parse
from honed.errors import ConfigError, Refused
from honed.protocols import Algorithm
from honed.types import Fault, Group, Sampling

from .traces import group, trace, turn


def advantages_of(samples: list) -> list[float]:
    return [float(sample.advantages[sample.weights != 0][0]) for sample in samples]


def test_one_right_of_four_is_mean_centred_and_token_averaged() -> None:
    samples = Grpo()([group([1, 0, 0, 0])])
    assert advantages_of(samples) == [0.75, -0.25, -0.25, -0.25]
    assert sum(sample.weights.sum() for sample in samples) == pytest.approx(1.0)
    assert samples[0].weights[-1] == pytest.approx(1 / 14)  # 2 + 3 + 4 + 5 tokens
    assert samples[0].weights[:3].tolist() == [0, 0, 0]
    assert samples[0].logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert samples[0].branch == "u0"


def test_a_missing_score_is_masked_and_the_others_keep_their_own_statistics() -> None:
    """[1, None, 0, 1]: the mean is over three."""
    samples = Grpo()([group([1, None, 0, 1])])
    assert advantages_of(samples) == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert [sample.branch for sample in samples] == ["u0", "u2", "u3"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_equals_an_attempt_never_made(value: float) -> None:
    with_it, without = Grpo()([group([1, 0, value])]), Grpo()([group([1, 0])])
    for one, other in zip(with_it, without, strict=True):
        assert np.array_equal(one.weights, other.weights)
        assert np.array_equal(one.advantages, other.advantages)


def test_a_fault_is_masked_even_with_a_score() -> None:
    faulty = trace("f", turn("f", (1,), (2,)), reward=0.0, fault=Fault(boundary="tool", kind="x", message="m"))
    judged = judge(Group(id="g", task="t", traces=(*group([1, 0]).traces, faulty)), GrpoSettings())
    assert judged.advantages == (0.5, -0.5, None)
    assert judged.attempts == ("used", "used", "fault")


def test_groups_that_teach_nothing_are_dropped_and_counted() -> None:
    groups = [group([1, 1, 1]), group([0, 0]), group([1, None]), group([1, 0])]
    algorithm = Grpo()
    assert [judged.outcome for judged in algorithm.judge(groups)] == ["zero_variance", "zero_variance", "fault", "used"]
    assert len(algorithm(groups)) == 2
    assert algorithm.judge(groups)[2].attempts == ("fault", "fault")
    assert algorithm(groups[:3]) == []


def test_a_nearly_uniform_group_stays_bounded() -> None:
    samples = Grpo(GrpoSettings(scale="std"))([group([0.35] * 7 + [0.0])])
    assert max(abs(value) for value in advantages_of(samples)) <= 3.5


def test_standard_deviation_and_leave_one_out() -> None:
    scaled = Grpo(GrpoSettings(scale="std"))([group([1, 0, 0, 0])])
    assert advantages_of(scaled) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    left_out = Grpo(GrpoSettings(baseline="leave_one_out"))([group([1, 0, 0, 0])])
    assert advantages_of(left_out) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_over_the_mean() -> None:
    """[1, 0, 0, 0]: (r - 1/4) / (1/4)."""
    assert advantages_of(Grpo(GrpoSettings(scale="mean"))([group([1, 0, 0, 0])])) == pytest.approx([3, -1, -1, -1])


def test_a_group_whose_mean_is_not_above_zero_teaches_nothing_over_its_mean() -> None:
    settings = GrpoSettings(scale="mean")
    assert judge(group([0, -1]), settings).outcome == "zero_variance"
    assert Grpo(settings)([group([0, -1])]) == []


def test_whitened_over_the_tokens_of_the_batch() -> None:
    """[1, 0] twice, 2 and 3 tokens each: +-.5, mean -.1 and variance .24 over ten tokens; +-1 after (A + .1) / .49."""
    samples = Grpo(GrpoSettings(scale="batch"))([group([1, 0]), group([1, 0])])
    assert advantages_of(samples) == pytest.approx([0.6 / 0.24**0.5, -0.4 / 0.24**0.5] * 2)
    tokens = np.concatenate([sample.advantages[sample.weights != 0] for sample in samples])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std() == pytest.approx(1, abs=1e-6)


def test_length_costs_reward_between_start_and_limit() -> None:
    """Lengths 2, 3, 4, 5 with start 2 and limit 4 lose 0, 1/2, 1, 1: equal scores are then no flat group."""
    samples = Grpo(GrpoSettings(overlong_start=2, overlong_limit=4))([group([1, 1, 1, 1])])
    assert advantages_of(samples) == pytest.approx([0.625, 0.125, -0.375, -0.375])


def test_sequence_and_constant_averages() -> None:
    by_sequence = Grpo(GrpoSettings(average="sequence"))([group([1, 0])])
    assert [float(sample.weights.sum()) for sample in by_sequence] == pytest.approx([0.5, 0.5])
    by_constant = Grpo(GrpoSettings(average="constant", constant_length=10))([group([1, 0])])
    assert [float(sample.weights.sum()) for sample in by_constant] == pytest.approx([0.1, 0.15])


def test_a_cut_attempt_can_be_kept_or_masked() -> None:
    cut = trace("c", turn("c", (1,), (2,), finish="length"), reward=0.0)
    mixed = Group(id="g", task="t", traces=(*group([1, 0]).traces, cut))
    assert judge(mixed, GrpoSettings()).attempts[-1] == "used"
    masked = judge(mixed, GrpoSettings(truncated="mask"))
    assert masked.attempts[-1] == "truncated"
    assert masked.advantages == (0.5, -0.5, None)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(Refused, match="group g has 1 attempt"):
        Grpo()([group([1])])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (turn("x", (1,), (2,), fidelity="text", logprobs=()), "only text"),
        (turn("x", (1,), (2,), fidelity="redacted"), "only redacted"),
        (turn("x", (1,), (2,), logprobs=()), "no log-probabilities"),
        (turn("x", (1,), (2,), sampling=Sampling(top_p=0.9)), "top_p = 1"),
        (turn("x", (1,), (2,), sampling=Sampling(top_k=5)), "top_k = 0"),
        (turn("x", (1,), (2,), sampling=Sampling(min_p=0.1)), "min_p = 0"),
        (turn("x", (1,), (2,), sampling=Sampling(grammar='start: "a"')), "in a grammar"),
        (turn("x", (1,), (2,), sampling=Sampling(repetition_penalty=1.1)), "repetition_penalty = 1"),
        (turn("x", (1,), (2,), sampling=Sampling(temperature=0.0)), "temperature above 0"),
    ],
)
def test_what_the_policy_did_not_sample_is_refused_naming_the_trace(changed: object, reason: str) -> None:
    bad = Group(id="g", task="t", traces=(trace("trace_9", changed, reward=1.0), *group([0]).traces))
    with pytest.raises(Refused, match=reason) as error:
        Grpo()([bad])
    assert "trace_9" in str(error.value)


def test_an_end_that_the_engine_did_not_sample_is_context() -> None:
    """A cut reply is closed by the renderer: those ids come as the next turn's context, and have no weight."""
    attempt = trace("a", turn("a", (1,), (2,), finish="length"), turn("b", (0, 5), (6, 0), "a"), reward=1.0)
    sample = Grpo()([Group(id="g", task="t", traces=(attempt, *group([0]).traces))])[0]
    assert (sample.weights != 0).tolist() == [False, True, False, False, True, True]
    assert sample.logprobs[5] == -0.5


def test_temperatures() -> None:
    warm = Sampling(temperature=0.7)
    attempt = trace("a", turn("a", (1,), (2,), sampling=warm), reward=1.0)
    assert Grpo()([Group(id="g", task="t", traces=(attempt, *group([0]).traces))])[0].temperature == 0.7
    mixed = trace("a", turn("a", (1,), (2,), sampling=warm), turn("b", (1,), (2,), "a"), reward=1.0)
    with pytest.raises(Refused, match="mixes temperatures"):
        Grpo()([Group(id="g", task="t", traces=(mixed, *group([0]).traces))])


def test_it_is_pure_and_an_algorithm() -> None:
    assert isinstance(Grpo(), Algorithm)
    assert Grpo().needs == set()
    assert Grpo(GrpoSettings(anchor="trainer"), reference=True).needs == {"old_logprobs", "reference"}
    one, other = (Grpo()([group([1, 0, 1])]) for _ in range(2))
    assert all(np.array_equal(a.weights, b.weights) for a, b in zip(one, other, strict=True))


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="scale = 'std' divides mean-centred rewards"):
        parse(GrpoSettings, {"scale": "std", "baseline": "leave_one_out"})
    with pytest.raises(ConfigError, match="overlong_start = 8 must be below overlong_limit = 8"):
        parse(GrpoSettings, {"overlong_start": 8, "overlong_limit": 8})
    with pytest.raises(ConfigError, match="overlong_start = 8 must be below"):
        parse(GrpoSettings, {"overlong_start": 8})
