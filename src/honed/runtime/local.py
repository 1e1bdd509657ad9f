"""This machine as the place to run: one learner child a turn of the loop, spoken to over a Unix socket. No torch here.

The child's death fails the calls in flight with EngineError(retryable=True) that quotes its log; the loop asks for a
new learner and goes on from its last snapshot. A child that stalls is killed; a pass of the trainer may take as long as
it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from honed.engine.process import MAX_SOCKET_PATH_BYTES, RemoteEngine
from honed.engine.stall import until_stalled
from honed.errors import ConfigError, EngineError, HonedError
from honed.log import log
from honed.protocols import Job, Loss, Scores, Snapshot, StepResult
from honed.rpc import Client
from honed.runtime.settings import LearnerSettings
from honed.types import Sample

T = TypeVar("T")
POLL_SECONDS = 0.02
PROGRESS_SECONDS = 5.0
GRACE_SECONDS = 5.0
TAIL_BYTES = 2000


class LocalRuntime:
    """Implements protocols.Runtime. `folder` holds sockets and must be private; `log_path` gets the child's stderr.

    `module` is what runs as the child: another one may call `learner.main` with a maker of its own.
    """

    def __init__(
        self,
        source: str,
        settings: LearnerSettings,
        *,
        folder: Path,
        log_path: Path,
        module: str = "honed.runtime.learner",
        start_seconds: float = 600.0,
    ) -> None:
        self._source, self._settings, self._module = source, settings, module
        self._folder, self._log_path, self._start_seconds = folder, log_path, start_seconds
        self._numbers = itertools.count(1)
        self._learners: list[LocalLearner] = []

    async def learner(self) -> LocalLearner:
        """A new child, ready. Raises EngineError with its log's tail when it does not come up, ConfigError for
        a socket path that is too long."""
        path = self._folder / f"learner-{os.getpid()}-{next(self._numbers)}.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {path} has over {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter [store].root"
            )
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        child = Child(await self._spawn(path), self._log_path)
        try:
            client = await child.connect(path, self._start_seconds)
        except BaseException:
            await child.end()
            raise
        finally:
            path.unlink(missing_ok=True)  # connected, or never will be
        learner = LocalLearner(child, client, self._settings.engine.stall_seconds)
        self._learners.append(learner)
        log("learner.up", pid=child.pid)
        return learner

    async def gather(self, jobs: Sequence[Job], limit: int) -> list[Any]:
        """Runs the jobs, at most `limit` at a time; results in order. An exception cancels the rest and propagates."""
        gate = asyncio.Semaphore(limit)

        async def one(job: Job) -> Any:
            async with gate:
                return await job()

        running = [asyncio.ensure_future(one(job)) for job in jobs]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        """Ends every child."""
        while self._learners:
            await self._learners.pop().close()

    async def _spawn(self, path: Path) -> asyncio.subprocess.Process:
        path.unlink(missing_ok=True)
        with open(self._log_path, "ab") as errors:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                *("--source", self._source, "--socket", str(path)),
                *("--settings", self._settings.model_dump_json(), "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )


class Child:
    """The learner's process and its log."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process, self._log_path = process, log_path
        self._log_start = log_path.stat().st_size

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def connect(self, path: Path, start_seconds: float) -> LearnerClient:
        """Waits for the socket, saying so now and then. Raises EngineError when the process ends or time is up."""
        waited, told = 0.0, 0.0
        while self._process.returncode is None and waited < start_seconds:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                client = await LearnerClient.connect_unix(str(path))
                assert isinstance(client, LearnerClient)
                client.child = self
                return client
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
            if waited - told >= PROGRESS_SECONDS:
                told = waited
                log("learner.starting", pid=self.pid, seconds=round(waited))
        if self._process.returncode is None:
            message = f"the learner was not ready after {start_seconds:g} s; see {self._log_path}"
            raise EngineError(message, retryable=True)
        raise EngineError(f"the learner ended with code {self._process.returncode} before it was ready: {self.tail()}")

    async def obituary(self, error: EngineError) -> EngineError:
        """What to raise when the connection broke: with the exit code and the log's tail if the process is dead."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), GRACE_SECONDS)
        if self._process.returncode is None:
            return error
        code = self._process.returncode
        message = f"the learner process died with code {code}; its log ends with: {self.tail()}"
        return EngineError(message, retryable=True)

    async def end(self) -> None:
        """SIGTERM, and SIGKILL of its group after some seconds."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), GRACE_SECONDS)
        if self._process.returncode is None:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL of its group, if it has not ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self) -> str:
        """The end of what this child wrote."""
        try:
            with open(self._log_path, "rb") as file:
                file.seek(max(self._log_start, os.path.getsize(self._log_path) - TAIL_BYTES))
                return file.read().decode(errors="replace").strip() or "(nothing)"
        except OSError:
            return "(no log)"


