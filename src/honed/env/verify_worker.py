"""The child in which sync verifiers run: reads a question, writes an answer, until its stdin closes.

Frames are 4 bytes of length and msgpack. The verifier's own prints go to stderr, so that they can't break the channel.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

from honed import codec, plugins
from honed.protocols import Outcome
from honed.types import Noun, Score, Task, Trace


class Question(Noun, frozen=True, kw_only=True):
    """What to judge, with the verifier's module:attribute and the parent's import path."""

    verifier: str
    path: list[str]
    task: Task
    trace: Trace
    outcome: Outcome


class Answer(Noun, frozen=True, kw_only=True):
    """A score, or what went wrong in the verifier."""

    score: Score | None = None
    error: str = ""


def answer(question: Question) -> Answer:
    """Calls the verifier; what it raises becomes the answer's error."""
    sys.path[:] = [*dict.fromkeys([*sys.path, *question.path])]
    try:
        score = plugins.resolve("verifier", question.verifier)(question.task, question.trace, question.outcome, None)
    except Exception as error:  # the boundary: a verifier is somebody else's code
        return Answer(error=f"raised {error!r}")
    return (
        Answer(score=score) if isinstance(score, Score) else Answer(error=f"returned {type(score).__name__}, no Score.")
    )


def main() -> None:
    """Serves questions on stdin."""
    channel: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while len(head := sys.stdin.buffer.read(4)) == 4:
        question = codec.decode(sys.stdin.buffer.read(int.from_bytes(head, "big")), Question)
        data = codec.encode(answer(question))
        channel.write(len(data).to_bytes(4, "big") + data)
        channel.flush()


if __name__ == "__main__":
    main()
