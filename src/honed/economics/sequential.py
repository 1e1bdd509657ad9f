"""Tests for decisions that cost money: the gate's paired tests, its error budget, and two sequential alarms.

Arithmetic on arrays; nothing here knows a task, a version or a store. A *cluster* is the random unit (a source
conversation with its near-duplicates): attempts and tasks of one cluster move together, so every test here flips or
sums whole clusters. How many tasks a test needs is economics/power.py.

Sources: cluster sign-flip test, Canay, Romano and Shaikh 2017; its inversion to an interval, Hartigan 1969;
intersection-union of guards, Berger 1982; union bound over slots when only verdicts leave the sealed set, Blum and
Hardt 2015 (the Ladder); mixtures of Shiryaev-Roberts statistics, Shin, Ramdas and Rinaldo 2023; betting e-processes,
Waudby-Smith and Ramdas 2024; Ville's inequality bounds both alarms.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from scipy import stats

from honed.types import Noun

EXACT_CLUSTERS = 14
FEW_CLUSTERS, HEAVY_CLUSTER = 40, 0.10
LOOK_RESERVE = 0.7
DROPS = (0.05, 0.15, 0.30, 0.50)
STAKES = (0.05, 0.1, 0.2, 0.4, 0.7)
TINY = 1e-12


class FlipResult(Noun, frozen=True, kw_only=True):
    """`p_value` is one-sided for H0: effect <= delta0; [low, high] a 95 % interval of the effect itself."""

    estimate: float
    p_value: float
    standard_error: float
    low: float
    high: float
    num_clusters: int


class NonInferiority(Noun, frozen=True, kw_only=True):
    """`estimate` and `low` (one-sided bound at 1 - alpha) include the pseudo-task where one was asked for."""

    estimate: float
    standard_error: float
    low: float
    p_value: float
    passed: bool
    num_clusters: int


# ------------------------------------------------------------------------------------------------- the gate's tests


def sign_flip(
    differences: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None,
    clusters: Sequence[Hashable],
    delta0: float = 0.0,
    draws: int = 50_000,
    seed: int = 0,
) -> FlipResult:
    """Is the weighted mean of paired differences above `delta0`? One-sided cluster sign-flip test.

    `differences` [n] are candidate minus baseline per task, in [-1, 1]; `weights` [n] are rescaled to sum 1 (None: all
    equal).
    Under H0 each cluster's total may as well have had the other sign: T* = sum_c e_c (D_c - delta0 w_c), and
    p = P(T* >= T), over all 2^G sign patterns for G <= 14 clusters, else over `draws` random ones with the observed
    pattern counted in. The interval is est +- t SE for many even clusters, and the inverted flip test where G < 40 or a
    cluster weighs more than 10 %. Exact when the two arms are exchangeable within a cluster.
    """
    totals, shares = _per_cluster(differences, weights, clusters)
    estimate, count = float(totals.sum()), len(totals)
    error = _standard_error(totals, shares)
    flipped, exact = _patterns(count, draws, seed)
    ratios = _flipped_means(flipped, totals, shares)
    hits = int(np.count_nonzero(ratios <= delta0 + TINY))
    p_value = hits / len(ratios) if exact else (1 + hits) / (1 + len(ratios))
    if count < FEW_CLUSTERS or shares.max() > HEAVY_CLUSTER:
        low, high = _inverted(ratios, exact)
    else:
        reach = float(stats.t.ppf(0.975, count - 1)) * error
        low, high = estimate - reach, estimate + reach
    return FlipResult(
        estimate=estimate,
        p_value=p_value,
        standard_error=error,
        low=max(-1.0, low),
        high=min(1.0, high),
        num_clusters=count,
    )


def non_inferiority(
    differences: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None,
    clusters: Sequence[Hashable],
    margin: float,
    alpha: float = 0.05,
    pseudo_task: bool = True,
) -> NonInferiority:
    """Is the loss smaller than `margin`? t = (est + margin) / SE against t_{G-1}, H0: effect <= -margin.

    The pseudo-task is one more task, lost entirely and in a cluster of its own: near the ceiling a few lost skills are
    missed by chance and the plain test passes them up to three times too often. Every guard must pass, so each is
    tested at the full level.
    """
    d, w, names = np.asarray(differences, float), _weights(weights, len(differences)), list(clusters)
    if pseudo_task:
        d, w, names = np.append(d, -1.0), np.append(w, w.mean()), [*names, _PSEUDO]
    totals, shares = _per_cluster(d, w, names)
    estimate, count, error = float(totals.sum()), len(totals), _standard_error(totals, shares)
    if count < 2 or error == 0.0:
        passed = count >= 2 and estimate > -margin
        return NonInferiority(
            estimate=estimate,
            standard_error=error,
            low=estimate if count >= 2 else -1.0,
            p_value=0.0 if passed else 1.0,
            passed=passed,
            num_clusters=count,
        )
    p_value = float(stats.t.sf((estimate + margin) / error, count - 1))
    low = estimate - float(stats.t.ppf(1 - alpha, count - 1)) * error
    return NonInferiority(
        estimate=estimate,
        standard_error=error,
        low=max(-1.0, low),
        p_value=p_value,
        passed=p_value < alpha,
        num_clusters=count,
    )


def collapse(candidate: tuple[int, int], baseline: tuple[int, int]) -> float:
    """Fisher's exact one-sided p that the candidate's (passes, attempts) of one cluster fell below the baseline's."""
    (good, tries), (old_good, old_tries) = candidate, baseline
    table = [[good, tries - good], [old_good, old_tries - old_good]]
    return float(stats.fisher_exact(table, alternative="less").pvalue)


