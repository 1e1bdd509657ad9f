"""`honed eval` with a real learner child over a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from model.folders import write_directory

from honed import codec
from honed.store import open_store
from honed.testing import fake_task

from .conftest import CONFIG, Run

Read = Callable[..., Any]
SMALL = """
[engine]
threads = 1
slots = 2
capacity = 512
context = 128
[rollout]
max_tokens = 4
[learner]
threads = 1
"""


def test_a_version_is_measured_on_the_tasks_of_a_split(config: Path, run: Run, read: Read) -> None:
    write_directory(config.parent / "model")
    config.write_text(CONFIG.replace("scripted", "./model") + SMALL)
    place = {"environment": "honed.testing:FakeEnvironment", "verifier": "honed.testing:says_right"}
    tasks = [msgspec.structs.replace(fake_task(f"order {at}", split="dev", suite="orders"), **place) for at in range(2)]
    with open_store(None, config.parent / "kept") as store:
        store.tasks.put([msgspec.structs.replace(task, id=codec.task_id(task)) for task in tasks])
        (found,) = read("eval", "support@0", "--attempts", "2")
        assert (found["suite"], found["num_tasks"], found["faults"]) == ("orders", 2, 0)
        assert found["low"] <= found["success"] <= found["high"]
        assert store.traces.count(origin="eval") == 4
        assert read("why", store.traces.list(origin="eval")[0].id)["versions"][0]["what"] == "base model"
