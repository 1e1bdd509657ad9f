"""The gate's decisions on scripted arms: what it promotes, rejects, leaves open, calls invalid or refuses to start."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from honed.errors import ConfigError, EngineError, Refused
from honed.loop.court import COLLAPSE_ALPHA, collapsed, guard_alphas, look_alphas
from honed.loop.gate import GateResult, GateSettings, gate, make_plan, split_roles, verdict_id
from honed.loop.paired import Pairs, reusable
from honed.types import Fault, Message, Score, SuiteResult, Task, Trace, Version

OLD, NEW = Version(line="m", number=1, digest="old"), Version(line="m", number=2, digest="new")
SETTINGS = GateSettings(target_suites=("changed",), guard_suites=("kept",))


def tasks(suite: str, num: int = 64, kinds: int = 1, split: str = "holdout", per_cluster: int = 1) -> list[Task]:
    prompt = (Message(role="user", content="hi"),)
    return [
        Task(
            id=f"{suite}{i}",
            prompt=prompt,
            environment="chat",
            verifier="v",
            split=split,
            split_key=f"{suite}-{i // per_cluster}",
            suite=suite,
            kind=f"kind{i % kinds}",
        )
        for i in range(num)
    ]


BOTH = [*tasks("changed"), *tasks("kept", kinds=4)]


class Arms:
    """Scripted attempts: passes with probability rates[version][suite], decided by a hash; counts what ran."""

    def __init__(
        self, rates: dict[str, dict[str, float]], broken: Callable[[Task, str, int], Fault | None] | None = None
    ):
        self.rates, self.broken, self.calls = rates, broken, []

    async def __call__(self, task: Task, version: str, number: int) -> Trace:
        self.calls.append((task.id, version, number))
        tags = {"version": version, "attempt": str(number)}
        fault = self.broken(task, version, number) if self.broken else None
        if fault is not None:
            return Trace(id="t", origin="eval", task=task.id, fault=fault, tags=tags, at=0.0)
        drawn = int(hashlib.sha256(f"{task.id}{version}{number}".encode()).hexdigest()[:8], 16) / 2**32
        value = float(drawn < self.rates[version][task.suite])
        return Trace(id="t", origin="eval", task=task.id, score=Score(value=value), tags=tags, at=0.0)


def arms(old: tuple[float, float], new: tuple[float, float], **options: object) -> Arms:
    return Arms({"m@1": {"changed": old[0], "kept": old[1]}, "m@2": {"changed": new[0], "kept": new[1]}}, **options)


async def run(
    attempt: Arms, settings: GateSettings = SETTINGS, batch: list[Task] = BOTH, **options: object
) -> GateResult:
    return await gate(NEW, OLD, batch, attempt, settings, **options)


def suite(result: GateResult, name: str) -> SuiteResult:
    return next(suite for suite in result.verdict.suites if suite.suite == name)


async def test_a_clear_gain_without_loss_is_promoted_and_explained() -> None:
    result = await run(arms((0.15, 0.85), (0.7, 0.85)))
    verdict = result.verdict
    assert verdict.decision == "promote"
    assert (verdict.version, verdict.baseline) == ("m@2", "m@1")
    target, guard = suite(result, "changed"), suite(result, "kept")
    assert target.role == "target"
    assert target.low > 0
    assert target.gain == pytest.approx(target.candidate - target.baseline)
    assert (guard.role, guard.margin, guard.passed) == ("guard", 0.1, True)
    text = "\n".join(verdict.reasons)
    assert "the target is won" in text
    assert "shown to lose less than 10 points" in text
    assert "an unchanged candidate passes" in text  # the power of the guard is stated


async def test_an_early_look_saves_the_later_rounds() -> None:
    attempt = arms((0.0, 0.9), (1.0, 0.9))
    result = await run(attempt)
    assert result.verdict.decision == "promote"
    assert {number for id, _, number in attempt.calls if id.startswith("changed")} == {0}
    patient = await run(arms((0.0, 0.9), (1.0, 0.9)), SETTINGS.model_copy(update={"looks": False}))
    assert suite(patient, "changed").num_tasks == 64
    assert len([trace for trace in patient.traces if trace.task.startswith("changed")]) == 64 * 4 * 2


def guard_rounds(attempt: Arms) -> set[int]:
    return {number for id, _, number in attempt.calls if id.startswith("kept")}


async def test_guards_that_are_clear_are_not_asked_again() -> None:
    attempt, settings = arms((0.0, 1.0), (1.0, 1.0)), SETTINGS.model_copy(update={"margin": 0.2})
    result = await run(attempt, settings)
    assert result.verdict.decision == "promote"
    assert guard_rounds(attempt) == {0}
    assert "the guards were clear after 1 of 4 attempts each" in result.verdict.reasons
    patient = arms((0.0, 1.0), (1.0, 1.0))
    await run(patient, settings.model_copy(update={"looks": False}))
    assert guard_rounds(patient) == {0, 1, 2, 3}


async def test_guards_get_all_their_attempts_where_one_kind_looks_worse() -> None:
    """The pooled guard is proven at the first look; kind0 of four has lost a fifth."""

    class OneKind(Arms):
        async def __call__(self, task: Task, version: str, number: int) -> Trace:
            trace = await super().__call__(task, version, number)
            lost = version == "m@2" and task.suite == "kept" and task.kind == "kind0" and int(task.id[4:]) % 20 == 0
            return msgspec.structs.replace(trace, score=Score(value=0.0)) if lost else trace

    attempt = OneKind({"m@1": {"changed": 0.0, "kept": 1.0}, "m@2": {"changed": 1.0, "kept": 1.0}})
    result = await run(attempt, SETTINGS.model_copy(update={"margin": 0.2}))
    assert guard_rounds(attempt) == {0, 1, 2, 3}
    assert suite(result, "kept").passed


def test_a_guards_alpha_is_shared_by_its_looks() -> None:
    """Four looks have .05, .10, .15 and .70 of it."""
    assert guard_alphas(SETTINGS) == pytest.approx((0.0025, 0.005, 0.0075, 0.035))
    assert guard_alphas(SETTINGS.model_copy(update={"looks": False})) == (0, 0, 0, 0.05)


async def test_an_unchanged_candidate_is_not_promoted_and_its_guards_are_not_paid_for() -> None:
    attempt = arms((0.5, 0.85), (0.5, 0.85))
    result = await run(attempt)
    assert result.verdict.decision in ("reject", "inconclusive")
    assert not any(id.startswith("kept") for id, _, _ in attempt.calls)
    assert "guards were not run" in result.verdict.reasons[-1]


async def test_a_broken_candidate_is_rejected_with_the_harm_named() -> None:
    result = await run(arms((0.8, 0.85), (0.0, 0.0)))
    assert result.verdict.decision == "reject"
    assert any("got worse" in reason and "points" in reason for reason in result.verdict.reasons)


async def test_a_hoped_gain_that_is_excluded_is_a_rejection() -> None:
    result = await run(arms((0.0, 0.9), (0.02, 0.9)))
    assert result.verdict.decision == "reject"
    assert any("hoped gain of 20 points is excluded" in reason for reason in result.verdict.reasons)


async def test_a_gain_that_breaks_a_guard_is_rejected() -> None:
    result = await run(arms((0.1, 0.9), (0.8, 0.4)))
    assert result.verdict.decision == "reject"
    assert any("harm is shown in guard kept" in reason for reason in result.verdict.reasons)
    assert not suite(result, "kept").passed


async def test_a_guard_that_is_not_proven_leaves_the_question_open() -> None:
    noisy = SETTINGS.model_copy(update={"margin": 0.08, "min_guard_power": 0.0})
    result = await run(arms((0.1, 0.6), (0.8, 0.55)), noisy)
    assert result.verdict.decision == "inconclusive"
    assert any("not shown to lose less than 8 points" in reason for reason in result.verdict.reasons)


async def test_one_kind_that_falls_inside_a_steady_guard_is_seen() -> None:
    """Only kind0 of four is lost: the pooled guard moves by a quarter of it."""

    class OneKind(Arms):
        async def __call__(self, task: Task, version: str, number: int) -> Trace:
            trace = await super().__call__(task, version, number)
            lost = version == "m@2" and task.suite == "kept" and task.kind == "kind0"
            return trace if not lost else Trace(id="t", origin="eval", task=task.id, score=Score(value=0.0), at=0.0)

    attempt = OneKind({"m@1": {"changed": 0.1, "kept": 0.95}, "m@2": {"changed": 0.8, "kept": 0.95}})
    result = await run(attempt)
    assert result.verdict.decision == "reject"
    assert any("kind kind0" in reason for reason in result.verdict.reasons)


@pytest.mark.parametrize(("kinds", "attempts"), [(22, 4), (11, 2)])
async def test_a_skill_that_is_gone_is_seen_where_the_mean_and_the_alarms_pass(kinds: int, attempts: int) -> None:
    """3 or 6 conversations of the kind: too few for any sign-flip, and a small part of the guard."""

    class Gone(Arms):
        async def __call__(self, task: Task, version: str, number: int) -> Trace:
            trace = await super().__call__(task, version, number)
            if task.suite != "kept" or task.kind != "kind0":
                return trace
            value = float(version == "m@1")
            return Trace(id="t", origin="eval", task=task.id, score=Score(value=value), tags=trace.tags, at=0.0)

    attempt = Gone({"m@1": {"changed": 0.1, "kept": 0.97}, "m@2": {"changed": 0.8, "kept": 0.97}})
    settings = SETTINGS.model_copy(update={"margin": 0.25, "attempts": attempts, "hoped_gain": 0.5})
    result = await run(attempt, settings, [*tasks("changed"), *tasks("kept", 66, kinds=kinds)])
    assert result.verdict.decision == "reject"
    assert suite(result, "kept").passed
    assert result.verdict.reasons[-1] == "what the baseline could do collapsed in guard kept: kind0"
    assert not any("harm is shown" in reason for reason in result.verdict.reasons)


@pytest.mark.parametrize(("shift", "allowed"), [(0.0, 0.01), (0.5, 0.02)])
def test_a_null_candidate_is_rarely_called_gone(shift: float, allowed: float) -> None:
    """8 kinds of two conversations of 4 tasks, all coin tosses; `shift` logits of spread a conversation."""
    rng, num = np.random.default_rng(5), 64
    kinds = np.arange(num) // 8
    clusters = np.arange(num) // 4
    alarms = 0
    for _ in range(400):
        rate = 1 / (1 + np.exp(-shift * rng.normal(size=16)))[clusters, None]
        pairs = Pairs(
            candidate=(rng.random((num, 4)) < rate).astype(float),
            baseline=(rng.random((num, 4)) < 0.5).astype(float),
            weights=np.ones(num),
            clusters=tuple(map(str, clusters)),
            kinds=tuple(map(str, kinds)),
            faults={},
            tries={},
        )
        alarms += bool(collapsed(pairs, COLLAPSE_ALPHA / 8))
    assert alarms / 400 <= allowed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0.000125, 0.00025, 0.000375, 0.00175)),
        ({"looks": False}, (0.0, 0.0, 0.0, 0.0025)),
        ({"alpha_policy": "single"}, (0.0025, 0.005, 0.0075, 0.035)),
        ({"attempts": 1}, (0.0025,)),
    ],
)
def test_alpha_is_spent_over_slots_and_looks(changes: dict[str, object], expected: tuple[float, ...]) -> None:
    assert look_alphas(GateSettings(**changes)) == pytest.approx(expected, rel=1e-12)


async def test_a_guard_too_small_to_prove_anything_only_raises_alarms_and_says_so() -> None:
    few = [*tasks("changed"), *tasks("kept", 12)]
    result = await run(arms((0.1, 0.7), (0.8, 0.7)), batch=few)
    assert result.verdict.decision == "promote"
    assert any("too few to prove a loss below 10 points" in reason for reason in result.verdict.reasons)
    harmed = await run(arms((0.1, 1.0), (0.8, 0.0)), batch=few)
    assert harmed.verdict.decision == "reject"


async def test_a_nan_score_is_invalid() -> None:
    class Nan(Arms):
        async def __call__(self, task: Task, version: str, number: int) -> Trace:
            return Trace(id="t", origin="eval", task=task.id, score=Score(value=math.nan), at=0.0)

    result = await run(Nan({}))
    assert result.verdict.decision == "invalid"
    assert "NaN" in result.verdict.reasons[0]


FAULT = Fault(boundary="tool", kind="timeout", message="late")


async def test_a_fault_is_retried_twice_and_then_masked() -> None:
    tries: dict[tuple[str, str, int], int] = {}

    def broken(task: Task, version: str, number: int) -> Fault | None:
        key = (task.id, version, number)
        tries[key] = tries.get(key, 0) + 1
        heals = task.id == "changed1" and tries[key] == 3
        return FAULT if task.id in ("changed0", "changed1") and number == 0 and not heals else None

    result = await run(arms((0.1, 0.9), (0.8, 0.9), broken=broken), SETTINGS.model_copy(update={"looks": False}))
    assert result.verdict.decision == "promote"  # one pair of 256 is masked
    assert tries["changed0", "m@1", 0] == tries["changed1", "m@2", 0] == 3
    assert ("changed0", 0) not in result.baseline
    assert ("changed1", 0) in result.baseline


async def test_too_many_masked_pairs_are_invalid() -> None:
    def broken(task: Task, version: str, number: int) -> Fault | None:
        return FAULT if task.id in ("changed0", "changed1") else None

    result = await run(arms((0.1, 0.9), (0.8, 0.9), broken=broken))
    assert result.verdict.decision == "invalid"
    assert "gate.max_masked" in result.verdict.reasons[0]


async def test_arms_that_break_at_different_rates_are_invalid() -> None:
    seen: set[tuple[str, int]] = set()

    def broken(task: Task, version: str, number: int) -> Fault | None:
        """The candidate's first try of every third task breaks; the retry works, so no pair is masked."""
        first = (task.id, number) not in seen
        if version == "m@2" and int(task.id.strip("changedkpt")) % 3 == 0 and first:
            seen.add((task.id, number))
            return FAULT
        return None

    result = await run(arms((0.1, 0.9), (0.8, 0.9), broken=broken))
    assert result.verdict.decision == "invalid"
    assert "different rates" in result.verdict.reasons[0]


