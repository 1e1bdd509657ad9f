import numpy as np
import pytest

from honed.algo import advantages


def test_one_right_of_four() -> None:
    rewards = np.array([1.0, 0, 0, 0])
    assert advantages.centred(rewards).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert advantages.standardised(rewards, 1e-6).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert advantages.leave_one_out(rewards).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_one_right_of_four_is_above_the_floor() -> None:
    """Variance (3/4)^2 + 3 (1/4)^2 over 3 = 1/4, std 1/2: a floor of .1 does nothing, one of 1 halves."""
    rewards = np.array([1.0, 0, 0, 0])
    assert advantages.standardised(rewards, 0.1).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-12)
    assert advantages.standardised(rewards, 1.0).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_nearly_uniform_group_stays_bounded() -> None:
    """Seven of .35 and one of 0: std .1237; rounding residue of .35 in fp32 must not be blown up."""
    rewards = np.array([0.35] * 7 + [0.0])
    values = advantages.standardised(rewards, 0.1)
    assert values[0] == pytest.approx(0.04375 / 0.12374369)
    assert np.abs(values).max() <= 0.35 / 0.1
    residue = advantages.standardised(np.array([0.35] * 7 + [0.35000002]), 0.1)
    assert np.abs(residue).max() < 1e-6


@pytest.mark.parametrize(
    ("rewards", "flat"), [([0.35] * 8, True), ([0, 0], True), ([1, 1, 0], False), ([1, 1.001], False)]
)
def test_flat_groups(rewards: list[float], flat: bool) -> None:
    assert advantages.is_flat(np.array(rewards, float)) is flat


def test_flat_up_to_rounding() -> None:
    assert advantages.is_flat(np.array([0.1 + 0.2, 0.3]))


def test_over_the_mean() -> None:
    assert advantages.over_mean(np.array([1.0, 0, 0, 0])).tolist() == [3, -1, -1, -1]
    assert advantages.over_mean(np.array([0.0, -1])).tolist() == [0, 0]


def test_whitened() -> None:
    """[1, -1] with 3 and 1 tokens: mean .5, variance .75."""
    values = advantages.whitened(np.array([1.0, -1.0]), np.array([3, 1]))
    assert values.tolist() == pytest.approx([0.5 / 0.75**0.5, -1.5 / 0.75**0.5])
    assert advantages.whitened(np.zeros(2), np.array([1, 1])).tolist() == [0, 0]


@pytest.mark.parametrize(("length", "loss"), [(0, 0), (100, 0), (150, 0.5), (200, 1), (500, 1)])
def test_overlong(length: int, loss: float) -> None:
    assert advantages.overlong(length, 100, 200) == loss
