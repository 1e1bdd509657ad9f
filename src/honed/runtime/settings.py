"""What the learner child is told, as one JSON object."""

from __future__ import annotations

from pydantic import Field

from honed.config import Settings
from honed.engine.settings import EngineSettings
from honed.model.lora import LoraSettings
from honed.train.settings import TrainSettings
from honed.types import Precision


class LearnerSettings(Settings):
    """Settings of the learner child: its trainer and the rollout engine beside it."""

    blobs: str = ".honed/blobs"
    """The folder that snapshots go to."""
    train: TrainSettings = TrainSettings()
    """The trainer."""
    lora: LoraSettings = LoraSettings()
    """The adapter that is trained."""
    engine: EngineSettings = EngineSettings()
    """The rollout engine. Its device and number format are the trainer's too."""
    precision: Precision | None = None
    """What practice's attempts ask the engine for, beside what it serves at."""
    niceness: int = Field(default=5, ge=0, le=19)
    """How far below serving the child's priority is."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the child; 0: one a core. The engine and the trainer have their own where they say so."""
