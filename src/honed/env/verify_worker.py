"""The child in which sync verifiers run: reads a question, writes an answer, until its stdin closes.

Frames are 4 bytes of length and msgpack. The verifier's own prints go to stderr, so that they can't break the channel.
A child whose parent died is ended by an alarm of its own, which no regular expression can hold up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, BinaryIO

import msgspec

from honed import codec, plugins
from honed.protocols import Outcome
from honed.types import Noun, Score, Task, Trace

READY = b"\x01"
"""The child's first byte: what it takes to start and to import honed is not the verifier's time."""

GRACE_SECONDS = 5.0


class Question(Noun, frozen=True, kw_only=True):
    """What to judge, with the verifier's module:attribute and the parent's import path."""

    verifier: str
    path: list[str]
    task: Task
    trace: Trace
    outcome: Outcome
    timeout_seconds: float


class Answer(Noun, frozen=True, kw_only=True):
    """A score, or what went wrong in the verifier; `seconds` are the CPU seconds that it took, children's too."""

    score: Score | None = None
    error: str = ""
    seconds: float = 0.0


def checked(score: Any) -> Score:
    """The score with plain floats in it (a bool or a numpy number is a float to everybody who writes a verifier).

    Raises TypeError or ValueError for anything that is no Score of numbers.
    """
    if not isinstance(score, Score):
        raise TypeError(f"returned {type(score).__name__}, no Score")
    parts = {str(name): float(value) for name, value in score.parts.items()}
    return Score(value=float(score.value), parts=parts, verifier=str(score.verifier), evidence=str(score.evidence))


def answer(question: Question) -> Answer:
    """Calls the verifier; what it raises becomes the answer's error."""
    sys.path[:] = [*dict.fromkeys([*sys.path, *question.path])]
    try:
        verifier = plugins.resolve("verifier", question.verifier)
        return Answer(score=checked(verifier(question.task, question.trace, question.outcome, None)))
    except Exception as error:  # the boundary: a verifier is somebody else's code
        return Answer(error=f"raised {error!r}")


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def main() -> None:
    """Serves questions on stdin."""
    channel: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    channel.write(READY)
    while len(head := sys.stdin.buffer.read(4)) == 4:
        data = sys.stdin.buffer.read(int.from_bytes(head, "big"))
        started = cpu_seconds()
        question = codec.decode(data, Question)
        signal.setitimer(signal.ITIMER_REAL, question.timeout_seconds + GRACE_SECONDS)
        found = answer(question)
        data = codec.encode(msgspec.structs.replace(found, seconds=cpu_seconds() - started))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(channel, len(data).to_bytes(4, "big") + data)


def _write(channel: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[channel.write(view) :]


if __name__ == "__main__":
    main()
