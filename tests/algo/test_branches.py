import numpy as np
import pytest

from honed.algo.branches import branches, constant, sequence_mean, token_mean
from honed.errors import Refused

from .traces import trace, turn


def test_a_conversation_is_one_branch_with_context_and_output_in_order() -> None:
    found = branches(trace("t", turn("a", (1, 2), (3, 4)), turn("b", (5,), (6,), "a", logprobs=(-2.0,))))
    assert len(found) == 1
    assert found[0].tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert found[0].mask.tolist() == [False, False, True, True, False, True]
    assert found[0].logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -2]
    assert found[0].leaf == "b"


def test_two_branches_share_a_trunk_and_train_each_turn_once() -> None:
    whole = trace("t", turn("a", (1,), (2,)), turn("b", (3,), (4,), "a"), turn("c", (5,), (6, 7), "a"))
    first, second = branches(whole)
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert first.mask.tolist() == [False, True, False, True]
    assert second.tokens.tolist() == [1, 2, 5, 6, 7]
    assert second.mask.tolist() == [False, False, False, True, True]
    assert first.num_trained + second.num_trained == 4


def test_a_rewritten_history_gives_two_samples_and_environment_tokens_weigh_nothing() -> None:
    """Five turns, the history rewritten at the fourth: turns 1-3 and 4-5 are the two branches."""
    turns = [turn("1", (1, 2), (3,)), turn("2", (4,), (5,), "1"), turn("3", (6,), (7,), "2")]
    turns += [turn("4", (1, 2, 9), (8,)), turn("5", (4,), (5,), "4")]
    found = branches(trace("t", *turns))
    assert [branch.tokens.tolist() for branch in found] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 8, 4, 5]]
    assert [branch.num_trained for branch in found] == [3, 2]


def test_versions_are_those_of_the_trained_turns() -> None:
    whole = trace("t", turn("a", (1,), (2,), version="s@1"), turn("b", (3,), (4,), "a", version="s@1.5"))
    assert branches(whole)[0].versions == ("s@1", "s@1.5")


@pytest.mark.parametrize(
    ("turns", "named"),
    [
        ([turn("a", (1,), (2,), fidelity="text")], "turn a has only text"),
        ([turn("a", (1,), (2,), "gone")], "follows gone"),
        ([turn("b", (1,), (2,), "a"), turn("a", (1,), (2,))], "turn b follows a"),
        ([turn("a", (), (2,))], "no context ids"),
        ([turn("a", (1,), (2, 3), logprobs=(-1.0,))], "another number of log-probabilities"),
    ],
)
def test_what_is_not_token_exact_is_refused_by_name(turns: list, named: str) -> None:
    with pytest.raises(Refused, match=named) as error:
        branches(trace("trace_7", *turns))
    assert "trace_7" in str(error.value)


def test_averages() -> None:
    """Sequence A: 2 tokens of loss 1; B: 8 tokens of loss 0. Token mean .2, sequence mean .5, constant length 10 .1."""
    a = branches(trace("a", turn("a", (1,), tuple(range(2, 4)))))
    b = branches(trace("b", turn("b", (1,), tuple(range(2, 10)))))
    assert sum(token_mean([*a, *b])[0]) == pytest.approx(0.2)
    assert sum(sequence_mean([a, b])[0][0]) == pytest.approx(0.5)
    assert sum(constant([a, b], 10)[0][0]) == pytest.approx(0.1)
    assert sum(map(np.sum, token_mean([*a, *b]))) == pytest.approx(1.0)