async def test_a_promotion_must_survive_masked_attempts_counting_against_it() -> None:
    """Eight tasks of fifteen are won (p = 1/256); two that broke would make it 56/1024 at worst."""
    batch = tasks("changed", 15)

    class Won(Arms):
        async def __call__(self, task: Task, version: str, number: int) -> Trace:
            index = int(task.id.removeprefix("changed"))
            if index in (13, 14):
                return Trace(id="t", origin="eval", task=task.id, fault=FAULT, at=0.0)
            value = float(version == "m@2" and index < 8)
            return Trace(id="t", origin="eval", task=task.id, score=Score(value=value), at=0.0)

    lenient = GateSettings(
        alpha_policy="single", attempts=1, alpha=0.01, hoped_gain=0.6, max_masked=0.5, allow_underpowered=True
    )
    result = await run(Won({}), lenient, batch)
    assert suite(result, "changed").p_value <= 0.01
    assert result.verdict.decision == "inconclusive"
    assert "does not survive when masked" in result.verdict.reasons[-1]


async def test_baseline_attempts_are_reused() -> None:
    first = await run(arms((0.15, 0.85), (0.7, 0.85)))
    attempt = arms((0.15, 0.85), (0.7, 0.85))
    again = await run(attempt, baseline_traces=first.baseline)
    assert {version for _, version, _ in attempt.calls} == {"m@2"}
    assert again.verdict.suites == first.verdict.suites
    assert again.verdict.id == first.verdict.id
    assert reusable(first.traces, "m@1") == first.baseline


