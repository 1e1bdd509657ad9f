"""The gate's tests and the two alarms against hand-computed values, and their false alarm rates by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from honed.economics.sequential import (
    PairedEProcess,
    ReferenceWatch,
    collapse,
    fault_rates_differ,
    holm,
    look_weights,
    non_inferiority,
    sign_flip,
    slot_alpha,
    success_bound,
)


def test_sign_flip_counts_the_patterns_that_reach_the_observed_total() -> None:
    result = sign_flip([1, 1, 1, 0], None, "abcd")
    assert result.estimate == pytest.approx(0.75)
    assert result.p_value == pytest.approx(2 / 16)  # the three that count must stay, the zero may flip
    assert result.num_clusters == 4


def test_sign_flip_flips_whole_clusters() -> None:
    result = sign_flip([1, 0, 1, 1], None, ["a", "a", "b", "b"])
    assert result.p_value == pytest.approx(1 / 4)  # D = .25, .5: only ++ reaches .75
    assert result.standard_error == pytest.approx(0.25)  # sqrt(2/1 * 2 * .125^2)


def test_sign_flip_weights_tasks() -> None:
    assert sign_flip([1, -1], [3, 1], "ab").estimate == pytest.approx(0.5)


def test_sign_flip_of_no_difference_is_no_evidence() -> None:
    assert sign_flip([0.0] * 40, None, range(40)).p_value == 1.0


def test_sign_flip_tests_against_the_smallest_gain_worth_having() -> None:
    gains = [0.5] * 6
    assert sign_flip(gains, None, range(6), delta0=0.0).p_value == pytest.approx(1 / 64)
    assert sign_flip(gains, None, range(6), delta0=0.5).p_value == 1.0


def test_exact_enumeration_is_brute_force() -> None:
    totals = np.random.default_rng(1).normal(0.1, 0.4, 9).clip(-1, 1)
    brute = np.mean([np.dot(signs, totals) >= totals.sum() - 1e-12 for signs in itertools.product([1, -1], repeat=9)])
    assert sign_flip(totals, None, range(9)).p_value == pytest.approx(brute)


def test_random_patterns_approach_brute_force_and_follow_the_seed() -> None:
    totals = np.random.default_rng(2).normal(0.12, 0.4, 15).clip(-1, 1)
    brute = np.mean([np.dot(signs, totals) >= totals.sum() - 1e-12 for signs in itertools.product([1, -1], repeat=15)])
    first, again = (sign_flip(totals, None, range(15), seed=7) for _ in range(2))
    assert first == again
    assert first.p_value == pytest.approx(brute, abs=0.006)


def test_the_interval_of_few_clusters_inverts_the_test() -> None:
    d = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    result = sign_flip(d, None, range(6))
    assert (result.low, result.high) == pytest.approx((0.1, 0.6))  # 1 of 64 patterns lies outside on either side
    tiny = sign_flip([0.3, 0.4], None, range(2))
    assert (tiny.low, tiny.high) == (-1.0, 1.0)  # two clusters exclude nothing at 95 %


def test_the_interval_of_many_clusters_is_students() -> None:
    d = np.tile([0.0, 0.5], 25)
    result = sign_flip(d, None, range(50))
    error = math.sqrt(50 / 49 * 50 * (0.25 / 50) ** 2)
    assert result.standard_error == pytest.approx(error)
    assert result.high == pytest.approx(0.25 + stats.t.ppf(0.975, 49) * error)


def test_nothing_and_nan_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        sign_flip([], None, [])
    with pytest.raises(ValueError, match="not finite"):
        sign_flip([math.nan, 0.0], None, "ab")


def test_sign_flip_keeps_its_level_where_clusters_move_together() -> None:
    """30 clusters of very unequal size under no gain: a task-level t test rejects 2 to 8 times too often here."""
    rng, false, runs = np.random.default_rng(3), 0, 400
    sizes = np.maximum(1, (40 / np.arange(1, 31)).astype(int))
    clusters = np.repeat(np.arange(30), sizes)
    for run in range(runs):
        shift = rng.normal(0, 0.2, 30)[clusters]
        d = (shift + rng.normal(0, 0.3, len(clusters))).clip(-1, 1)
        false += sign_flip(d, None, clusters, draws=1000, seed=run).p_value <= 0.05
    assert false / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_non_inferiority_counts_one_task_as_lost() -> None:
    result = non_inferiority([0, 0, 0], None, "abc", margin=0.5)
    assert result.estimate == pytest.approx(-0.25)
    assert result.standard_error == pytest.approx(0.25)  # 4/3 (3 x .0625^2 + .1875^2) = .0625
    assert result.p_value == pytest.approx(stats.t.sf(1.0, 3))
    assert not result.passed


def test_non_inferiority_passes_no_change_and_fails_a_loss_at_the_margin() -> None:
    assert non_inferiority([0.0] * 64, None, range(64), margin=0.1).passed
    lost = [-1.0] * 6 + [0.0] * 58
    assert not non_inferiority(lost, None, range(64), margin=0.1).passed
    assert not non_inferiority([-0.1] * 64, None, range(64), margin=0.1).passed


def test_non_inferiority_rarely_passes_a_concentrated_loss_at_the_margin() -> None:
    rng, false, runs = np.random.default_rng(4), 0, 400
    for _ in range(runs):
        d = np.where(rng.random(60) < 0.05, -1.0, 0.0) + rng.normal(0, 0.05, 60)
        false += non_inferiority(d, None, range(60), margin=0.05).passed
    assert false / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_fisher_tests_against_hand_counts() -> None:
    assert collapse((0, 4), (4, 4)) == pytest.approx(1 / 70)  # 1 / C(8, 4)
    assert collapse((4, 4), (4, 4)) == 1.0
    assert fault_rates_differ((0, 4), (4, 4)) == pytest.approx(2 / 70)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03], 0.05) == [True, False, False]  # .01 <= .05/3, .03 > .05/2
    assert holm([0.02, 0.01], 0.05) == [True, True]
    assert holm([], 0.05) == []


def test_alpha_is_spent_once() -> None:
    assert look_weights(4) == pytest.approx((0.05, 0.10, 0.15, 0.70))
    assert look_weights(1) == (1.0,)
    for looks in range(1, 9):
        assert sum(look_weights(looks)) == pytest.approx(1.0)
    assert slot_alpha("epoch") == pytest.approx(0.0025)
    assert slot_alpha("single") == 0.05


def test_success_bound_is_clopper_pearson() -> None:
    assert success_bound(10, 10, 0.8) == pytest.approx(0.2**0.1)
    assert success_bound(0, 10) == 0.0
    assert success_bound(0, 0) == 0.0


def test_reference_watch_multiplies_likelihood_ratios() -> None:
    watch = ReferenceWatch(0.8, tolerance=0.0, horizon=100)
    assert not watch.update(0.0)
    assert watch.value == pytest.approx(0.5 * (1.25 + 1.75 + 2.5 + 3.5) / 4)  # p1 = .75, .65, .5, .3; (1-p1)/(1-p0)
    watch.update(1.0)
    after = [
        (0.5 * f + 0.005) * g
        for f, g in zip((1.25, 1.75, 2.5, 3.5), (0.75 / 0.8, 0.65 / 0.8, 0.625, 0.375), strict=True)
    ]
    assert watch.value == pytest.approx(sum(after) / 4)


def test_reference_watch_keeps_its_false_alarm_bound() -> None:
    """Success exactly at the floor, looked at after every outcome of the whole horizon: at most alpha of runs alarm."""
    rng, alpha, runs, horizon = np.random.default_rng(5), 0.1, 300, 300
    alarms = 0
    for _ in range(runs):
        watch = ReferenceWatch(0.83, tolerance=0.03, alpha=alpha, horizon=horizon)
        alarms += any(watch.update(float(y)) for y in rng.random(horizon) < 0.8)
    assert alarms / runs <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)


def test_reference_watch_finds_a_bad_start_and_a_late_fall() -> None:
    broken = ReferenceWatch(0.8)
    assert next(n for n in range(1, 100) if broken.update(0.0)) <= 8
    rng, late = np.random.default_rng(6), ReferenceWatch(0.8)
    assert not any(late.update(float(y)) for y in rng.random(300) < 0.8)
    assert next(n for n in range(1, 400) if late.update(float(rng.random() < 0.3))) <= 60
    assert late.value >= late.threshold
    late.reset()
    assert late.value == 0.0


def test_reference_watch_stays_finite_and_refuses_nan() -> None:
    watch = ReferenceWatch(1.0, tolerance=0.0)
    for _ in range(2000):
        watch.update(0.0)
    assert math.isfinite(watch.value)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        watch.update(math.nan)


def test_reference_watch_with_nothing_to_lose_never_alarms() -> None:
    watch = ReferenceWatch(0.02)
    assert not watch.can_alarm
    assert not any(watch.update(0.0) for _ in range(500))


def test_paired_e_process_multiplies_bets() -> None:
    test = PairedEProcess(margin=0.02)
    assert test.value == pytest.approx(1.0)
    test.update(1.0)
    stakes = np.array([0.05, 0.1, 0.2, 0.4, 0.7])
    assert test.value == pytest.approx(np.mean(1 + stakes * 0.98))
    test.update(-1.0)
    assert test.value == pytest.approx(np.mean((1 + stakes * 0.98) * (1 - stakes * 1.02)))


def test_paired_e_process_keeps_its_false_alarm_bound_and_sees_harm() -> None:
    rng, runs, alpha = np.random.default_rng(7), 300, 0.1
    alarms = 0
    for _ in range(runs):
        test = PairedEProcess(margin=0.02, alpha=alpha)
        control, canary = rng.random(300) < 0.8, rng.random(300) < 0.78
        alarms += any(test.update(float(d)) for d in control.astype(float) - canary)
    assert alarms / runs <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)
    harm = PairedEProcess()
    assert next(n for n in range(1, 200) if harm.update(float(rng.random() < 0.8) - float(rng.random() < 0.05))) <= 40


def test_paired_e_process_refuses_what_is_no_difference() -> None:
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        PairedEProcess().update(1.5)
    with pytest.raises(ValueError, match="margin"):
        PairedEProcess(margin=0.5)
