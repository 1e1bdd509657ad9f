"""`honed up`: the gateway and the loop as two children of one supervisor, which serves and learns nothing itself.

A child that dies is started again, later and later while it keeps dying; the other one is not touched. A config that
either of them refuses at its first start ends both. SIGTERM and
SIGINT are passed on, and the supervisor ends when both children have.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from honed.log import log

GRACE_SECONDS = 20.0
STABLE_SECONDS = 30.0
WRONG_USAGE = 2
_PR_SET_PDEATHSIG = 1


class Supervisor:
    """Keeps named commands running until it is told to stop.

    Code 2 (a wrong config) of a command that has only just been started for the first time, or of one in `vital` at any
    time, ends all of them and is returned. Later the others are started again whatever they say: learning must not stop
    serving. One that lived for `stable_seconds` begins again with the first, short wait.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        vital: Collection[str] = ("serve",),
        backoff_seconds: float = 0.5,
        max_backoff_seconds: float = 30.0,
        stable_seconds: float = STABLE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._commands, self._vital = commands, vital
        self._backoff, self._max_backoff = backoff_seconds, max_backoff_seconds
        self._stable, self._grace = stable_seconds, grace_seconds
        self._stop = asyncio.Event()
        self._code = 0
        self.pids: dict[str, int] = {}
        self.num_restarts = dict.fromkeys(commands, 0)

    def stop(self) -> None:
        """Asks for the end: children get SIGTERM, and SIGKILL when they take too long."""
        self._stop.set()

    async def run(self) -> int:
        """Runs until `stop`, or until a command says that it was used wrongly. Returns the exit code."""
        await asyncio.gather(*(self._keep(name, command) for name, command in self._commands.items()))
        return self._code

    async def _keep(self, name: str, command: Sequence[str]) -> None:
        wait = self._backoff
        while not self._stop.is_set():
            started = asyncio.get_running_loop().time()
            code = await self._once(name, command)
            if self._stop.is_set():
                return
            lived = asyncio.get_running_loop().time() - started
            is_starting = not self.num_restarts[name] and lived < self._stable
            if code == WRONG_USAGE and (is_starting or name in self._vital):
                log("up.gave_up", child=name, code=code)
                self._code = code
                self._stop.set()
                return
            if lived >= self._stable:
                wait = self._backoff
            log("up.restarting", child=name, code=code, in_seconds=wait)
            self.num_restarts[name] += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait)
            wait = min(self._max_backoff, wait * 2)

    async def _once(self, name: str, command: Sequence[str]) -> int:
        """One life of a child; its exit code."""
        process = await asyncio.create_subprocess_exec(*command, preexec_fn=_dies_with(os.getpid()))
        self.pids[name] = process.pid
        log("up.started", child=name, pid=process.pid)
        ended = asyncio.create_task(process.wait())
        asked = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._end(process, ended)
            return await ended
        finally:
            asked.cancel()
            if process.returncode is None:
                process.kill()

    async def _end(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        done, _ = await asyncio.wait({ended}, timeout=self._grace)
        if not done:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def supervise(config: Path) -> int:
    """Runs `honed serve` and `honed run` on a config file until SIGTERM or SIGINT. Returns the exit code."""
    honed = [sys.executable, "-c", "from honed.cli import main; main()"]
    path = str(config)
    return asyncio.run(_run({"serve": [*honed, "serve", "--config", path], "run": [*honed, "run", path]}))


async def _run(commands: Mapping[str, Sequence[str]]) -> int:
    supervisor = Supervisor(commands)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
    return await supervisor.run()


def _dies_with(parent: int) -> Callable[[], None]:
    """What a child runs before exec, so that killing the supervisor leaves no orphan."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
