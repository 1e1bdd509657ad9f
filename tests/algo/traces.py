"""Small traces for the tests of algorithms."""

from __future__ import annotations

from honed.types import Fault, Group, Message, Sampling, Score, Span, Trace, Turn

SAMPLED = Sampling(temperature=1.0)


def turn(
    id: str,
    context: tuple[int, ...],
    output: tuple[int, ...],
    parent: str | None = None,
    *,
    logprobs: tuple[float, ...] | None = None,
    version: str = "support@1",
    sampling: Sampling = SAMPLED,
    finish: str = "stop",
    fidelity: str = "tokens",
) -> Turn:
    return Turn(
        id=id,
        trace="t",
        parent=parent,
        context=context,
        reply=Message(role="assistant", content="x"),
        output=output,
        logprobs=tuple(-0.5 for _ in output) if logprobs is None else logprobs,
        versions=(Span(version=version, count=len(output)),),
        sampling=sampling,
        model="support",
        finish=finish,
        fidelity=fidelity,
        at=0.0,
    )


def trace(id: str, *turns: Turn, reward: float | None = None, fault: Fault | None = None) -> Trace:
    score = None if reward is None else Score(value=reward, verifier="test")
    return Trace(id=id, origin="rollout", turns=turns, score=score, fault=fault, at=0.0)


def group(rewards: list[float | None], *, size: int = 2) -> Group:
    """A group of one-turn attempts, attempt i with `size` + i output tokens after the context (1, 2, 3)."""
    traces = [
        trace(f"t{i}", turn(f"u{i}", (1, 2, 3), tuple(range(10, 10 + size + i))), reward=reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(id="g", task="task", traces=tuple(traces))
