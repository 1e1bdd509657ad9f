"""Traces to branches: the token-exact walks from a conversation's first turn to each of its last ones.

A turn stores only what is new and names its parent, so a leaf's tokens are the context and output ids of the turns on
its path, exactly as the engine read and sampled them. Nothing is tokenised here. Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from honed.errors import Refused
from honed.types import Sample, Trace, Turn


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One walk. Arrays of one length T: tokens int32; mask bool, True on the sampled ids that this branch trains;
    logprobs float32, of the sampler on every sampled id whose turn has them, 0 elsewhere; emphasis float32, the weight
    of the message that a sampled id belongs to.

    Where branches share a trunk, the first one trains it and the others only read it: a turn is trained once.
    """

    trace: str
    leaf: str
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    emphasis: np.ndarray
    versions: tuple[str, ...]
    turns: tuple[Turn, ...]

    @property
    def num_trained(self) -> int:
        """How many tokens this branch trains."""
        return int(self.mask.sum())

    def sample(self, weights: np.ndarray, **fields: object) -> Sample:
        """The Sample of this branch, with float32 `weights` and whatever other arrays the algorithm has."""
        sample = Sample(tokens=self.tokens, weights=weights, versions=self.versions, branch=self.leaf)
        return msgspec.structs.replace(sample, **fields)


def branches(trace: Trace) -> list[Branch]:
    """Every branch of a trace, in the order of its leaves. Branches that train nothing are left out.

    Raises Refused, naming the trace and the turn, when a parent is missing, comes later than its child, or a turn has
    no ids (fidelity "text" or "redacted").
    """
    known: dict[str, Turn] = {}
    parents = set()
    for turn in trace.turns:
        _check(trace, turn, known)
        known[turn.id] = turn
        parents.add(turn.parent)
    found: list[Branch] = []
    done: set[str] = set()
    for turn in trace.turns:
        if turn.id in parents:
            continue
        path = _path(turn, known)
        branch = _walk(trace, path, done)
        done |= {each.id for each in path}
        if branch.num_trained:
            found.append(branch)
    return found


def token_mean(parts: Sequence[Branch]) -> list[np.ndarray]:
    """Weights that make the sum a mean over all trained tokens of `parts`."""
    total = sum(part.num_trained for part in parts)
    return [_spread(part, 1.0 / total) for part in parts]


def sequence_mean(attempts: Sequence[Sequence[Branch]]) -> list[list[np.ndarray]]:
    """Weights that make the sum a mean over attempts of each attempt's mean over its trained tokens."""
    return [
        [_spread(part, 1.0 / (len(attempts) * sum(each.num_trained for each in parts))) for part in parts]
        for parts in attempts
    ]


def constant(attempts: Sequence[Sequence[Branch]], length: int) -> list[list[np.ndarray]]:
    """Weights that divide every attempt's sum by one constant length (Dr. GRPO, Liu et al. 2025, section 3.2)."""
    return [[_spread(part, 1.0 / (len(attempts) * length)) for part in parts] for parts in attempts]


def _spread(part: Branch, weight: float) -> np.ndarray:
    return part.mask.astype(np.float32) * np.float32(weight)


def _check(trace: Trace, turn: Turn, known: dict[str, Turn]) -> None:
    if turn.fidelity != "tokens":
        raise Refused(f"trace {trace.id}: turn {turn.id} has only {turn.fidelity}, no token ids to train on.")
    if turn.parent is not None and turn.parent not in known:
        raise Refused(f"trace {trace.id}: turn {turn.id} follows {turn.parent}, which is not before it in the trace.")
    if not turn.context and turn.parent is None:
        raise Refused(f"trace {trace.id}: turn {turn.id} opens the conversation with no context ids.")


def _path(turn: Turn, known: dict[str, Turn]) -> list[Turn]:
    path = [turn]
    while path[-1].parent is not None:
        path.append(known[path[-1].parent])
    return path[::-1]


def _walk(trace: Trace, path: Sequence[Turn], done: set[str]) -> Branch:
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    emphasis: list[float] = []
    versions: dict[str, None] = {}
    for turn in path:
        fresh = turn.id not in done
        tokens += turn.context + turn.output
        mask += [False] * len(turn.context) + [fresh] * len(turn.output)
        logprobs += [0.0] * len(turn.context) + list(turn.logprobs or [0.0] * len(turn.output))
        emphasis += [0.0] * len(turn.context) + [turn.reply.emphasis] * len(turn.output)
        if fresh:
            versions |= dict.fromkeys(span.version for span in turn.versions)
    if len(logprobs) != len(tokens):
        raise Refused(f"trace {trace.id}: a turn has another number of log-probabilities than of sampled ids.")
    return Branch(
        trace=trace.id,
        leaf=path[-1].id,
        tokens=np.asarray(tokens, np.int32),
        mask=np.asarray(mask, bool),
        logprobs=np.asarray(logprobs, np.float32),
        emphasis=np.asarray(emphasis, np.float32),
        versions=tuple(versions),
        turns=tuple(path),
    )
