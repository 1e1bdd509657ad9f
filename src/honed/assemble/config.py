"""The config file: one TOML document whose sections are the settings that sit beside what they configure."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from honed import plugins
from honed.algo.distill import DistillSettings
from honed.algo.dpo import DpoSettings
from honed.algo.grpo import GrpoSettings
from honed.algo.sft import SftSettings
from honed.api.settings import ServeSettings
from honed.api.watch import WatchSettings
from honed.config import Settings, parse, read_toml, recipe_digest
from honed.engine.scripted import ScriptedSettings
from honed.engine.settings import EngineSettings
from honed.errors import ConfigError
from honed.loop import lessons
from honed.loop.capture import CaptureSettings
from honed.loop.curate import CurateSettings
from honed.loop.gate import GateSettings
from honed.loop.lessons import LearnSettings
from honed.loop.rollout import RolloutSettings
from honed.loop.turn import RunSettings
from honed.model.lora import LoraSettings
from honed.train.settings import TrainSettings


class ModelSettings(Settings):
    """[model]: the open-weights model, and the line that it begins."""

    source: str = "smollm2"
    """"smollm2", a .gguf file, a Hugging Face directory, a hub name, or "scripted" (no model: for tests)."""
    line: str = "honed"
    """The public name of the model line."""
    format: str | None = None
    """Tool-call format by name; None: by the digest of the model's chat template."""
    cache: str | None = None
    """Where converted models are kept; None: $HONED_CACHE or ~/.cache/honed."""


class StoreSettings(Settings):
    """[store]: where everything is kept."""

    root: str = ".honed"
    """The folder of records, weights, logs and sockets."""
    url: str | None = None
    """A database URL; None: SQLite in root."""
    blobs: str | None = None
    """A folder or fsspec URL for weights; None: root/blobs."""


class TasksSettings(Settings):
    """[tasks]: tasks that somebody gives."""

    suites: tuple[str, ...] = ()
    """module:function of tasks that judge (split holdout or dev), put into the store when the loop is built."""


class LearnerSection(Settings):
    """[learner]: the child that trains and practises."""

    niceness: int = Field(default=5, ge=0, le=19)
    """How far below serving its priority is."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of it; 0: one a core."""
    algorithm: str = "grpo"
    """What practice learns by: a name or module:attribute."""
    verifier_processes: int = Field(default=1, ge=1)
    """Processes for verifiers that are not async."""


class PricesSettings(Settings):
    """[prices]: the price book."""

    book: str | None = None
    """A TOML file of prices; None: the book that ships with honed, whose prices are assumptions."""


class Config(Settings):
    """One TOML file. Relative paths in it are relative to its folder."""

    model: ModelSettings = ModelSettings()
    store: StoreSettings = StoreSettings()
    serve: ServeSettings = ServeSettings()
    watch: WatchSettings = WatchSettings()
    engine: EngineSettings = EngineSettings()
    scripted: ScriptedSettings = ScriptedSettings()
    capture: CaptureSettings = CaptureSettings()
    curate: CurateSettings = CurateSettings()
    rollout: RolloutSettings = RolloutSettings()
    lora: LoraSettings = LoraSettings()
    train: TrainSettings = TrainSettings()
    sft: SftSettings = SftSettings()
    grpo: GrpoSettings = GrpoSettings()
    dpo: DpoSettings = DpoSettings()
    distill: DistillSettings = DistillSettings()
    learn: LearnSettings = LearnSettings()
    learner: LearnerSection = LearnerSection()
    gate: GateSettings = GateSettings()
    run: RunSettings = RunSettings()
    prices: PricesSettings = PricesSettings()
    tasks: TasksSettings = TasksSettings()


BUILT_IN = ("sft", "grpo", "dpo", "distill")
"""The algorithms whose settings are known here."""
COMPARING = ("grpo", "dpo")
"""Those that learn from how attempts at one task compare."""
LEARNED = ("model", "lora", "train", "sft", "grpo", "dpo", "distill", "learn", "learner", "rollout", "curate")
"""The sections that decide what a version learns: a turn that is under way may not change them."""


def load_config(path: str | Path) -> Config:
    """The config in a TOML file, refused (ConfigError naming the keys) where it could only waste money.

    Relative paths become relative to the file, whose folder is put on the import path for plug-ins.
    """
    path = Path(path).absolute()
    config = parse(Config, read_toml(path), source=str(path))
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    config = _absolute(config, path.parent)
    check(config)
    return config


def check(config: Config) -> None:
    """Refuses a config that could only waste money, before any compute. Raises ConfigError naming the keys."""
    lessons.check(config.learn, config.curate, config.sft.batch_size, config.sft.passes, comparing=compares(config))
    if config.curate.maker:
        plugins.resolve("maker", config.curate.maker)
    _check_practice(config)
    if config.train.method == "full" and config.lora != LoraSettings():
        raise ConfigError("[lora] does nothing with train.method = 'full', which trains every weight; take one out.")
    if config.learn.steps and (config.rollout.temperature <= 0 or config.rollout.top_p < 1):
        raise ConfigError(
            f"rollout.temperature = {config.rollout.temperature} and rollout.top_p = {config.rollout.top_p}: practice "
            "must sample from the whole distribution of the policy. Set them above 0 and to 1."
        )


