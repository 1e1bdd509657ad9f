"""Two children under one supervisor: restarted alone, ended together, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from honed.runtime.supervise import Supervisor

STAYS = "import time, sys\nopen(sys.argv[1], 'a').write('up\\n')\ntime.sleep(600)"
DIES_TWICE = """
import sys, time
lives = open(sys.argv[1], 'a+')
lives.write('up\\n'); lives.flush(); lives.seek(0)
if len(lives.readlines()) < 3: sys.exit(1)
time.sleep(600)
"""
REFUSES = "import sys\nopen(sys.argv[1], 'a').write('up\\n')\nsys.exit(2)"
REFUSES_LATER = """
import sys, time
lives = open(sys.argv[1], 'a+')
lives.write('up\\n'); lives.flush(); lives.seek(0)
num_lives = len(lives.readlines())
if num_lives == 1: sys.exit(1)
if num_lives < 4: sys.exit(2)
time.sleep(600)
"""


def python(program: str, *args: Path) -> list[str]:
    return [sys.executable, "-c", program, *map(str, args)]


def lives(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


async def until(condition: object) -> None:
    """Waits for a condition; the suite's own timeout ends a test that would wait for ever."""
    while not condition():  # type: ignore[operator]  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_a_child_that_dies_is_started_again_and_the_other_is_not_touched(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    commands = {"serve": python(STAYS, one), "run": python(DIES_TWICE, other)}
    supervisor = Supervisor(commands, backoff_seconds=0.01)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: lives(other) == 3 and lives(one) == 1)
    os.kill(supervisor.pids["serve"], signal.SIGKILL)
    await until(lambda: lives(one) == 2)
    assert supervisor.num_restarts == {"serve": 1, "run": 2}
    supervisor.stop()
    assert await running == 0
    assert not any(psutil.pid_exists(pid) for pid in supervisor.pids.values())


async def test_a_wrong_config_ends_both_with_code_2(tmp_path: Path) -> None:
    commands = {"serve": python(STAYS, tmp_path / "one"), "run": python("raise SystemExit(2)")}
    supervisor = Supervisor(commands)
    assert await supervisor.run() == 2
    assert not psutil.pid_exists(supervisor.pids["serve"])


async def test_a_loop_that_refuses_later_is_started_again_and_never_ends_serving(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    commands = {"serve": python(STAYS, one), "run": python(REFUSES_LATER, other)}
    supervisor = Supervisor(commands, backoff_seconds=0.01)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: lives(other) == 4)
    assert psutil.pid_exists(supervisor.pids["serve"])
    assert supervisor.num_restarts == {"serve": 0, "run": 3}
    supervisor.stop()
    assert await running == 0


async def test_a_loop_that_refuses_after_it_ran_for_long_is_started_again(tmp_path: Path) -> None:
    commands = {"serve": python(STAYS, tmp_path / "one"), "run": python(REFUSES, tmp_path / "other")}
    supervisor = Supervisor(commands, backoff_seconds=0.01, stable_seconds=0.0)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: lives(tmp_path / "other") == 2)
    supervisor.stop()
    assert await running == 0


async def test_a_gateway_that_refuses_its_config_ends_both_at_any_time(tmp_path: Path) -> None:
    commands = {"serve": python(REFUSES_LATER, tmp_path / "one"), "run": python(STAYS, tmp_path / "other")}
    supervisor = Supervisor(commands, backoff_seconds=0.01)
    assert await supervisor.run() == 2
    assert not psutil.pid_exists(supervisor.pids["run"])
    assert lives(tmp_path / "one") == 2


async def test_a_child_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + STAYS
    supervisor = Supervisor({"serve": python(deaf, tmp_path / "one")}, grace_seconds=0.05)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: lives(tmp_path / "one") == 1)
    supervisor.stop()
    await running
    assert not psutil.pid_exists(supervisor.pids["serve"])
