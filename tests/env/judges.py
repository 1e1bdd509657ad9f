"""Verifiers that behave in every way that a stranger's code can; named by test_verify.py as "env.judges:..."."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

from honed.types import Score

calls = 0


def scores(task: Any, trace: Any, outcome: Any, sandbox: Any) -> Score:
    return Score(value=outcome.state["value"], parts={"half": 0.5}, evidence=f"{task.id} {trace.id} {sandbox}")


def names_itself(*args: Any) -> Score:
    return Score(value=1.0, verifier="mine")


def true(*args: Any) -> Score:
    return Score(value=True, parts={"a": False})  # type: ignore[dict-item]


def raises(*args: Any) -> Score:
    raise KeyError("no such order")


def sleeps(*args: Any) -> Score:
    time.sleep(1e6)
    return Score(value=1.0)


def spins(task: Any, trace: Any, outcome: Any, sandbox: Any) -> Score:
    spin(outcome.state["seconds"])
    return Score(value=1.0)


def spins_and_raises(*args: Any) -> Score:
    spin(args[2].state["seconds"])
    raise KeyError("no such order")


def spins_in_a_child(*args: Any) -> Score:
    code = f"import time\nwhile time.process_time() < {args[2].state['seconds']}: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    return Score(value=1.0)


def spins_on(*args: Any) -> Score:
    while True:
        pass


async def async_spins(*args: Any) -> Score:
    for _ in range(4):
        spin(args[2].state["seconds"] / 4)
        await asyncio.sleep(0)
    return Score(value=1.0)


def spin(seconds: float) -> None:
    """Takes that many CPU seconds of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def backtracks(*args: Any) -> Score:
    return Score(value=float(re.fullmatch(r"(a+)+", "a" * 60 + "b") is not None))


def nan(*args: Any) -> Score:
    return Score(value=float("nan"))


def infinite_part(*args: Any) -> Score:
    return Score(value=1.0, parts={"speed": float("inf")})


def none(*args: Any) -> Any:
    return None


def none_inside(*args: Any) -> Any:
    return Score(value=None)  # type: ignore[arg-type]


def number(*args: Any) -> Any:
    return 0.5


def exits(*args: Any) -> Score:
    os._exit(0)


def leaves(*args: Any) -> Score:
    sys.exit(3)


def dies_later(*args: Any) -> Score:
    threading.Timer(0.05, lambda: os._exit(1)).start()
    return Score(value=1.0)


def prints(*args: Any) -> Score:
    print("x" * 10_000)
    os.write(1, b"\x00\x00\x00\x01garbage")
    subprocess.run(["echo", "hello"], check=True)
    return Score(value=1.0)


def counts(*args: Any) -> Score:
    global calls
    calls += 1
    return Score(value=float(calls), evidence=str(os.getpid()))


def starts_a_child(task: Any, trace: Any, outcome: Any, sandbox: Any) -> Score:
    child = subprocess.Popen(["sleep", "1000000"])
    with open(outcome.state["pid_file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(1e6)
    return Score(value=1.0)


async def async_scores(task: Any, trace: Any, outcome: Any, sandbox: Any) -> Score:
    await asyncio.sleep(0)
    return Score(value=0.25, evidence=type(sandbox).__name__)


async def async_raises(*args: Any) -> Score:
    raise TimeoutError("its own, of some client")


async def async_exits(*args: Any) -> Score:
    sys.exit(3)


async def async_sleeps(*args: Any) -> Score:
    await asyncio.sleep(1e6)
    return Score(value=1.0)


async def async_stubborn(*args: Any) -> Score:
    for _ in range(3):
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            break
    await asyncio.sleep(0.2)
    return Score(value=1.0)


async def async_nan(*args: Any) -> Score:
    return Score(value=float("-inf"))


async def async_none(*args: Any) -> Any:
    return None


class Judge:
    async def __call__(self, *args: Any) -> Score:
        return Score(value=0.75)


judge = Judge()
