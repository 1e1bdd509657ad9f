"""Recorded groups and a seed decide the weights: a stored run of practice, learned again by the real trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
import torch

from honed.algo.grpo import Grpo
from honed.algo.sft import Sft
from honed.loop import lessons
from honed.loop.curate import CurateSettings
from honed.loop.learn import Lesson, learn
from honed.loop.lessons import LearnSettings, Phase, Plan, Progress
from honed.loop.rollout import Rollouts
from honed.model.lora import LoraSettings
from honed.store import open_store
from honed.sync.memory import MemoryChannel
from honed.testing import FakeEngine, FakeScorer, fake_task, gather
from honed.train.local import LocalTrainer
from honed.train.settings import TrainSettings
from honed.types import Group, Message, Sampling, Score, Span, Trace, Turn, Version

from .models import VOCABULARY, naive_logprobs, sample, tiny

SETTINGS = LearnSettings(imitate=False, steps=3, groups_per_step=2, group_size=4)
TASKS = [fake_task(f"refund order {i}", split="train") for i in range(5)]
PLAN = Plan(
    run="run_1", line="m", number=1, parent=Version(line="m", number=0), tasks=tuple(t.id for t in TASKS), seed=7
)


def attempt(id: str, task: str, rng: np.random.Generator, score: float) -> Trace:
    """Three tokens after a prompt that the group shares, with the base model's log-probabilities."""
    context, output = (1, 2, 3, 4), tuple(int(token) for token in rng.integers(5, VOCABULARY, size=3))
    with torch.no_grad():
        found = naive_logprobs(tiny(torch.float32), sample([*context, *output], len(output)))[-len(output) :]
    turn = Turn(
        id=f"{id}.0",
        trace=id,
        context=context,
        reply=Message(role="assistant", content="x"),
        output=output,
        logprobs=tuple(found.tolist()),
        sampling=Sampling(temperature=1.0),
        model="m",
        versions=(Span(version="m@0.0", count=len(output)),),
        finish="stop",
        at=1.0,
    )
    return Trace(id=id, origin="rollout", line="m", task=task, turns=(turn,), score=Score(value=score), at=1.0)


def record(root: Path, scores: tuple[float, ...] = (1.0, 0.0, 0.0, 1.0)) -> Path:
    """A store with all groups of PLAN."""
    rng = np.random.default_rng(3)
    with open_store(None, root) as store:
        store.tasks.put(TASKS)
        for step in range(SETTINGS.steps):
            for slot, task in enumerate(lessons.draw(PLAN.tasks, SETTINGS.groups_per_step, PLAN.seed, 2, step)):
                name = f"{step}.{slot}"
                traces = [attempt(f"t{name}.{i}", task, rng, score) for i, score in enumerate(scores)]
                store.groups.put(PLAN.run, step + 1, slot, Group(id=f"g{name}", task=task, traces=tuple(traces)))
    return root


def nothing_new(*args: object, **names: object) -> NoReturn:
    raise AssertionError("every group is recorded")


class Cut(Exception):
    """The learner is killed."""


async def replay(recorded: Path, root: Path, cut: int = 0) -> tuple[Version, bytes]:
    """Learns a copy of the recorded run, cut off after `cut` saves and taken up by a new trainer; version, weights."""
    shutil.copytree(recorded, root)
    saved = [Progress()]

    async def save(progress: Progress) -> None:
        saved.append(progress)
        if len(saved) - 1 == cut:
            raise Cut

    with open_store(None, root) as store:
        while True:
            model = tiny(torch.float32)
            loaded = SimpleNamespace(model=model, config=model.config, directory=root, digest="base")
            settings = TrainSettings(threads=1, micro_tokens=40)
            trainer = LocalTrainer(loaded, LoraSettings(rank=4, alpha=8), settings, root / "blobs", MemoryChannel())
            rollouts = Rollouts(
                line="m", sessions=nothing_new, environments=nothing_new, scorer=FakeScorer(), gather=gather
            )
            lesson = Lesson(
                store=store,
                trainer=trainer,
                engine=FakeEngine(),
                rollouts=rollouts,
                sft=Phase(algorithm=Sft(), learning_rate=1e-3),
                practice=Phase(algorithm=Grpo(), learning_rate=1e-2),
                settings=SETTINGS,
                curate=CurateSettings(probe_attempts=0),
            )
            try:
                version, progress = await learn(lesson, PLAN, saved[-1], save)
            except Cut:
                continue
            finally:
                await trainer.close()
            assert (progress.applied, progress.skipped) == (3, 0)
            weights = Path(version.uri.removeprefix("file://")) / "adapter_model.safetensors"
            return version, weights.read_bytes()


async def test_from_recorded_groups_the_same_seed_gives_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    recorded = record(tmp_path / "recorded")
    one, weights = await replay(recorded, tmp_path / "one")
    other, same = await replay(recorded, tmp_path / "other")
    assert (one.digest, one.data) == (other.digest, other.data)
    assert weights == same


@pytest.mark.parametrize("cut", [1, 3])
async def test_a_replay_that_is_cut_off_ends_in_the_same_weights(tmp_path: Path, cut: int) -> None:
    recorded = record(tmp_path / "recorded")
    whole, _ = await replay(recorded, tmp_path / "whole")
    resumed, _ = await replay(recorded, tmp_path / "resumed", cut=cut)
    assert resumed.digest == whole.digest


async def test_other_scores_give_other_weights(tmp_path: Path) -> None:
    one, _ = await replay(record(tmp_path / "a"), tmp_path / "one")
    other, _ = await replay(record(tmp_path / "b", (0.0, 1.0, 0.0, 1.0)), tmp_path / "other")
    assert one.digest != other.digest
