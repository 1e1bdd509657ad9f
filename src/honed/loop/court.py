"""The gate's decision, step by step: looks at the target, then the guards, and a plain sentence for each finding.

It asks for attempts as it needs them (loop/paired.py runs them) and knows nothing of versions, stores or releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from honed.economics import power, sequential
from honed.economics.sequential import FlipResult, NonInferiority
from honed.loop.paired import BASELINE, CANDIDATE, Attempts, Pairs
from honed.types import Decision, SuiteResult, Task, Trace

if TYPE_CHECKING:
    from honed.loop.gate import GateSettings

Dollars = Callable[[Trace], float | None]
COLLAPSE_ALPHA = 0.01
"""Chance that any kind of any guard is falsely called gone."""
GUARD_ALPHA = 0.05
"""Chance that a guard passes a candidate which loses the margin."""
EARLY_ALARM = 0.2
"""Where any kind looks this much worse, the guards get all their attempts."""


class Court:
    """One run's decision: looks at the target, then the guards, and writes down suites and reasons as it goes."""

    def __init__(
        self, settings: GateSettings, problems: Sequence[str], runner: Attempts, seed: int, dollars_of: Dollars | None
    ) -> None:
        self.settings, self.runner, self.seed, self.dollars_of = settings, runner, seed, dollars_of
        self.hoped = settings.hoped_gain
        self.suites: list[SuiteResult] = []
        self.reasons = [f"run although the plan objects: {problem}" for problem in problems]

    async def decide(self, targets: Sequence[Task], guards: Mapping[str, Sequence[Task]]) -> Decision:
        """The whole decision. Guards cost nothing until the target is won."""
        decision = await self._target(targets)
        if decision == "invalid" or not guards:
            return decision
        if decision != "promote" and not self.settings.always_guard:
            self.reasons.append("the guards were not run: without the target there is nothing to release")
            return decision
        guarded = await self._guards(guards)
        return guarded if decision == "promote" or guarded == "reject" else decision

    async def _target(self, tasks: Sequence[Task]) -> Decision:
        settings, alphas = self.settings, look_alphas(self.settings)
        for rounds, alpha in zip(range(1, settings.attempts + 1), alphas, strict=True):
            await self.runner.run(tasks, [rounds - 1])
            last = rounds == settings.attempts
            if alpha == 0.0 and not last:
                continue
            pairs = self.runner.pairs(tasks, rounds, settings.pass_at)
            if broken := self._broken(pairs, decide=last or pairs.masked == 1.0):
                self.reasons.append(broken)
                return "invalid"
            flip = self._flip(pairs)
            won = flip.p_value <= alpha and self._holds_at_worst(pairs, alpha)
            self.hoped = self._hope(pairs)
            hopeless = flip.estimate + 1.96 * flip.standard_error < self.hoped
            if (won or hopeless or last) and (broken := self._broken(pairs, decide=True)):
                self.reasons.append(broken)
                return "invalid"
            if won or hopeless or last:
                return self._judge_target(tasks, pairs, flip, alpha, won, hopeless)
        raise AssertionError("the last look decides")

    def _judge_target(
        self, tasks: Sequence[Task], pairs: Pairs, flip: FlipResult, alpha: float, won: bool, hopeless: bool
    ) -> Decision:
        settings = self.settings
        name = "+".join(sorted({task.suite for task in tasks})) or "target"
        result = self._suite(name, "target", tasks, pairs, flip, flip.p_value, won)
        self.suites.append(result)
        self.reasons.append(
            f"target {name}: {_gain(result)} on {result.num_tasks} tasks from {result.num_clusters} conversations, "
            f"{_attempts(pairs)} each; p = {_p(flip.p_value)} against the allowed {_p(alpha)}"
        )
        if won:
            self.reasons.append("the target is won: better than the baseline beyond chance")
            return "promote"
        if settings.smallest_gain == 0 and self._flip(pairs, harm=True).p_value <= 0.01:
            self.reasons.append(f"the target got worse: it lost {points(-result.gain)} points, which is beyond chance")
            return "reject"
        if self.hoped < settings.hoped_gain:
            self.reasons.append(f"the baseline leaves room for {points(self.hoped)} points at most")
        if hopeless:
            self.reasons.append(
                f"the hoped gain of {points(self.hoped)} points is excluded: "
                f"the most that the attempts allow is {points(flip.estimate + 1.96 * flip.standard_error)}"
            )
            return "reject"
        self.reasons.append(self._more_needed(result, flip, alpha))
        return "inconclusive"

    def _hope(self, pairs: Pairs) -> float:
        """The hoped gain, or the room above the baseline if that is less: futility depends on it, no promotion."""
        _, old, kept = pairs.means()
        return min(self.settings.hoped_gain, max(0.01, 1 - float(np.average(old, weights=pairs.weights[kept]))))

    def _more_needed(self, result: SuiteResult, flip: FlipResult, alpha: float) -> str:
        if flip.p_value <= alpha:
            return "the gain does not survive when masked attempts count against the candidate: fewer faults are needed"
        smallest = power.detectable(flip.standard_error, flip.num_clusters, alpha)
        needed = power.tasks_needed(result.num_tasks, smallest, self.hoped)
        if needed <= result.num_tasks:
            return f"not shown: the target could see {points(smallest)} points, and the gain is smaller than that"
        return f"not shown: seeing the hoped {points(self.hoped)} points takes about {needed} tasks"

    async def _guards(self, guards: Mapping[str, Sequence[Task]]) -> Decision:
        """Every guard must be proven, and none may show harm; reject, inconclusive or promote accordingly.

        Looks after the earlier rounds stop only where all is clear, and share each guard's alpha: of 3,000 simulated
        candidates that lose the margin of 15 points 1.9 % passed two rounds (one test after both: 2.2 %), of unchanged
        ones 97 % (98 %), most of them after the first.
        """
        settings, everything = self.settings, [task for tasks in guards.values() for task in tasks]
        for rounds, alpha in enumerate(guard_alphas(settings), 1):
            await self.runner.run(everything, [rounds - 1])
            if rounds == settings.attempts or (alpha and self._all_clear(guards, rounds, alpha)):
                return self._judge_guards(guards, rounds, alpha)
        raise AssertionError("the last round decides")

    def _judge_guards(self, guards: Mapping[str, Sequence[Task]], rounds: int, alpha: float) -> Decision:
        alarms: dict[str, float] = {}
        unproven: list[str] = []
        gone: list[str] = []
        for name, tasks in sorted(guards.items()):
            pairs = self.runner.pairs(tasks, rounds, self.settings.pass_at)
            if broken := self._broken(pairs, decide=True):
                self.reasons.append(f"guard {name}: {broken}")
                return "invalid"
            if not self._guard(name, tasks, pairs, alpha):
                unproven.append(name)
            alarms |= self._alarms(name, pairs)
            gone += [f"{name}: {kind}" for kind in collapsed(pairs, _level(guards))]
        if rounds < self.settings.attempts:
            self.reasons.append(f"the guards were clear after {rounds} of {self.settings.attempts} attempts each")
        harmed = self._harmed(alarms)
        self.reasons += [f"what the baseline could do collapsed in guard {kind}" for kind in gone]
        if harmed or gone:
            return "reject"
        return "inconclusive" if unproven else "promote"

    def _all_clear(self, guards: Mapping[str, Sequence[Task]], rounds: int, alpha: float) -> bool:
        """Whether nothing is left to find out: every guard proven at this look's alpha, and no kind of any looks worse
        at EARLY_ALARM, let alone gone."""
        for name, tasks in guards.items():
            pairs = self.runner.pairs(tasks, rounds, self.settings.pass_at)
            if self._broken(pairs, decide=True) or not self._power(pairs)[1] or not self._shown(pairs, alpha).passed:
                return False
            if min(self._alarms(name, pairs).values()) < EARLY_ALARM or collapsed(pairs, _level(guards)):
                return False
        return True

    def _guard(self, name: str, tasks: Sequence[Task], pairs: Pairs, alpha: float) -> bool:
        """Whether this guard lets the candidate pass."""
        flip, shown, (chance, proves, error) = self._flip(pairs), self._shown(pairs, alpha), self._power(pairs)
        passed = shown.passed or not proves
        result = self._suite(name, "guard", tasks, pairs, flip, shown.p_value, passed, self.settings.margin)
        self.suites.append(result)
        self.reasons.append(self._explain_guard(result, shown, chance, proves, error))
        return passed

    def _shown(self, pairs: Pairs, alpha: float) -> NonInferiority:
        new, old, kept = pairs.means()
        clusters = _kept(pairs.clusters, kept)
        return sequential.non_inferiority(new - old, pairs.weights[kept], clusters, self.settings.margin, alpha)

    def _power(self, pairs: Pairs) -> tuple[float, bool, float]:
        """The chance that an unchanged candidate passes this guard after all attempts, whether that is enough for the
        guard to prove anything, and the standard error that it follows from."""
        settings, num = self.settings, len(pairs.means()[0])
        clusters, within = len(set(pairs.clusters)), pairs.variance_within()
        error = power.planned_error(num, clusters, settings.attempts, settings.attempts, within=within)
        chance = power.guard_power(error, num, clusters, settings.margin, guard_alphas(settings)[-1])
        return chance, chance >= settings.min_guard_power, error

    def _alarms(self, name: str, pairs: Pairs) -> dict[str, float]:
        """The p-values of harm in a guard and in each of its kinds."""
        new, old, kept = pairs.means()
        clusters, kinds = _kept(pairs.clusters, kept), sorted(set(pairs.kinds))
        alarms = {name: self._flip(pairs, harm=True).p_value}
        for kind in kinds if len(kinds) > 1 else []:
            rows = np.array([k == kind for k in pairs.kinds])[kept]
            d, w = (new - old)[rows], pairs.weights[kept][rows]
            if len(d):
                names = _kept(clusters, rows)
                alarms[f"{name}, kind {kind}"] = sequential.sign_flip(-d, w, names, seed=self.seed).p_value
        return alarms

    def _explain_guard(
        self, result: SuiteResult, shown: NonInferiority, chance: float, proves: bool, error: float
    ) -> str:
        margin = points(self.settings.margin)
        head = f"guard {result.suite}: {_gain(result)} on {result.num_tasks} tasks; "
        if not proves:
            sees = points(power.detectable(error, result.num_clusters, self.settings.harm_alpha))
            return head + (
                f"too few to prove a loss below {margin} points (an unchanged candidate would pass {chance:.0%} of the "
                f"time), so it only raises an alarm; it would see a loss of {sees} points with 80 %"
            )
        tail = f"p = {_p(shown.p_value)}, an unchanged candidate passes {chance:.0%} of the time"
        if shown.passed:
            return head + f"shown to lose less than {margin} points ({tail})"
        return head + f"not shown to lose less than {margin} points: it may have lost {points(-shown.low)} ({tail})"

    def _harmed(self, alarms: Mapping[str, float]) -> list[str]:
        names = list(alarms)
        rejected = sequential.holm([alarms[name] for name in names], self.settings.harm_alpha)
        harmed = [name for name, worse in zip(names, rejected, strict=True) if worse]
        for name in harmed:
            self.reasons.append(
                f"harm is shown in guard {name}: worse than the baseline beyond chance, p = {_p(alarms[name])}"
            )
        return harmed

    def _broken(self, pairs: Pairs, *, decide: bool) -> str | None:
        """Why these attempts decide nothing, if so."""
        if pairs.not_finite:
            return f"{pairs.not_finite} scores are NaN or infinite: the verifier is broken"
        if not decide:
            return None
        if pairs.masked > self.settings.max_masked:
            return (
                f"{pairs.masked:.1%} of the pairs ended in faults after {self.settings.retries} retries; "
                f"at most {self.settings.max_masked:.0%} may (gate.max_masked)"
            )
        new, old = ((pairs.faults[arm], pairs.tries[arm]) for arm in (CANDIDATE, BASELINE))
        if min(new[1], old[1]) > 0 and (p := sequential.fault_rates_differ(new, old)) < 0.01:
            return (
                f"the arms break at different rates: {new[0]} of {new[1]} candidate and {old[0]} of {old[1]} "
                f"baseline attempts, p = {_p(p)}"
            )
        return None

    def _flip(self, pairs: Pairs, *, harm: bool = False) -> FlipResult:
        new, old, kept = pairs.means()
        d, delta0 = (old - new, 0.0) if harm else (new - old, self.settings.smallest_gain)
        return sequential.sign_flip(d, pairs.weights[kept], _kept(pairs.clusters, kept), delta0, seed=self.seed)

    def _holds_at_worst(self, pairs: Pairs, alpha: float) -> bool:
        if pairs.masked == 0:
            return True
        worst = sequential.sign_flip(
            pairs.at_worst(), pairs.weights, pairs.clusters, self.settings.smallest_gain, seed=self.seed
        )
        return worst.p_value <= alpha

    def _suite(
        self,
        name: str,
        role: Literal["target", "guard"],
        tasks: Sequence[Task],
        pairs: Pairs,
        flip: FlipResult,
        p_value: float,
        passed: bool,
        margin: float = 0.0,
    ) -> SuiteResult:
        new, old, kept = pairs.means()
        weights = pairs.weights[kept]
        spent = [self.dollars_of(trace) for trace in self.runner.of(tasks)] if self.dollars_of else [None]
        priced = [dollars for dollars in spent if dollars is not None]
        return SuiteResult(
            suite=name,
            role=role,
            gain=flip.estimate,
            low=flip.low,
            high=flip.high,
            baseline=float(np.average(old, weights=weights)),
            candidate=float(np.average(new, weights=weights)),
            num_tasks=len(new),
            num_clusters=flip.num_clusters,
            p_value=p_value,
            margin=margin,
            passed=passed,
            dollars=sum(priced) if len(priced) == len(spent) else None,
        )


