"""The engine as a child process: spawned, watched, restarted, and spoken to over a Unix socket. No torch here.

`RemoteEngine` is an Engine over any rpc client. `EngineProcess` adds the life of the child: its death fails the
requests in flight with EngineError(retryable=True), and the next child gets the same versions first. One that stalls
is killed, and so takes the same road.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from honed.engine.stall import until_stalled
from honed.errors import ConfigError, EngineError, HonedError
from honed.log import log
from honed.protocols import Chunk, EngineStatus, Request, Scores
from honed.rpc import Client
from honed.types import Version

STALL_SECONDS = 60.0
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path on Linux, less its final zero
_PR_SET_PDEATHSIG = 1


class RemoteEngine:
    """An Engine at the other end of an rpc client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def closed(self) -> bool:
        """Whether the other side has gone away."""
        return self._client.closed

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Streams chunks; leaving early cancels the request on the other side."""
        async with contextlib.aclosing(self._client.stream("submit", request, item=Chunk)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def cancel(self, id: str) -> None:
        """Ends a request."""
        await self._client.call("cancel", id)

    async def logprobs(self, ids: Sequence[int], version: str, temperature: float = 1.0) -> Scores:
        """Log-probability of each id after the first."""
        return await self._client.call("logprobs", list(ids), version, temperature, result=Scores)

    async def load(self, version: Version) -> None:
        """Makes a version available."""
        await self._client.call("load", version)

    async def unload(self, version: str) -> None:
        """Forgets a version once drained."""
        await self._client.call("unload", version)

    async def status(self) -> EngineStatus:
        """The engine's counters."""
        return await self._client.call("status", result=EngineStatus)

    async def close(self) -> None:
        """Hangs up."""
        await self._client.close()


