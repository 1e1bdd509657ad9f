"""What a comparison could see before it is paid for: planned standard errors, smallest effects, power, tasks needed.

Planning figures only; no decision is taken from them except to refuse a run that can't succeed. Formulas for a paired
comparison of n tasks in clusters of mean size m, k attempts per task and arm:
SE^2 = (v_w + v_b) / n (1 + (m - 1) rho), v_w = mean p (1 - p) (1/k + 1/k0), v_b = .02 and rho = .1 until measured.
"""

from __future__ import annotations

import math

from scipy import stats

SPREAD_BETWEEN, CLUSTER_CORRELATION = 0.02, 0.1


def planned_error(
    num_tasks: int,
    num_clusters: int,
    attempts: int,
    baseline_attempts: int,
    *,
    within: float = 0.2,
    between: float = SPREAD_BETWEEN,
    correlation: float = CLUSTER_CORRELATION,
) -> float:
    """Planned SE of a gain. `within` is the mean of p (1 - p) over tasks: .25 at worst, .2 for Beta(2, 2)."""
    size = num_tasks / num_clusters
    variance = within * (1 / attempts + 1 / baseline_attempts) + between
    return math.sqrt(variance / num_tasks * (1 + (size - 1) * correlation))


def detectable(error: float, num_clusters: int, alpha: float, power: float = 0.8) -> float:
    """Smallest true gain found with `power` at level `alpha`: (t_{G-1, 1-alpha} + z_power) SE. Infinite for G < 2."""
    if num_clusters < 2:
        return math.inf
    return float(stats.t.ppf(1 - alpha, num_clusters - 1) + stats.norm.ppf(power)) * error


def superiority_power(error: float, num_clusters: int, gain: float, alpha: float) -> float:
    """Chance that a true `gain` passes the target test at level `alpha`."""
    if num_clusters < 2:
        return 0.0
    return float(stats.norm.cdf(gain / error - stats.t.ppf(1 - alpha, num_clusters - 1)))


def guard_power(error: float, num_tasks: int, num_clusters: int, margin: float, alpha: float = 0.05) -> float:
    """Chance that an unchanged candidate is shown to lose less than `margin`, the pseudo-task counted.

    The pseudo-task moves the estimate by -1 / (n + 1) and adds about as much to the standard error.
    """
    pseudo = 1 / (num_tasks + 1)
    spread = math.hypot(error, pseudo)
    return float(stats.norm.cdf((margin - pseudo) / spread - stats.t.ppf(1 - alpha, num_clusters)))


def tasks_needed(num_tasks: int, smallest: float, wanted: float) -> int:
    """n (MDE / wanted)^2: how many tasks see a gain of `wanted` when `num_tasks` see `smallest`."""
    return math.ceil(num_tasks * (smallest / wanted) ** 2)