async def test_the_same_seed_gives_the_same_verdict() -> None:
    first, second = [await run(arms((0.3, 0.85), (0.55, 0.85)), seed=3) for _ in range(2)]
    assert first.verdict.suites == second.verdict.suites


async def test_progress_counts_attempts_and_dollars_are_summed() -> None:
    seen: list[tuple[int, int]] = []
    settings = SETTINGS.model_copy(update={"looks": False})
    result = await run(
        arms((0.1, 0.9), (0.8, 0.9)),
        settings,
        progress=lambda done, total: seen.append((done, total)),
        dollars_of=lambda _: 0.25,
    )
    assert seen[-1] == (1024, 1024)
    assert suite(result, "changed").dollars == pytest.approx(0.25 * 512)
    unpriced = await run(arms((0.1, 0.9), (0.8, 0.9)), settings, dollars_of=lambda _: None)
    assert suite(unpriced, "changed").dollars is None


async def test_a_strong_baseline_lowers_the_hope_and_not_the_bar() -> None:
    """The baseline passes 95 %: no candidate can gain the hoped 20 points, and a perfect one is not called hopeless."""
    settings = SETTINGS.model_copy(update={"hoped_gain": 0.3})
    perfect = await run(arms((0.95, 0.9), (1.0, 0.9)), settings)
    assert perfect.verdict.decision in ("promote", "inconclusive")
    broken = await run(arms((0.95, 0.9), (0.1, 0.9)), settings)
    assert broken.verdict.decision == "reject"
    assert any("got worse" in reason for reason in broken.verdict.reasons)
    same = await run(arms((1.0, 0.9), (1.0, 0.9)), settings)
    assert same.verdict.decision == "reject"
    assert any("leaves room for 1 points at most" in reason for reason in same.verdict.reasons)


