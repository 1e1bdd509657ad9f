"""The algorithms by name, and the two phases of learning with their settings."""

from __future__ import annotations

from collections.abc import Callable

from honed import plugins
from honed.algo.grpo import judge
from honed.algo.sft import Sft
from honed.assemble.config import Config, compares
from honed.errors import ConfigError
from honed.loop.lessons import Phase
from honed.loop.rollout import is_flat
from honed.protocols import Algorithm
from honed.types import Group

plugins.register("algorithm", "sft", "honed.algo.sft:Sft")
plugins.register("algorithm", "grpo", "honed.algo.grpo:Grpo")
plugins.register("algorithm", "dpo", "honed.algo.dpo:Dpo")
plugins.register("algorithm", "distill", "honed.algo.distill:Distill")


def flat_by(config: Config) -> Callable[[Group], bool]:
    """Which groups teach nothing: for GRPO those that it would drop itself, for imitation and distillation none."""
    name = config.learner.algorithm
    if name == "grpo":
        return lambda group: judge(group, config.grpo).outcome == "zero_variance"
    return is_flat if compares(config) else _never


def _never(group: Group) -> bool:
    return False


def sft_phase(config: Config) -> Phase:
    """Imitation."""
    return Phase(
        algorithm=Sft(config.sft),
        learning_rate=config.sft.learning_rate,
        batch_size=config.sft.batch_size,
        passes=config.sft.passes,
        decay=config.sft.decay,
        candidates=config.sft.rehearsal_candidates,
        seed=config.sft.seed,
    )


def practice_phase(config: Config) -> Phase:
    """What practice learns by, at its own learning rate; an algorithm of somebody else's takes that of [grpo].

    A reference is asked for where the loss compares with it. Raises ConfigError for what is no algorithm.
    """
    name = config.learner.algorithm
    made = plugins.resolve("algorithm", name)
    rate = config.grpo.learning_rate
    if name == "grpo":
        algorithm = made(config.grpo, reference=config.train.policy.kl > 0)
    elif name == "dpo":
        algorithm, rate = made(config.dpo, reference=config.train.preference.kind != "simpo"), config.dpo.learning_rate
    elif name == "sft":
        algorithm, rate = made(config.sft), config.sft.learning_rate
    elif name == "distill":
        algorithm, rate = made(config.distill), config.distill.learning_rate
    else:
        algorithm = made()
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"learner.algorithm = {name!r} is no algorithm.")
    return Phase(algorithm=algorithm, learning_rate=rate)