def collapsed(pairs: Pairs, level: float) -> list[str]:
    """The kinds of request whose skill is gone: less than chance allows by Fisher's exact test at `level` over a kind's
    attempts, and at most a quarter of the baseline's success.

    One conversation's 2 to 4 attempts can't reach the level, a kind's can: 3 tasks x 4 attempts from all to none have
    p = 4e-7. Attempts at one conversation rise and fall together, which Fisher's test does not know; the quarter makes
    up for it. Of 2,000 simulated null candidates (.5 logits of shift a conversation, success near .5, its worst) 0.6 %
    were called gone with two conversations a kind, and 2.8 % where each kind is a single one.
    """
    found = []
    for kind in sorted(set(pairs.kinds)):
        rows = np.array([name == kind for name in pairs.kinds])
        arms = [side[rows][~np.isnan(side[rows])] for side in (pairs.candidate, pairs.baseline)]
        new, old = ((int(arm.sum()), len(arm)) for arm in arms)
        if 4 * new[0] * old[1] <= old[0] * new[1] and sequential.collapse(new, old) <= level:
            found.append(kind)
    return found


def _attempts(pairs: Pairs) -> str:
    num = pairs.baseline.shape[1]
    return f"{num} attempt" + ("s" if num > 1 else "")


def _kept(names: Sequence[str], mask: np.ndarray) -> list[str]:
    return [name for name, keep in zip(names, mask, strict=True) if keep]