def compares(config: Config) -> bool:
    """Whether practice learns from how attempts at one task compare; somebody else's algorithm is taken to."""
    return config.learner.algorithm in COMPARING or ":" in config.learner.algorithm


def _check_practice(config: Config) -> None:
    """Refuses keys that contradict each other, or that would silently do nothing, across the sections of practice."""
    policy, algorithm = config.train.policy, config.learner.algorithm
    if algorithm == "grpo" and policy.objective == "gspo" and config.grpo.average != "sequence":
        raise ConfigError(
            f"train.policy.objective = 'gspo' with grpo.average = {config.grpo.average!r}: a ratio of whole sequences "
            "weighs whole sequences. Set grpo.average = 'sequence'."
        )
    if config.grpo.anchor == "sampler" and (policy.correction, policy.correction_high) != ("truncate", 2.0):
        raise ConfigError(
            f"train.policy.correction = {policy.correction!r} with grpo.anchor = 'sampler': the ratio corrects for the "
            "sampler already, and correcting twice counts its error double. Set grpo.anchor = 'trainer'."
        )
    if (config.rollout.precision or config.engine.precision) == "int8" and config.learn.steps:
        _check_int8(config)
    if algorithm == "distill" and config.learn.steps:
        _check_distillation(config)
    readers = {
        "grpo": (config.grpo, ("grpo",)),
        "dpo": (config.dpo, ("dpo",)),
        "distill": (config.distill, ("distill",)),
        "train.policy": (policy, ("grpo", "distill")),
        "train.preference": (config.train.preference, ("dpo",)),
    }
    for section, (settings, names) in readers.items():
        idle = algorithm in BUILT_IN and algorithm not in names and settings != type(settings)()
        if config.learn.steps and idle:
            raise ConfigError(
                f"[{section}] is read by learner.algorithm = {' or '.join(map(repr, names))}, not by {algorithm!r}; "
                "take it out."
            )


def _check_int8(config: Config) -> None:
    algorithm = config.learner.algorithm
    key = "rollout.precision" if config.rollout.precision else "engine.precision"
    way_out = "Set rollout.precision = 'full'." if key == "engine.precision" else "Leave it out."
    if algorithm == "distill":
        raise ConfigError(
            f"{key} = 'int8' with learner.algorithm = 'distill': each token's push is a difference from "
            "what the student itself thought, which int8 blurs. " + way_out
        )
    if algorithm == "grpo" and config.grpo.anchor != "trainer":
        raise ConfigError(
            f"{key} = 'int8' with grpo.anchor = 'sampler': what int8 sampled would be taken for what the "
            "policy thought. Set grpo.anchor = 'trainer', which weighs each token by how far the two differ."
        )
    compared = {"grpo": config.train.policy.kl > 0, "dpo": config.train.preference.kind != "simpo"}
    if config.engine.precision == "int8" and compared.get(algorithm):
        what = "train.policy.kl" if algorithm == "grpo" else f"train.preference.kind = {config.train.preference.kind!r}"
        raise ConfigError(
            f"{what} with engine.precision = 'int8': what the turn's first version thought, which the loss compares "
            "with, would be int8's reading of it. Set rollout.precision = 'int8' and leave engine.precision at 'full'."
        )


def _check_distillation(config: Config) -> None:
    policy = config.train.policy
    if not config.distill.teachers:
        raise ConfigError(
            'learner.algorithm = "distill" without distill.teachers: nobody teaches. Name a version, such as '
            '{"*" = "support@3"}.'
        )
    if policy.kl > 0:
        raise ConfigError(
            "train.policy.kl with learner.algorithm = 'distill': the teacher is the reference. Set it to 0."
        )
    if policy.objective == "gspo":
        raise ConfigError(
            "train.policy.objective = 'gspo' with learner.algorithm = 'distill': each token has an advantage of its "
            "own, so a ratio of whole sequences has no place. Set it to 'ppo' or 'cispo'."
        )


def recipe(config: Config) -> str:
    """Digest of what decides how a version learns; changing prices or ports under a running turn is allowed."""
    sections = {name: getattr(config, name) for name in LEARNED}
    return recipe_digest(Config(**sections))


def _absolute(config: Config, folder: Path) -> Config:
    """Paths relative to the config's folder become absolute."""

    def path(value: str | None) -> str | None:
        return value if value is None or "://" in value else str((folder / Path(value).expanduser()).absolute())

    kept = config.store
    model, source = config.model, config.model.source
    if source.endswith(".gguf") or source.startswith((".", "~", "/")):
        model = model.model_copy(update={"source": path(source)})
    changes = {
        "store": kept.model_copy(update={"root": path(kept.root), "url": path(kept.url), "blobs": path(kept.blobs)}),
        "model": model.model_copy(update={"cache": path(model.cache)}),
        "prices": config.prices.model_copy(update={"book": path(config.prices.book)}),
    }
    return config.model_copy(update=changes)