class EngineProcess:
    """Spawns and supervises `python -m honed.engine.worker`, and is an Engine over it.

    `folder` holds the socket and must be private; `log_path` gets the child's stderr. `start` raises EngineError with
    the log's tail when the first child does not come up. After `max_crashes` deaths in a row, without a finished
    request in between, it gives up: every call then raises EngineError(retryable=False) with the log's tail.
    `settings` are the child's; the setting stall_seconds is for both sides.
    """

    def __init__(
        self,
        source: str,
        settings: Mapping[str, Any],
        *,
        folder: Path,
        log_path: Path,
        module: str = "honed.engine.worker",
        environment: Mapping[str, str] | None = None,
        niceness: int = 0,
        max_crashes: int = 5,
        backoff_seconds: float = 0.1,
        wait_seconds: float = 60.0,
        start_seconds: float = 600.0,
    ) -> None:
        self._command = [sys.executable, "-m", module, "--source", source, "--settings", json.dumps(dict(settings))]
        self._stall_seconds = float(settings.get("stall_seconds", STALL_SECONDS))
        self._folder, self._log_path = folder, log_path
        self._environment, self._niceness = {**os.environ, **(environment or {})}, niceness
        self._max_crashes, self._backoff_seconds = max_crashes, backoff_seconds
        self._wait_seconds, self._start_seconds = wait_seconds, start_seconds
        self._versions: dict[str, Version] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._remote: RemoteEngine | None = None
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._broken = ""
        self._crashes = 0
        self._spawned = itertools.count(1)
        self.num_restarts = 0

    @property
    def pid(self) -> int:
        """The child's process id; 0 before `start`."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Brings the first child up and begins to watch it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._spawn()
        except BaseException:
            await self._kill()
            raise
        self._keeper = asyncio.create_task(self._keep())

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Streams chunks; waits for a child that is restarting."""
        remote = await self._ready()
        async with contextlib.aclosing(remote.submit(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish is not None:
                    self._crashes = 0
                yield chunk

    async def cancel(self, id: str) -> None:
        """Ends a request; nothing to do when the child is down."""
        if self._remote is not None and self._up.is_set():
            await self._remote.cancel(id)

    async def logprobs(self, ids: Sequence[int], version: str, temperature: float = 1.0) -> Scores:
        """Log-probability of each id after the first."""
        return await (await self._ready()).logprobs(ids, version, temperature)

    async def load(self, version: Version) -> None:
        """Makes a version available, in this child and in those that follow it."""
        await (await self._ready()).load(version)
        self._versions[version.id] = version

    async def unload(self, version: str) -> None:
        """Forgets a version once drained."""
        self._versions.pop(version, None)
        await (await self._ready()).unload(version)

    async def status(self) -> EngineStatus:
        """The child's counters."""
        return await (await self._ready()).status()

    async def close(self) -> None:
        """Ends the child: SIGTERM, and SIGKILL after five seconds."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._broken = self._broken or "the engine is closed"
        self._up.set()
        try:
            if self._remote is not None:
                await self._remote.close()
        finally:
            await self._kill(gently=True)

    async def _ready(self) -> RemoteEngine:
        self._notice_hang_up()
        if not self._up.is_set():
            try:
                await asyncio.wait_for(self._up.wait(), self._wait_seconds)
            except TimeoutError:
                raise EngineError("the engine is restarting; try again shortly", retryable=True) from None
        if self._broken:
            raise EngineError(self._broken)
        assert self._remote is not None
        return self._remote

    def _notice_hang_up(self) -> None:
        """A child that hung up is dead or as good as: whoever asks now waits for the next one, which `_keep` brings."""
        if self._up.is_set() and not self._broken and self._remote is not None and self._remote.closed:
            self._up.clear()
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()

    async def _spawn(self) -> None:
        """Starts a child, waits for its socket, gives it the versions; raises EngineError if it dies meanwhile."""
        path = self._folder / f"engine-{os.getpid()}-{next(self._spawned)}.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {path} has over {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter [store].root"
            )
        path.unlink(missing_ok=True)
        with open(self._log_path, "ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--socket", str(path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_dies_with(os.getpid(), self._niceness),
            )
        try:
            self._remote = await asyncio.wait_for(self._prepare(path), self._start_seconds)
        except TimeoutError:
            raise EngineError(
                f"the engine was not ready after {self._start_seconds:g} s; see {self._log_path}", retryable=True
            ) from None
        finally:
            path.unlink(missing_ok=True)  # connected, or never will be
        self._up.set()
        log("engine.up", pid=self.pid, versions=sorted(self._versions))

    async def _prepare(self, path: Path) -> RemoteEngine:
        remote = RemoteEngine(await self._connect(path))
        try:
            await self._reload(remote)
        except BaseException:
            await asyncio.shield(remote.close())
            raise
        return remote

    async def _connect(self, path: Path) -> Client:
        assert self._process is not None
        while self._process.returncode is None:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return await Client.connect_unix(str(path))
            await asyncio.sleep(0.02)
        raise EngineError(f"the engine process ended with code {self._process.returncode}: {self._tail()}")

    async def _reload(self, remote: RemoteEngine) -> None:
        for version in list(self._versions.values()):
            try:
                await remote.load(version)
            except EngineError:
                raise
            except HonedError as error:  # gone or corrupt since: requests for it get NotFound, never the base model
                del self._versions[version.id]
                log("engine.version_lost", version=version.id, error=str(error))

    async def _keep(self) -> None:
        """Restarts the child whenever it dies, later and later, until `max_crashes` in a row."""
        while True:
            assert self._process is not None
            code = await self._end(self._process)
            self._up.clear()
            if self._remote is not None:
                await asyncio.shield(self._remote.close())  # cancelled halfway, it could not be closed again
            self._crashes += 1
            log("engine.died", pid=self.pid, code=code, crashes=self._crashes)
            if self._crashes >= self._max_crashes:
                self._give_up(code)
                return
            await asyncio.sleep(min(self._backoff_seconds * 2 ** (self._crashes - 1), 10.0))
            self.num_restarts += 1
            try:
                await self._spawn()
            except (HonedError, OSError) as error:
                log("engine.restart_failed", error=str(error))
                await self._kill()

    async def _end(self, process: asyncio.subprocess.Process) -> int:
        """Waits for the child's end, and brings it about when the child stalls; its exit code."""
        guard = asyncio.create_task(self._guard(process))
        try:
            return await process.wait()
        finally:
            guard.cancel()

    async def _guard(self, process: asyncio.subprocess.Process) -> None:
        if self._remote is None or process.returncode is not None:
            return
        try:
            reason = await until_stalled(self._remote.status, self._stall_seconds)
        except HonedError as error:  # it hung up: dead, or as good as
            reason = str(error)
        if process.returncode is None:
            log("engine.stalled", pid=process.pid, reason=reason)
            _kill_group(process)

    def _give_up(self, code: int) -> None:
        self._broken = (
            f"the engine process died {self._crashes} times in a row (last with code {code}) and stays down; its log "
            f"{self._log_path} ends with: {self._tail()}"
        )
        self._up.set()
        log("engine.broken", crashes=self._crashes, code=code)

    async def _kill(self, *, gently: bool = False) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if gently:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5.0)
        if process.returncode is None:
            _kill_group(process)
            await process.wait()

    def _tail(self) -> str:
        try:
            with open(self._log_path, "rb") as file:
                file.seek(max(0, os.path.getsize(self._log_path) - 2000))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return "(no log)"


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """SIGKILL, which a stopped process gets too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _dies_with(parent: int, niceness: int) -> Any:
    """What the child runs before exec: be killed when the parent's thread ends, lower the priority."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)
        if niceness:
            os.nice(niceness)

    return prepare