class LearnerClient(Client):
    """An rpc client that says why when its child is gone."""

    child: Child | None = None

    async def call(self, name: str, *args: Any, result: type[T] | Any = None) -> T | Any:
        """One call; EngineError(retryable=True) with the log's tail when the child died."""
        try:
            return await super().call(name, *args, result=result)
        except EngineError as error:
            raise await self._explain(error) from error

    async def stream(self, name: str, *args: Any, item: type[T]) -> AsyncGenerator[T, None]:
        """One call, many items; raises as `call` does."""
        try:
            async with contextlib.aclosing(super().stream(name, *args, item=item)) as items:
                async for each in items:
                    yield each
        except EngineError as error:
            raise await self._explain(error) from error

    async def _explain(self, error: EngineError) -> EngineError:
        return await self.child.obituary(error) if self.closed and self.child is not None else error


class RemoteTrainer:
    """Implements protocols.Trainer at the other end of an rpc client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Adds the gradient of `loss` over `samples`."""
        return await self._client.call("trainer.forward_backward", list(samples), loss, result=StepResult)

    async def step(self, learning_rate: float | None = None) -> StepResult:
        """One optimiser step."""
        return await self._client.call("trainer.step", learning_rate, result=StepResult)

    async def logprobs(self, samples: Sequence[Sample]) -> list[Scores]:
        """Per sample the log-probability of each token; position 0 is 0.0."""
        return await self._client.call("trainer.logprobs", list(samples), result=list[Scores])

    async def snapshot(self, name: str) -> Snapshot:
        """Writes the state under `name`."""
        return await self._client.call("trainer.snapshot", name, result=Snapshot)

    async def restore(self, snapshot: Snapshot | None, *, optimiser: bool = True) -> None:
        """Takes a snapshot's state."""
        await self._client.call("trainer.restore", snapshot, optimiser)

    async def publish(self, version: str) -> None:
        """Hands the weights to the engine in the same process."""
        await self._client.call("trainer.publish", version)

    async def close(self) -> None:
        """Nothing of its own to free: the learner owns the connection."""


class LocalLearner:
    """Implements protocols.Learner: proxies of the trainer and the engine in one child."""

    def __init__(self, child: Child, client: LearnerClient, stall_seconds: float) -> None:
        self._child, self._client = child, client
        self.trainer = RemoteTrainer(client)
        self.engine = RemoteEngine(client)
        self._guard = asyncio.create_task(self._kill_when_stalled(stall_seconds))

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    async def close(self) -> None:
        """Hangs up and ends the child."""
        self._guard.cancel()
        await self._client.close()
        await self._child.end()

    async def _kill_when_stalled(self, seconds: float) -> None:
        with contextlib.suppress(HonedError):  # it died: whoever calls it learns of that
            reason = await until_stalled(self.engine.status, seconds)
            log("learner.stalled", pid=self.pid, reason=reason)
            self._child.kill()