def fault_rates_differ(candidate: tuple[int, int], baseline: tuple[int, int]) -> float:
    """Fisher's exact two-sided p that two arms' (faults, attempts) have one rate."""
    table = [[candidate[0], candidate[1] - candidate[0]], [baseline[0], baseline[1] - baseline[0]]]
    return float(stats.fisher_exact(table).pvalue)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses Holm's step-down method rejects with family-wise error `alpha`, in the given order."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


# ----------------------------------------------------------------------------------------------- the error budget


def look_weights(num_looks: int) -> tuple[float, ...]:
    """How a slot's alpha is split over its looks: 0.7 for the last, the rest rising (4 looks: .05, .10, .15, .70).

    A union bound over looks: valid with exact p-values, no boundary tables, and a futility stop never raises it.
    """
    if num_looks == 1:
        return (1.0,)
    rest = num_looks * (num_looks - 1) / 2
    return (*((1 - LOOK_RESERVE) * i / rest for i in range(1, num_looks)), LOOK_RESERVE)


def slot_alpha(policy: Literal["epoch", "single"], alpha: float = 0.05, num_slots: int = 20) -> float:
    """Alpha of one candidate: alpha / num_slots where one sealed holdout judges many, all of it in single mode.

    While only "promoted" or "not promoted" leaves the sealed set, and a promotion ends the epoch, the sum over slots
    bounds the chance of any false promotion, whatever the optimiser does.
    """
    return alpha / num_slots if policy == "epoch" else alpha


# ---------------------------------------------------------------------------------------------- sequential alarms


def success_bound(successes: float, num: int, confidence: float = 0.8) -> float:
    """One-sided lower bound of a success rate (Clopper and Pearson 1934); 0 where nothing was seen or passed."""
    if num <= 0 or successes <= 0:
        return 0.0
    return float(stats.beta.ppf(1 - confidence, successes, num - successes + 1))


class ReferenceWatch:
    """Has live success fallen below `reference - tolerance`? Looked at after each outcome, stopped whenever it alarms.

    With p0 = reference - tolerance and alternatives p1 = p0 - {.05, .15, .30, .50} (not under .02), each outcome y in
    [0, 1] multiplies by 1 + l (p0 - y), l = (p0 - p1) / (p0 (1 - p0)): the likelihood ratio for y in {0, 1}, and of
    mean at most 1 whenever success is at least p0, constant or not. A change may start at any observation: half of the
    prior weight says "bad from the first", the other half is spread evenly over `horizon` observations:
        R_j <- (R_j + w_n) (1 + l_j (p0 - y)),   value = mean_j R_j,   alarm at value >= 1 / alpha.
    **False alarms**: value plus the weight still to come is a supermartingale of mean at most 1, so by Ville's
    inequality P(any alarm within n observations) <= alpha (1/2 + n / (2 horizon)), at most alpha within the horizon.
    A version that is bad from its first request is found as fast as by an e-process, a later fall as by
    Shiryaev-Roberts.
    """

    def __init__(self, reference: float, tolerance: float = 0.03, alpha: float = 0.01, horizon: int = 2000) -> None:
        self.floor = min(max(reference - tolerance, 0.0), 0.995)
        self.threshold = 1.0 / alpha
        self.horizon = horizon
        self.num_seen = 0
        lower = np.maximum(0.02, self.floor - np.array(DROPS))
        gap = np.maximum(self.floor - lower, 0.0)
        self._stakes = gap / (self.floor * (1 - self.floor)) if self.floor > 0 else np.zeros(len(DROPS))
        self._values = np.zeros(len(DROPS))

    @property
    def value(self) -> float:
        """Evidence of a fall; the alarm is raised at `threshold` = 1 / alpha."""
        return float(self._values.mean())

    @property
    def can_alarm(self) -> bool:
        """False where the floor is so low (<= 2 %) that no fall below it could be told."""
        return bool(self._stakes.any())

    def update(self, x: float) -> bool:
        """Takes one outcome in [0, 1]; True when the alarm is up. Raises ValueError for anything else, NaN too."""
        if not 0.0 <= x <= 1.0:
            raise ValueError(f"an outcome lies in [0, 1], this is {x}")
        self.num_seen += 1
        weight = 0.5 if self.num_seen == 1 else 0.5 / self.horizon
        self._values = np.minimum((self._values + weight) * (1 + self._stakes * (self.floor - x)), 1e300)
        return self.value >= self.threshold

    def reset(self) -> None:
        """Forgets everything seen, as after an alarm that was answered."""
        self.num_seen = 0
        self._values[:] = 0.0