async def test_a_lost_engine_propagates_as_it_is() -> None:
    class Lost(Arms):
        async def __call__(self, task: Task, version: str, number: int) -> Trace:
            raise EngineError("gone", retryable=True)

    with pytest.raises(EngineError, match="gone"):
        await run(Lost({}))


async def test_an_arm_that_only_breaks_is_invalid() -> None:
    result = await run(arms((0.1, 0.9), (0.8, 0.9), broken=lambda task, version, number: FAULT))
    assert result.verdict.decision == "invalid"
    assert result.baseline == {}


async def test_no_more_attempts_run_at_once_than_asked_for() -> None:
    class Busy(Arms):
        now = most = 0

        async def __call__(self, task: Task, version: str, number: int) -> Trace:
            self.now += 1
            self.most = max(self.most, self.now)
            trace = await super().__call__(task, version, number)
            self.now -= 1
            return trace

    attempt = Busy({"m@1": {"changed": 0.1, "kept": 0.9}, "m@2": {"changed": 0.9, "kept": 0.9}})
    await run(attempt, SETTINGS.model_copy(update={"concurrency": 3}))
    assert attempt.most <= 3


@pytest.mark.parametrize(
    ("settings", "batch", "says"),
    [
        (SETTINGS, tasks("changed", split="train"), "not held out"),
        (SETTINGS, [], "no held-out task"),
        (SETTINGS, tasks("kept"), "gate.target_suites"),
        (SETTINGS, tasks("changed"), "gate.guard_suites"),
        (SETTINGS, [*BOTH, BOTH[0]], "twice"),
        (GateSettings(target_suites=("a",), guard_suites=("a",)), tasks("a"), "both name"),
    ],
)
async def test_a_holdout_that_can_decide_nothing_is_refused_by_key(
    settings: GateSettings, batch: list[Task], says: str
) -> None:
    attempt = arms((0.1, 0.9), (0.9, 0.9))
    with pytest.raises(ConfigError, match=says):
        await run(attempt, settings, batch)
    assert attempt.calls == []


