"""The thread that owns a core: commands first, then a step; asleep when there is neither.

Nothing that fails on it is silent: a command's error reaches whoever waits for the command, and an error outside them
ends every request with EngineError(retryable=True), after which the engine only says why it is broken.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from honed.engine.core import Core
from honed.engine.scheduler import Sink
from honed.errors import EngineError
from honed.log import log


@dataclass(frozen=True)
class Command:
    """Something to do between two steps; `sink` gets the error when it fails."""

    run: Callable[[], None]
    sink: Sink | None


class CoreThread:
    """Runs `core` on a thread of its own until `stop`. Only one other thread, the event loop's, may post and stop."""

    def __init__(self, core: Core, num_threads: int) -> None:
        self._core, self._num_threads = core, num_threads
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._idle, self._beats = True, 0
        self.closed = False
        self.failure = ""
        self._thread = threading.Thread(target=self._work, name="honed-engine", daemon=True)
        self._thread.start()

    @property
    def heartbeat(self) -> int | None:
        """Steps and commands done so far; None while there is nothing to do."""
        return None if self._idle and self._commands.empty() else self._beats

    def check(self) -> None:
        """Raises EngineError when it can do nothing any more."""
        if self.closed:
            raise EngineError("the engine is closed")
        if self.failure:
            raise EngineError(self.failure, retryable=True)

    def post(self, run: Callable[[], None], sink: Sink) -> None:
        """Has `run` called on the thread; `sink` gets an EngineError if it fails. Raises EngineError when it can't."""
        self.check()
        self._commands.put(Command(run, sink))

    def hint(self, run: Callable[[], None]) -> None:
        """Has `run` called on the thread if there still is one; nobody waits for it."""
        if not self.closed:
            self._commands.put(Command(run, None))

    def stop(self) -> None:
        """Asks for the end: what still runs fails. What was posted before is done first."""
        if not self.closed:
            self.closed = True
            self._commands.put(None)

    def join(self) -> None:
        """Waits for the end that `stop` asked for."""
        self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            self._serve()
        except Exception as error:  # the boundary of the thread: what it kept may be half changed, so it ends here
            self.failure = f"the engine is broken: {type(error).__name__}: {error}"
            log("engine.broken", error=self.failure)
            self._core.abandon(EngineError(self.failure, retryable=True))
            self._refuse()
        else:
            self._core.abandon(EngineError("the engine was closed", retryable=True))

    def _serve(self) -> None:
        while True:
            self._idle = not self._core.busy
            try:
                command = self._commands.get(block=self._idle)
            except queue.Empty:
                self._core.step()
            else:
                self._idle = False
                if command is None:
                    return
                self._do(command)
            self._beats += 1

    def _do(self, command: Command) -> None:
        try:
            command.run()
        except Exception as error:  # the boundary of a command: it fails alone
            log("engine.command_failed", error=f"{type(error).__name__}: {error}")
            if command.sink is not None:
                command.sink(EngineError(f"the engine failed: {type(error).__name__}: {error}", retryable=True))

    def _refuse(self) -> None:
        """Answers whatever was posted before, or in the instant of, the failure."""
        self._idle = True
        while (command := self._commands.get()) is not None:
            if command.sink is not None:
                command.sink(EngineError(self.failure, retryable=True))
