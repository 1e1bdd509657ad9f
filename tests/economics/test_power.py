"""Planning formulas against hand-computed values, and the planned guard power against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from honed.economics import power
from honed.economics.sequential import non_inferiority


def test_planned_error_and_smallest_effect() -> None:
    error = power.planned_error(200, 50, 4, 16, within=0.2)
    assert error == pytest.approx(math.sqrt((0.2 * (1 / 4 + 1 / 16) + 0.02) / 200 * 1.3))
    assert power.detectable(error, 50, 0.05) == pytest.approx((stats.t.ppf(0.95, 49) + stats.norm.ppf(0.8)) * error)
    assert power.detectable(error, 1, 0.05) == math.inf


def test_power_at_the_smallest_effect_is_what_was_asked_for() -> None:
    smallest = power.detectable(0.04, 60, 0.0025)
    assert power.superiority_power(0.04, 60, smallest, 0.0025) == pytest.approx(0.8)
    assert power.superiority_power(0.04, 1, 0.5, 0.0025) == 0.0


def test_tasks_needed_grows_with_the_square() -> None:
    assert power.tasks_needed(64, 0.2, 0.1) == 256


def test_guard_power_agrees_with_simulation() -> None:
    rng, runs = np.random.default_rng(0), 500
    d = rng.normal(0, 0.25, (runs, 64))
    passed = np.mean([non_inferiority(row.clip(-1, 1), None, range(64), 0.1).passed for row in d])
    assert power.guard_power(0.25 / 8, 64, 64, 0.1) == pytest.approx(passed, abs=0.08)
