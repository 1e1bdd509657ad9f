"""What a pass rehearses: the conversations whose replies became least likely since they were served."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from honed.algo.sft import Sft
from honed.loop import rehearsal
from honed.protocols import Scores
from honed.types import Message, Sample, Sampling, Span, Trace, Turn


def served(id: str, *raw: float, recorded: bool = True) -> Trace:
    """A conversation of one turn whose reply had these log-probabilities."""
    turn = Turn(
        id=f"{id}.0", trace=id, context=(1, 2), reply=Message(role="assistant", content="x"),
        output=tuple(range(5, 5 + len(raw))), logprobs=tuple(raw), raw_logprobs=raw if recorded else (),
        sampling=Sampling(), model="m", versions=(Span(version="m@1", count=len(raw)),), finish="stop", at=1.0,
    )  # fmt: skip
    return Trace(id=id, origin="production", line="m", turns=(turn,), at=1.0)


class Knowing:
    """Says of token t that its log-probability is -t / 10."""

    async def logprobs(self, samples: Sequence[Sample]) -> list[Scores]:
        return [Scores(values=[-float(token) / 10 for token in sample.tokens], seconds=0.5) for sample in samples]


async def test_what_is_lost_is_the_fall_of_the_replys_log_probability() -> None:
    """Now the replies (5, 6) have -.5 - .6 = -1.1, whatever the prompt has."""
    traces = [served("a", -0.1, -0.2), served("b", -2.0, -0.1), served("c", -0.1, -0.2, recorded=False)]
    lost, seconds = await rehearsal.losses(traces, Sft(), Knowing())
    assert lost == pytest.approx({"a": -0.3 + 1.1, "b": -2.1 + 1.1, "c": 1.1})
    assert seconds == 1.5
    assert rehearsal.most_hurt(lost, 2) == ["c", "a"]
    assert rehearsal.most_hurt({"y": 1.0, "x": 1.0}, 1) == ["x"]


async def test_a_conversation_with_nothing_to_train_has_lost_nothing() -> None:
    trace = served("a", -1.0)
    silent = msgspec.structs.replace(
        trace, turns=(msgspec.structs.replace(trace.turns[0], output=(), logprobs=(), raw_logprobs=()),)
    )
    lost, seconds = await rehearsal.losses([silent], Sft(), Knowing())
    assert (lost, seconds) == ({"a": 0.0}, 0.0)