async def test_an_underpowered_plan_is_refused_before_any_attempt_unless_allowed() -> None:
    attempt = arms((0.1, 0.9), (0.9, 0.9))
    small = [*tasks("changed", 24), *tasks("kept")]
    with pytest.raises(Refused, match=r"gate.hoped_gain.*gate.allow_underpowered"):
        await run(attempt, batch=small)
    assert attempt.calls == []
    allowed = await run(attempt, SETTINGS.model_copy(update={"allow_underpowered": True}), small)
    assert allowed.verdict.reasons[0].startswith("run although the plan objects")


async def test_few_conversations_and_used_slots_are_refused() -> None:
    attempt = arms((0.1, 0.9), (0.9, 0.9))
    with pytest.raises(Refused, match=r"gate\.min_clusters"):
        await run(attempt, batch=[*tasks("changed", 190, per_cluster=10), *tasks("kept")])
    with pytest.raises(Refused, match=r"gate\.num_slots"):
        await run(attempt, slot=20)
    assert attempt.calls == []


def test_single_candidate_mode_takes_fewer_conversations() -> None:
    single = GateSettings(alpha_policy="single", hoped_gain=0.4)
    assert make_plan(tasks("changed", 12), single).problems == ()
    assert make_plan(tasks("changed", 12), GateSettings(hoped_gain=0.4)).problems != ()
    assert make_plan(tasks("changed"), GateSettings()).detectable <= 0.2  # the default can see what it hopes for


def test_a_verdict_is_known_by_weights_holdout_and_rules() -> None:
    same = verdict_id(NEW, OLD, BOTH, SETTINGS)
    assert verdict_id(NEW, OLD, list(reversed(BOTH)), SETTINGS) == same
    assert verdict_id(Version(line="m", number=9, digest="new"), OLD, BOTH, SETTINGS) == same
    assert verdict_id(Version(line="m", number=2, digest="other"), OLD, BOTH, SETTINGS) != same
    assert verdict_id(NEW, OLD, BOTH[1:], SETTINGS) != same


def test_suites_fall_into_roles() -> None:
    targets, guards = split_roles(BOTH, GateSettings(target_suites=("changed",)))
    assert (len(targets), set(guards)) == (64, {"kept"})
    targets, guards = split_roles(BOTH, GateSettings(guard_suites=("kept",)))
    assert (len(targets), set(guards)) == (64, {"kept"})
    targets, guards = split_roles(BOTH, GateSettings())
    assert (len(targets), guards) == (128, {})


async def test_unchanged_candidates_are_rarely_promoted() -> None:
    """Forty independent null candidates at 5 % each: more than 6 promotions would happen once in 400 times."""
    settings = GateSettings(alpha_policy="single", looks=True, attempts=2)
    promoted = 0
    for number in range(40):
        batch = tasks(f"s{number}-", 64)
        rates = {f"s{number}-": 0.5}
        result = await run(Arms({"m@1": rates, "m@2": rates}), settings, batch)
        promoted += result.verdict.decision == "promote"
    assert promoted <= 6