class PairedEProcess:
    """Is a canary worse than its control by more than `margin`? Exact at every look, under any stopping and any shares.

    Each update takes a block's d in [-1, 1] (mean of the control's outcomes minus the canary's):
    E = mean_j prod (1 + l_j (d - margin)), l = .05, .1, .2, .4, .7; alarm at E >= 1 / alpha, P(ever | H0) <= alpha for
    H0: E[d | past] <= margin. To show that a canary may get more traffic, feed -d with margin = -(tolerated loss) and
    alpha = .05.
    """

    def __init__(self, margin: float = 0.02, alpha: float = 0.02) -> None:
        if max(STAKES) * (1 + margin) >= 1:
            raise ValueError(f"margin {margin} is too large for bets of up to {max(STAKES)}: keep it below 0.4")
        self.margin, self.threshold, self.num_seen = margin, 1.0 / alpha, 0
        self._stakes = np.array(STAKES)
        self._logs = np.zeros(len(STAKES))

    @property
    def value(self) -> float:
        """The e-value so far; 1 before anything was seen."""
        return float(np.exp(np.minimum(self._logs, 600.0)).mean())

    def update(self, d: float) -> bool:
        """Takes one block; True when the alarm is up. Raises ValueError unless d lies in [-1, 1]."""
        if not -1.0 <= d <= 1.0:
            raise ValueError(f"a block's difference lies in [-1, 1], this is {d}")
        self.num_seen += 1
        self._logs += np.log1p(self._stakes * (d - self.margin))
        return self.value >= self.threshold


# ------------------------------------------------------------------------------------------------------- arithmetic

_PSEUDO = object()


def _weights(weights: Sequence[float] | np.ndarray | None, count: int) -> np.ndarray:
    w = np.ones(count) if weights is None else np.asarray(weights, float)
    if count == 0 or w.sum() <= 0 or not np.isfinite(w).all():
        raise ValueError("a comparison needs at least one task, and finite weights of positive sum")
    return w / w.sum()


def _per_cluster(
    differences: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None,
    clusters: Sequence[Hashable],
) -> tuple[np.ndarray, np.ndarray]:
    """D_c = sum of w_i d_i and w_c = sum of w_i per cluster, [G] each."""
    d, w = np.asarray(differences, float), _weights(weights, len(differences))
    if not np.isfinite(d).all():
        raise ValueError("a difference is not finite; mask or refuse such a pair before testing")
    index: dict[Hashable, int] = {}
    where = np.array([index.setdefault(name, len(index)) for name in clusters])
    return np.bincount(where, w * d, len(index)), np.bincount(where, w, len(index))


def _standard_error(totals: np.ndarray, shares: np.ndarray) -> float:
    """SE^2 = G / (G - 1) sum_c (D_c - w_c est)^2; infinite for a single cluster."""
    count = len(totals)
    if count < 2:
        return float("inf")
    return float(np.sqrt(count / (count - 1) * np.sum((totals - shares * totals.sum()) ** 2)))


def _patterns(count: int, draws: int, seed: int) -> tuple[np.ndarray, bool]:
    """Which clusters are flipped, bool [B, G], and whether these are all 2^G patterns."""
    if count <= EXACT_CLUSTERS:
        return (np.arange(2**count)[:, None] >> np.arange(count)) & 1 == 1, True
    return np.random.default_rng(seed).integers(0, 2, (draws, count), dtype=np.int8) == 1, False


def _flipped_means(flipped: np.ndarray, totals: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Per pattern, the weighted mean difference of its flipped clusters, -inf when none is flipped.

    T*(delta) >= T(delta) holds exactly when delta is at least this mean, which gives the p-value at any delta and,
    inverted, the interval.
    """
    weight = flipped @ shares
    means = np.full(len(flipped), -np.inf)
    np.divide(flipped @ totals, weight, out=means, where=weight > 0)
    return means


def _inverted(ratios: np.ndarray, exact: bool, tail: float = 0.025) -> tuple[float, float]:
    """The 95 % interval of effects that the flip test does not refuse."""
    total = len(ratios) if exact else len(ratios) + 1
    rank = int(np.floor(tail * total + TINY)) - (0 if exact else 1)
    if rank < 0:
        return -np.inf, np.inf
    ordered = np.sort(ratios)
    mirrored = np.sort(np.where(np.isneginf(ratios), np.inf, ratios))
    return float(ordered[rank]), float(mirrored[len(ratios) - 1 - rank])
