"""Group-relative policy gradients: each attempt's advantage is its reward against the other attempts at its task.

Pure: groups in, samples out, every normaliser folded into the weights. What is clipped and corrected belongs to the
loss (train/policy.py). An attempt with a fault or without a score is left out of its group's statistics as if it had
never been made; it is not a zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
import numpy as np
from pydantic import Field, model_validator

from honed.algo import advantages
from honed.algo.branches import Branch, branches, constant, sequence_mean, token_mean
from honed.config import Settings
from honed.errors import Refused
from honed.protocols import Loss
from honed.types import Group, Sample, Spend, Trace


class GrpoSettings(Settings):
    """Settings of GRPO. Defaults: mean-centred advantages, one mean over all trained tokens of the batch."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """AdamW's rate for policy-gradient steps: about a tenth of imitation's."""
    anchor: Literal["sampler", "trainer"] = "sampler"
    """What ratios are taken against: the log-probabilities of the sampler, so that the ratio itself corrects for what
    differs; or the trainer's own before the update, with the sampler's error corrected by [train.policy]."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the group's mean, or the mean of the other attempts (RLOO)."""
    scale: Literal["none", "std", "mean", "batch"] = "none"
    """What advantages are divided by: nothing (Dr. GRPO), the group's standard deviation (GRPO, where nearly uniform
    groups count as much as divided ones), its mean (MaxRL), or the batch's deviation over tokens (REINFORCE++)."""
    std_floor: float = Field(default=0.1, gt=0)
    """The least standard deviation that scale = "std" divides by."""
    average: Literal["token", "sequence", "constant"] = "token"
    """Mean over the batch's tokens, over attempts of their token means, or sums over a constant length."""
    constant_length: int = Field(default=256, ge=1)
    """The length that average = "constant" divides by."""
    truncated: Literal["keep", "mask"] = "keep"
    """An attempt cut by the token limit: keep its score, or leave it out like a fault."""
    overlong_start: int = Field(default=0, ge=0)
    """Sampled tokens of an attempt from which its reward falls (DAPO's soft punishment); see overlong_limit."""
    overlong_limit: int = Field(default=0, ge=0)
    """Sampled tokens at which a whole 1 is lost; 0: length costs nothing."""

    @model_validator(mode="after")
    def _consistent(self) -> GrpoSettings:
        if self.scale in ("std", "mean") and self.baseline == "leave_one_out":
            raise ValueError(
                f"scale = {self.scale!r} divides mean-centred rewards; set baseline = 'mean' or scale = 'none'"
            )
        if (self.overlong_limit or self.overlong_start) and self.overlong_start >= self.overlong_limit:
            raise ValueError(
                f"overlong_start = {self.overlong_start} must be below overlong_limit = {self.overlong_limit}"
            )
        return self


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one group: per attempt its advantage (None: left out) and how its spending counts.

    `outcome` is "used", or why the whole group trains nothing: "zero_variance", or "fault" with fewer than two valid
    attempts.
    """

    group: Group
    outcome: Spend
    advantages: tuple[float | None, ...]
    attempts: tuple[Spend, ...]


def judge(group: Group, settings: GrpoSettings) -> Judged:
    """The advantages of a group. Raises Refused for a group of one: nothing to compare with."""
    if len(group.traces) < 2:
        raise Refused(f"group {group.id} has {len(group.traces)} attempt; GRPO compares attempts, set k to 2 or more.")
    attempts = [_attempt(trace, settings) for trace in group.traces]
    valid = [index for index, spend in enumerate(attempts) if spend == "used"]
    rewards = np.array([_reward(group.traces[index], settings) for index in valid], np.float64)
    if len(valid) < 2:
        return _unused(group, "fault", attempts)
    if advantages.is_flat(rewards):
        return _unused(group, "zero_variance", attempts)
    values = _advantages(rewards, settings)
    if not values.any():  # over a mean that is not above 0
        return _unused(group, "zero_variance", attempts)
    found = dict(zip(valid, values.tolist(), strict=True))
    return Judged(
        group=group,
        outcome="used",
        advantages=tuple(found.get(index) for index in range(len(attempts))),
        attempts=tuple(attempts),
    )


class Grpo:
    """The algorithm. `reference` asks for the log-probabilities of the version that the turn began with, which a
    penalty for leaving it needs (train.policy.kl above 0).

    Raises Refused, naming the trace, for attempts without token ids or log-probabilities, and for attempts sampled
    greedily or with top_p or top_k, whose log-probabilities are not the policy's.
    """

    loss: ClassVar[Loss] = "policy_gradient"

    def __init__(self, settings: GrpoSettings | None = None, *, reference: bool = False) -> None:
        self.settings = settings or GrpoSettings()
        wanted = {"old_logprobs": self.settings.anchor == "trainer", "reference": reference}
        self.needs = frozenset(name for name, needed in wanted.items() if needed)

    def judge(self, groups: Sequence[Group]) -> list[Judged]:
        """What becomes of each group: for the ledger and the logs."""
        return [judge(group, self.settings) for group in groups]

    def __call__(self, groups: Sequence[Group]) -> list[Sample]:
        parts: list[list[Branch]] = []
        values: list[float] = []
        for judged in self.judge(groups):
            for trace, advantage in zip(judged.group.traces, judged.advantages, strict=True):
                found = sampled_branches(trace) if advantage is not None else []
                if found and advantage is not None:
                    parts.append(found)
                    values.append(advantage)
        if values and self.settings.scale == "batch":
            sizes = np.array([sum(part.num_trained for part in found) for found in parts])
            values = advantages.whitened(np.array(values), sizes).tolist()
        weights = self._weights(parts)
        return [
            _sample(part, weight, advantage)
            for group, rows, advantage in zip(parts, weights, values, strict=True)
            for part, weight in zip(group, rows, strict=True)
        ]

    def _weights(self, attempts: list[list[Branch]]) -> list[list[np.ndarray]]:
        if self.settings.average == "sequence":
            return sequence_mean(attempts)
        if self.settings.average == "constant":
            return constant(attempts, self.settings.constant_length)
        flat = iter(token_mean([part for parts in attempts for part in parts]))
        return [[next(flat) for _ in parts] for parts in attempts]


def sampled_branches(trace: Trace) -> list[Branch]:
    """The branches of a trace that a policy gradient may use; raises Refused as `Grpo` says."""
    found = branches(trace)
    temperatures = set()
    for turn in trace.turns:
        sampling = turn.sampling
        if len(turn.logprobs) != len(turn.output):
            raise Refused(f"trace {trace.id}: turn {turn.id} has no log-probabilities of what it sampled; imitate it.")
        if not sampling.whole:
            raise Refused(
                f"trace {trace.id}: turn {turn.id} was sampled at temperature {sampling.temperature}, top_p "
                f"{sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}, repetition_penalty "
                f"{sampling.repetition_penalty}, {'in a' if sampling.grammar else 'without a'} grammar, which is not "
                "the policy's own distribution; practise with a temperature above 0, top_p = 1, top_k = 0, min_p = 0, "
                "repetition_penalty = 1 and no grammar."
            )
        temperatures.add(sampling.temperature)
    if len(temperatures) > 1:
        raise Refused(f"trace {trace.id} mixes temperatures {sorted(temperatures)}; a sample has one.")
    return found


def _sample(part: Branch, weights: np.ndarray, advantage: float) -> Sample:
    return part.sample(
        weights,
        advantages=part.mask.astype(np.float32) * np.float32(advantage),
        logprobs=part.logprobs,
        temperature=part.turns[-1].sampling.temperature,
    )


def _attempt(trace: Trace, settings: GrpoSettings) -> Spend:
    if trace.fault is not None or trace.score is None or not math.isfinite(trace.score.value):
        return "fault"
    cut = any(turn.finish == "length" for turn in trace.turns)
    return "truncated" if cut and settings.truncated == "mask" else "used"


def _reward(trace: Trace, settings: GrpoSettings) -> float:
    assert trace.score is not None
    if not settings.overlong_limit:
        return trace.score.value
    length = sum(len(turn.output) for turn in trace.turns)
    return trace.score.value - advantages.overlong(length, settings.overlong_start, settings.overlong_limit)


def _advantages(rewards: np.ndarray, settings: GrpoSettings) -> np.ndarray:
    if settings.scale == "std":
        return advantages.standardised(rewards, settings.std_floor)
    if settings.scale == "mean":
        return advantages.over_mean(rewards)
    return (advantages.centred if settings.baseline == "mean" else advantages.leave_one_out)(rewards)


def _unused(group: Group, outcome: Spend, attempts: list[Spend]) -> Judged:
    marks = tuple(outcome if spend == "used" else spend for spend in attempts)
    return Judged(group=group, outcome=outcome, advantages=(None,) * len(attempts), attempts=marks)