def slot_alpha(settings: GateSettings) -> float:
    """Chance of a false promotion that one candidate is allowed."""
    return sequential.slot_alpha(settings.alpha_policy, settings.alpha, settings.num_slots)


def look_alphas(settings: GateSettings) -> tuple[float, ...]:
    """Alpha at each round; 0 at rounds that are not looked at."""
    return _split(slot_alpha(settings), settings)


def guard_alphas(settings: GateSettings) -> tuple[float, ...]:
    """A guard's alpha at each round, split as the target's is; 0 at rounds that are not looked at."""
    return _split(GUARD_ALPHA, settings)


def _split(alpha: float, settings: GateSettings) -> tuple[float, ...]:
    rounds = settings.attempts
    weights = sequential.look_weights(rounds) if settings.looks else (*(0.0,) * (rounds - 1), 1.0)
    return tuple(alpha * weight for weight in weights)


def _level(guards: Mapping[str, Sequence[Task]]) -> float:
    """The level of one kind's test for collapse."""
    return COLLAPSE_ALPHA / len({(name, task.kind) for name, tasks in guards.items() for task in tasks})


def points(value: float) -> str:
    """A rate as percentage points, for a sentence."""
    return f"{100 * value:.1f}".removesuffix(".0")


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else f"{value:.1e}"


def _gain(result: SuiteResult) -> str:
    return (
        f"{result.baseline:.1%} -> {result.candidate:.1%}, {100 * result.gain:+.1f} points "
        f"[{100 * result.low:+.1f}, {100 * result.high:+.1f}]"
    )
