"""The whole road on a real model: teach, serve, break, notice, practise, gate, release, and guard. Leaves a page.

Every step is one of honed's own commands in a process of its own; the customers are another. What is written here is
the order of the story and the gathering of its figures, nothing of honed's work.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from honed.errors import Refused
from support import configs, figures, report
from support.stage import Gateway, StageFailed, Stages

BEFORE, AFTER, REPAIRED, FORCED, RESTORED = 48, 120, 72, 36, 24
"""Requests of each part of the story."""
WINDOW = 24


class Story:
    """One run: its folder, its stages, and what happened so far."""

    def __init__(self, seed: int, folder: Path) -> None:
        if folder.exists():
            if not (folder / "teach.toml").exists() and any(folder.iterdir()):
                raise Refused(f"{folder} holds something else than a demo; choose another --folder.")
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.seed, self.folder = seed, folder
        self.configs = configs.write(folder, seed, threads=os.cpu_count() or 1)
        self.stages = Stages(folder)
        self.requests: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.turns: dict[str, Any] = {}
        self.first_seed = 1_000 + 100_000 * seed

    def mark(self, label: str, *, after: str = "") -> None:
        """A vertical line in the plot of success over time: here, or after the last answer of a version."""
        answered = [index for index, row in enumerate(self.requests, 1) if row["version"] == after]
        self.marks.append({"request": answered[-1] if answered else len(self.requests), "label": label})

    def customers(self, part: str, gateway: Gateway, era: str, num: int) -> None:
        """Traffic of one part of the story."""
        rows = self.stages.traffic(f"customers, {part}", gateway.url, era, self.first_seed, num)
        self.first_seed += num
        self.requests += [{**row, "part": part} for row in rows]

    def turn(self, name: str, title: str, *arguments: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """One turn of the loop, by traffic or by given lessons."""
        said, events = self.stages.honed(title, *arguments, allowed=allowed)
        self.turns[name] = said
        self.events += events
        return said


def run_demo(*, seed: int, folder: Path, report: Path) -> None:
    """Runs the story and writes the report, and demo.json beside it. Raises StageFailed when a step fails."""
    started = time.monotonic()
    story = Story(seed, folder.absolute())
    with story.stages.progress:
        gateway = _tell(story)
        gateway.close()
    demo = figures.gather(story, _machine(), time.monotonic() - started, WINDOW)
    report.with_name("demo.json").write_text(json.dumps(demo, indent=1), encoding="utf-8")
    _write(demo, report)


def _tell(story: Story) -> Gateway:
    """The story in order; the gateway serves through all of it."""
    teach, repair, broken = (str(story.configs[name]) for name in ("teach", "repair", "broken"))
    story.turn("teach", "teach version 1", "train", "support.lessons:demonstrations", "-c", teach)
    gateway = story.stages.serve(story.configs["repair"])
    try:
        story.mark("version 1")
        story.customers("before", gateway, "before", BEFORE)
        story.mark("tools change")
        story.customers("after", gateway, "after", AFTER)
        repaired = story.turn("repair", "repair: learn from failures", "run", repair, "--once", allowed=(0, 1))
        if repaired["ended"] != "promoted":
            raise StageFailed(f"the gate did not promote the repaired version: {'; '.join(repaired['reasons'])}")
        _await(gateway, repaired["version"])
        story.mark("version 2")
        story.customers("repaired", gateway, "after", REPAIRED)
        bad = story.turn(
            "broken", "a broken candidate", "train", "support.lessons:demonstrations_after", "-c", broken, allowed=(1,)
        )
        if bad["ended"] != "rejected":
            raise StageFailed(f"the gate did not reject the broken candidate, it said {bad['ended']}.")
        forced = (
            "versions",
            "release",
            bad["version"],
            "--force",
            "--reason",
            "the demo breaks it on purpose",
            "-c",
            broken,
        )
        story.stages.honed("force it past the gate", *forced)
        _await(gateway, bad["version"])
        story.mark("broken version forced")
        story.customers("forced", gateway, "after", FORCED)
        if not gateway.wait_for(repaired["version"], 30):
            raise StageFailed("the watch did not take the broken version back.")
        story.mark("taken back", after=bad["version"])
        story.customers("restored", gateway, "after", RESTORED)
    except BaseException:
        gateway.close()
        raise
    return gateway


def _await(gateway: Gateway, version: str) -> None:
    if not gateway.wait_for(version, 60):
        raise StageFailed(f"{version} was released and does not serve.")


def _write(demo: dict[str, Any], path: Path) -> None:
    report.write_report(demo, path)
    path.with_name("success.svg").write_text(report.success_plot(demo), encoding="utf-8")
    print(figures.summary(demo))
    print(f"\nThe report is {path}; every figure is in {path.with_name('demo.json')}.")


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "model": "SmolLM2-135M-Instruct, fp32",
    }
