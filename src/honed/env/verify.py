"""Runs verifiers where they can do no harm to the loop: a sync one in a child process that is killed at its deadline, an
async one under a timeout. What comes back is a finite Score or a VerifierError, never a zero by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

from honed import codec, plugins
from honed.env.verify_worker import Answer, Question
from honed.errors import VerifierError
from honed.protocols import Outcome, Sandbox
from honed.types import Score, Task, Trace

MAX_ANSWER_BYTES = 64 << 20


class VerifierHost:
    """Scores attempts. `processes` children are kept warm for sync verifiers; a dead or killed one is replaced."""

    def __init__(self, processes: int = 1) -> None:
        self._free = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._closed = False

    async def score(
        self,
        verifier: str,
        task: Task,
        trace: Trace,
        outcome: Outcome,
        sandbox: Sandbox | None,
        *,
        timeout_seconds: float,
    ) -> Score:
        """The verifier's score. Raises VerifierError with kind "raised", "timeout", "not_finite" or "died"."""
        function = plugins.resolve("verifier", verifier)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):
            score = await _awaited(verifier, function, (task, trace, outcome, sandbox), timeout_seconds)
        else:
            question = Question(
                verifier=_target(verifier, function), path=sys.path, task=task, trace=trace, outcome=outcome
            )
            score = await self._ask(verifier, question, timeout_seconds)
        return _finite(verifier, score)

    async def close(self) -> None:
        """Ends the children."""
        self._closed = True
        while self._idle:
            await _kill(self._idle.pop())

    async def _ask(self, verifier: str, question: Question, timeout_seconds: float) -> Score:
        async with self._free:
            child = self._idle.pop() if self._idle else await _spawn()
            healthy = False
            try:
                answer = await asyncio.wait_for(_exchange(child, question), timeout_seconds)
                healthy = True
            except TimeoutError:
                raise VerifierError(
                    f"the verifier {verifier!r} was killed after {timeout_seconds:g} s.", kind="timeout"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                raise VerifierError(f"the verifier {verifier!r} ended its process.", kind="died") from None
            finally:
                if healthy and not self._closed:
                    self._idle.append(child)
                else:
                    await _kill(child)
        if answer.score is None:
            raise VerifierError(f"the verifier {verifier!r} {answer.error}", kind="raised")
        return answer.score


async def _awaited(verifier: str, function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float) -> Score:
    try:
        return await asyncio.wait_for(cast(Awaitable[Score], function(*args)), timeout_seconds)
    except TimeoutError:
        raise VerifierError(f"the verifier {verifier!r} took over {timeout_seconds:g} s.", kind="timeout") from None
    except Exception as error:  # the boundary: a verifier is somebody else's code
        raise VerifierError(f"the verifier {verifier!r} raised {error!r}", kind="raised") from error


def _finite(verifier: str, score: Any) -> Score:
    if not isinstance(score, Score):
        raise VerifierError(f"the verifier {verifier!r} returned {type(score).__name__}, no Score.", kind="raised")
    if not all(math.isfinite(value) for value in (score.value, *score.parts.values())):
        raise VerifierError(
            f"the verifier {verifier!r} returned {score.value}, which is not finite.", kind="not_finite"
        )
    return (
        score
        if score.verifier
        else Score(value=score.value, parts=score.parts, verifier=verifier, evidence=score.evidence)
    )


def _target(verifier: str, function: Any) -> str:
    """The module:attribute under which a child can find what a plug-in name stands for."""
    return verifier if ":" in verifier else f"{function.__module__}:{function.__qualname__}"


async def _spawn() -> asyncio.subprocess.Process:
    # A group of its own, so that whatever the verifier starts is killed with it.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "honed.env.verify_worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=MAX_ANSWER_BYTES,
    )  # fmt: skip


async def _exchange(child: asyncio.subprocess.Process, question: Question) -> Answer:
    assert child.stdin is not None and child.stdout is not None
    data = codec.encode(question)
    child.stdin.write(len(data).to_bytes(4, "big") + data)
    await child.stdin.drain()
    size = int.from_bytes(await child.stdout.readexactly(4), "big")
    return codec.decode(await child.stdout.readexactly(size), Answer)


async def _kill(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, 9)
    await child.wait()
