"""On-policy distillation: the student samples, and each token is pushed towards what a teacher would rather have said.

The advantage of a token is log p_teacher - log p_student at the student's own sample, whose mean is minus the reverse
KL divergence (Lu et al., Thinking Machines 2025): dense, no reward needed, and the loss is GRPO's policy gradient. One
teacher, or several by kind of task, which join specialists into one model. Teachers are versions over the same base.
Pure: the loop fills in the teachers' log-probabilities between `__call__` and `complete`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
from pydantic import Field

from honed.algo.branches import branches, token_mean
from honed.algo.grpo import sampled_branches
from honed.config import Settings
from honed.errors import Refused
from honed.protocols import Loss
from honed.types import Group, Sample

OTHERS = "*"


class DistillSettings(Settings):
    """[distill]: who teaches what."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """AdamW's rate for distillation steps."""
    teachers: dict[str, str] = {}
    """Kind of task to the version that teaches it (line@number); "*" teaches the kinds that are not named."""
    strength: float = Field(default=1.0, gt=0)
    """What the difference of log-probabilities is multiplied by."""


class Distill:
    """The algorithm: every sampled token of every attempt without a fault, whatever it scored.

    Raises Refused, naming the trace, for attempts that the policy did not sample as it is (see Grpo).
    """

    loss: ClassVar[Loss] = "policy_gradient"

    def __init__(self, settings: DistillSettings | None = None) -> None:
        self.settings = settings or DistillSettings()
        self.needs = frozenset({"teacher"})

    def __call__(self, groups: Sequence[Group]) -> list[Sample]:
        traces = [trace for group in groups for trace in group.traces if trace.fault is None and branches(trace)]
        parts = [part for trace in traces for part in sampled_branches(trace)]
        return [
            part.sample(weights, logprobs=part.logprobs, temperature=part.turns[-1].sampling.temperature)
            for part, weights in zip(parts, token_mean(parts), strict=True)
        ]

    def teacher(self, kind: str) -> str:
        """The version that teaches a kind of task. Raises Refused when none does."""
        found = self.settings.teachers.get(kind) or self.settings.teachers.get(OTHERS)
        if found is None:
            raise Refused(f'no version teaches tasks of kind {kind!r}; name one in distill.teachers, or one for "*".')
        return found

    def complete(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their advantages, from the teacher's log-probabilities in `reference`."""
        return [_complete(sample, self.settings.strength) for sample in samples]


def _complete(sample: Sample, strength: float) -> Sample:
    assert sample.reference is not None, "a sample without its teacher's log-probabilities"
    assert sample.logprobs is not None, "a sample without the sampler's log-probabilities"
    better = (sample.reference - sample.logprobs) * np.float32(strength)
    return msgspec.structs.replace(sample, advantages=np.where(sample.weights != 0, better, 0), reference=None)
