"""kill -9 on the real model: of the loop, of its learner, and of the serving engine. Minutes of work: marker long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from honed.record import Drainer
from honed.store import Store, open_store
from honed.types import Version

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
HONED = str(Path(sys.executable).parent / "honed")
CONFIG = """
[model]
source = "smollm2"
line = "support"
[store]
root = "store"
[serve]
port = 0
[engine]
threads = 2
context = 1024
[train]
threads = 2
[rollout]
max_tokens = 16
[sft]
passes = 1
batch_size = 4
[learn]
steps = 0
[tasks]
suites = ["few_lessons:holdout"]
[gate]
target_suites = ["support-changed-before", "support-unchanged-before"]
attempts = 1
min_clusters = 8
alpha_policy = "single"
allow_underpowered = true
"""
LESSONS = """
from support import env, lessons

def few():
    return lessons.demonstrations()[:8]

def holdout():
    return env.suite("before", "holdout", env.HOLDOUT_SEEDS, 8)
"""


def prepare(folder: Path) -> Path:
    """A config of a short turn: eight demonstrations in two steps, sixteen held-out tasks."""
    (folder / "honed.toml").write_text(CONFIG)
    (folder / "few_lessons.py").write_text(LESSONS)
    return folder / "honed.toml"


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "examples"),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "HONED_LOG": "on",
    }


def train(config: Path, kill: str = "", after: str = "") -> Version:
    """One turn of given lessons; `kill` dies at the first event `after`, and the command is given again."""
    command = [HONED, "train", "few_lessons:few", "-c", str(config), "--json"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment()
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if kill and f'"{after}"' in line:
                victim = child.pid if kill == "loop" else learner_of(child.pid)
                os.kill(victim, signal.SIGKILL)
                kill = "done"
    if kill:
        assert kill == "done", f"the event {after!r} never came"
        assert child.returncode != 0
        return train(config)
    with open_store(None, config.parent / "store") as store:
        return store.versions.get("support", 1)


def learner_of(pid: int) -> int:
    """The learner child of a loop's process."""
    return next(c.pid for c in psutil.Process(pid).children() if "honed.runtime.learner" in " ".join(c.cmdline()))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return train(prepare(tmp_path_factory.mktemp("u")))


@pytest.mark.parametrize(("kill", "after"), [("loop", "learn.imitated"), ("learner", "gate.progress")])
def test_a_killed_turn_goes_on_to_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory, uninterrupted: Version, kill: str, after: str
) -> None:
    config = prepare(tmp_path_factory.mktemp("k"))
    version = train(config, kill, after)
    assert version.digest == uninterrupted.digest
    assert version.data != ""
    with open_store(None, config.parent / "store") as store:
        assert len(store.verdicts.list(version=version.id)) == 1
        assert store.traces.count(origin="eval") == 32  # sixteen tasks, two arms, no attempt twice
        assert_no_half_version(store, config.parent / "store")


def assert_no_half_version(store: Store, root: Path) -> None:
    """What lies under versions/ and is no stored version's has no manifest under its name."""
    stored = {Path(version.uri) for version in store.versions.list()}
    for manifest in (root / "blobs" / "versions").rglob("manifest.json"):
        assert manifest.parent in stored


def test_a_killed_engine_answers_again_and_no_answer_is_lost(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = prepare(tmp_path_factory.mktemp("s"))
    command = [HONED, "serve", "-c", str(config)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as child:
        assert child.stdout is not None
        url = child.stdout.readline().partition("http://")[2].strip()
        answered = [post(url).raise_for_status().json()["id"]]
        for process in psutil.Process(child.pid).children():
            process.kill()
        until = time.monotonic() + 120
        while len(answered) < 3 and time.monotonic() < until:
            response = post(url)
            assert response.status_code in (200, 503)  # 503: typed, and worth another try
            if response.status_code == 200:
                answered.append(response.json()["id"])
            else:
                time.sleep(0.5)
        child.terminate()
        assert child.wait(60) == 0
    with open_store(None, config.parent / "store") as store:
        Drainer(config.parent / "store" / "capture", store).drain_once()
        assert len(answered) == 3
        assert store.traces.count(origin="production") == 3
        assert all(store.traces.turn(id).reply.content for id in answered)


def post(url: str) -> httpx.Response:
    """One greedy answer of a few tokens."""
    ask = [{"role": "user", "content": "Say hello."}]
    body = {"model": "support", "messages": ask, "max_tokens": 8, "temperature": 0}
    return httpx.post(f"http://{url}/chat/completions", json=body, timeout=120)
