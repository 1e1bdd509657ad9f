"""Runs verifiers where they can do no harm to the loop: a sync one in a child process that is killed at its
deadline, an async one under a timeout. What comes back is a finite Score or a VerifierError, never a zero by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import msgspec
import psutil

from honed import codec, plugins
from honed.env.verify_worker import Answer, Question, checked
from honed.errors import CorruptData, VerifierError
from honed.protocols import Outcome, Sandbox
from honed.types import Score, Task, Trace

MAX_ANSWER_BYTES = 64 << 20
OnSpent = Callable[[float], None]
"""Is told the CPU seconds that a verifier took, also of one that failed or was killed."""


def untold(seconds: float) -> None:
    """An OnSpent that tells nobody."""


class VerifierHost:
    """Scores attempts. `processes` children are kept warm for sync verifiers; a dead or killed one is replaced."""

    def __init__(self, processes: int = 1) -> None:
        self._free = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._children: set[asyncio.subprocess.Process] = set()
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
        on_spent: OnSpent = untold,
    ) -> Score:
        """The verifier's score; its `verifier` is filled in where it was left empty.

        A sync verifier gets None for its sandbox: it runs in another process. An async one runs in this one and must
        not block; the CPU seconds of tasks that it starts are not seen. Raises VerifierError with kind "raised",
        "timeout", "not_finite" or "died".
        """
        function = plugins.resolve("verifier", verifier)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            work = _Measured(function(task, trace, outcome, sandbox))
            try:
                score = await _awaited(verifier, work, timeout_seconds)
            finally:
                on_spent(work.seconds)
        else:
            question = Question(
                verifier=_target(verifier, function),
                path=sys.path,
                task=task,
                trace=trace,
                outcome=outcome,
                timeout_seconds=timeout_seconds,
            )
            score = await self._ask(verifier, question, on_spent)
        return _finite(verifier, score)

    async def close(self) -> None:
        """Ends the children, busy ones too: whoever waits for them gets a VerifierError of kind "died"."""
        self._closed = True
        self._idle.clear()
        for child in list(self._children):
            await self._end(child)

    async def _ask(self, verifier: str, question: Question, on_spent: OnSpent) -> Score:
        data = _encoded(verifier, question)
        async with self._free:
            child = await self._child(verifier)
            healthy, before = False, _cpu_seconds(child.pid)
            try:
                answer = await asyncio.wait_for(_exchange(child, data), question.timeout_seconds)
                healthy = True
                on_spent(answer.seconds)
            except TimeoutError:
                raise VerifierError(
                    f"the verifier {verifier!r} was killed after {question.timeout_seconds:g} s.", kind="timeout"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError, CorruptData):
                raise VerifierError(f"the verifier {verifier!r} ended its process.", kind="died") from None
            finally:
                if healthy and not self._closed:
                    self._idle.append(child)
                else:
                    if not healthy:
                        on_spent(max(0.0, _cpu_seconds(child.pid, before) - before))
                    await self._end(child)
        if answer.score is None:
            raise VerifierError(f"the verifier {verifier!r} {answer.error}", kind="raised")
        return answer.score

    async def _child(self, verifier: str) -> asyncio.subprocess.Process:
        """A live child: a warm one, else a new one that has said that it is ready."""
        while self._idle:
            child = self._idle.pop()
            if child.returncode is None:
                return child
            await self._end(child)
        if self._closed:
            raise VerifierError(f"the verifier {verifier!r} was asked after the host was closed.", kind="died")
        child = await _spawn()
        self._children.add(child)
        try:
            assert child.stdout is not None
            await child.stdout.readexactly(1)
        except BaseException as error:
            await self._end(child)
            if isinstance(error, asyncio.IncompleteReadError):
                raise VerifierError("a process for verifiers did not start; see stderr.", kind="died") from None
            raise
        return child

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        self._children.discard(child)
        # The group is killed even when the child has ended: what it started may live on.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, 9)
        await child.wait()


class _Measured:
    """Awaits a coroutine and counts the CPU seconds of its own steps: those of others between them are not its."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work, self.seconds = work, 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        wake: Callable[[], Any] = functools.partial(self._work.send, None)
        while True:
            started = time.thread_time()
            try:
                waits_for = wake()
            except StopIteration as end:
                return end.value
            finally:
                self.seconds += time.thread_time() - started
            try:
                sent = yield waits_for
                wake = functools.partial(self._work.send, sent)
            except BaseException as error:  # what is thrown in here is the coroutine's to answer
                wake = functools.partial(self._work.throw, error)


async def _awaited(verifier: str, work: _Measured, timeout_seconds: float) -> Score:
    async def guarded() -> Score:
        try:
            return checked(await work)
        except (Exception, SystemExit) as error:  # the boundary: a verifier is somebody else's code
            raise VerifierError(f"the verifier {verifier!r} raised {error!r}", kind="raised") from error

    running = asyncio.create_task(guarded())
    try:
        # Not wait_for: it would wait for a verifier that swallows its cancellation.
        await asyncio.wait({running}, timeout=timeout_seconds)
        if not running.done():
            raise VerifierError(f"the verifier {verifier!r} took over {timeout_seconds:g} s.", kind="timeout")
        return running.result()
    finally:
        running.cancel()


def _cpu_seconds(pid: int, gone: float = 0.0) -> float:
    """CPU seconds of a child and of what it has started and waited for, in ticks of the clock; `gone` for one that
    is no more."""
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.Error:
        return gone


def _finite(verifier: str, score: Score) -> Score:
    if not all(math.isfinite(value) for value in (score.value, *score.parts.values())):
        raise VerifierError(
            f"the verifier {verifier!r} returned {score.value} with parts {score.parts}, which is not finite.",
            kind="not_finite",
        )
    return msgspec.structs.replace(score, verifier=score.verifier or verifier)


def _target(verifier: str, function: Any) -> str:
    """What a child can find the verifier by: a registered name is known to this process only."""
    if ":" in verifier or not hasattr(function, "__qualname__"):
        return verifier
    return f"{function.__module__}:{function.__qualname__}"


def _encoded(verifier: str, question: Question) -> bytes:
    try:
        data = codec.encode(question)
    except (TypeError, ValueError, OverflowError) as error:
        raise VerifierError(
            f"the verifier {verifier!r} can't be asked: the outcome or the task's spec is not JSON-able ({error}).",
            kind="raised",
        ) from error
    return len(data).to_bytes(4, "big") + data


async def _spawn() -> asyncio.subprocess.Process:
    # A group of its own, so that whatever the verifier starts is killed with it.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "honed.env.verify_worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=MAX_ANSWER_BYTES,
    )  # fmt: skip


async def _exchange(child: asyncio.subprocess.Process, data: bytes) -> Answer:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(data)
    await child.stdin.drain()
    size = int.from_bytes(await child.stdout.readexactly(4), "big")
    return codec.decode(await child.stdout.readexactly(size), Answer)
