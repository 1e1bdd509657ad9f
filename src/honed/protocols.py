"""The verbs: every slot that can be filled by somebody else's code, and the small values that cross it.

Everything that waits is async; an Algorithm is a pure function. The loop, the gateway and the tests know only these.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import msgspec

from honed.types import (
    Fault,
    Finish,
    Group,
    Message,
    Noun,
    Origin,
    Sample,
    Sampling,
    Score,
    Task,
    Tool,
    Trace,
    Turn,
    Usage,
    Version,
    VersionKind,
)

Loss = Literal["policy_gradient", "cross_entropy", "preference"]


# ---------------------------------------------------------------------------------------------------- engines


class Request(Noun, frozen=True, kw_only=True):
    """Asks an engine to continue `ids` under `version` ("" = the base model). Lower `priority` goes first."""

    id: str
    ids: tuple[int, ...]
    sampling: Sampling
    version: str = ""
    priority: int = 0


class Chunk(Noun, frozen=True, kw_only=True):
    """Some newly sampled tokens. The last chunk of a request has `finish` and `usage`, and may have no ids.

    `logprobs` are under the distribution that sampled, `raw_logprobs` unfiltered; `top` holds, per token, the
    alternatives as (id, logprob) pairs when they were asked for. Stop strings are the caller's business (text/): an
    engine stops on `stop_ids` and `max_tokens`, and reports the stop id as the last sampled id.
    """

    id: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    version: str = ""
    finish: Finish | None = None
    usage: Usage | None = None


class Scores(Noun, frozen=True, kw_only=True):
    """Log-probabilities of given tokens, and the CPU (or device) seconds that they took."""

    values: list[float]
    seconds: float = 0.0


class EngineStatus(Noun, frozen=True, kw_only=True):
    """`base` is the digest of the base weights, `versions` what is loaded, `busy_seconds` CPU (or device) seconds since
    start, `context` the longest sequence (prompt + output) in tokens, `capacity` the cache's size in tokens.

    `heartbeat` grows while there is work, and is None while there is none or from an engine that doesn't say. `failure`
    is why the engine can do nothing any more: only a new one helps."""

    base: str
    versions: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0
    context: int = 0
    capacity: int = 0
    used: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    busy_seconds: float = 0.0
    pid: int = 0
    heartbeat: int | None = None
    failure: str = ""


class Engine(Protocol):
    """Samples tokens. Raises EngineError(retryable=True) when it died, NotFound for a version that is not loaded,
    BadRequest(param="messages") when prompt + max_tokens can never fit."""

    def submit(self, request: Request) -> AsyncIterator[Chunk]: ...
    async def cancel(self, id: str) -> None: ...
    async def logprobs(self, ids: Sequence[int], version: str, temperature: float = 1.0) -> Scores:
        """Log-probability of each of `ids` after the first, of softmax(logits / temperature): len(ids) - 1 values."""
        ...

    async def load(self, version: Version) -> None:
        """Makes a version available. Its files are verified against its digest before anything live is touched;
        raises CorruptData. Loading a loaded digest again does nothing."""
        ...

    async def unload(self, version: str) -> None:
        """Forgets a version once its running requests have ended."""
        ...

    async def status(self) -> EngineStatus: ...
    async def close(self) -> None: ...


# ----------------------------------------------------------------------------------------------------- models


class Form(Noun, frozen=True, kw_only=True):
    """What a reply must be: calls of the tools named here, only one of them with `single`, or a value of a JSON schema;
    where both are given, either."""

    tools: tuple[str, ...] = ()
    single: bool = False
    schema: dict[str, Any] | None = None


class Call(Noun, frozen=True, kw_only=True):
    """One question to a Model. `id` becomes the Turn's id and `trace` the conversation's.

    `line` is the model's public name; `version` pins one (None: the one that serves). `parent` is the Turn that the
    messages extend where the caller knows it. A reply without a `form` is free. With `fit`, sampling.max_tokens is a
    wish: it is lowered to what the prompt leaves of the context. `scored`: the first Delta says how likely the prompt
    is.
    """

    id: str
    trace: str | None = None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    form: Form | None = None
    sampling: Sampling
    fit: bool = False
    scored: bool = False
    line: str = ""
    version: str | None = None
    tenant: str = ""
    origin: Origin = "production"
    task: str | None = None
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    parent: str | None = None


class Delta(Noun, frozen=True, kw_only=True):
    """A piece of a reply as a person sees it: `text` that is safe to show (no half stop string, no half tool call) and
    the tokens that came with it. `raw_logprobs` are the model's own, as those of the alternatives in `top` are; what
    they became under temperature and filters is in the Turn. `trace` is the conversation's id; the last Delta carries
    the finished `turn` and the number of tool calls in it that could not be read (`malformed`). `prompt`: each token
    that was read with its log-probability, where that was asked for; the first token has none."""

    text: str = ""
    ids: tuple[int, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    trace: str = ""
    turn: Turn | None = None
    malformed: int = 0
    prompt: tuple[tuple[int, float | None], ...] = ()


class Model(Protocol):
    """Answers messages with a Turn. TokenModel (text + an Engine) or somebody's HTTP; a Recorder wraps either.

    `stream` ends with the Delta that carries the Turn. When its reader leaves early, what was said so far goes to
    `on_cut` as a Turn with finish "cancelled"; when the engine fails in the middle, with finish "error".
    """

    def stream(self, call: Call, on_cut: Callable[[Turn], None] | None = None) -> AsyncGenerator[Delta, None]: ...
    async def reply(self, call: Call) -> Turn: ...


class Session(Protocol):
    """A Model bound to one attempt: what an environment gets. It numbers, links and records the turns."""

    trace: str

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), sampling: Sampling | None = None
    ) -> Turn: ...
    @property
    def turns(self) -> tuple[Turn, ...]: ...


# ----------------------------------------------------------------------------------- environments and verifiers


class Outcome(Noun, frozen=True, kw_only=True):
    """How an attempt ended: the environment's final `state` (JSON-able), every message, and what broke, if anything."""

    messages: tuple[Message, ...] = ()
    state: dict[str, Any] = msgspec.field(default_factory=dict)
    fault: Fault | None = None


class ExecResult(Noun, frozen=True, kw_only=True):
    """What a command in a sandbox did."""

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    seconds: float = 0.0


class Sandbox(Protocol):
    """A closed room for generated code."""

    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_seconds: float = 60.0) -> ExecResult: ...
    async def read(self, path: str) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def diff(self) -> str: ...
    async def close(self) -> None: ...


class Environment(Protocol):
    """Runs one attempt at a task. The model's faults propagate; the environment's own become Outcome.fault."""

    async def run(self, task: Task, session: Session, sandbox: Sandbox | None) -> Outcome: ...


class Verifier(Protocol):
    """Judges an attempt. May be sync (it then runs in a process of its own, killed at its deadline) or async."""

    def __call__(
        self, task: Task, trace: Trace, outcome: Outcome, sandbox: Sandbox | None
    ) -> Score | Awaitable[Score]: ...


class Signal(Protocol):
    """A small pure function that names what looks wrong in a trace, or returns None."""

    def __call__(self, trace: Trace) -> str | None: ...


# --------------------------------------------------------------------------------------------------- training


@runtime_checkable
class Algorithm(Protocol):
    """A pure function from groups to samples. `needs` names the arrays that must be filled in before the update:
    "old_logprobs" (of the trainer before it), "reference" (of the version that the turn began with), "teacher"."""

    loss: ClassVar[Loss]
    needs: frozenset[str]

    def __call__(self, groups: Sequence[Group]) -> list[Sample]: ...


@runtime_checkable
class Distillation(Algorithm, Protocol):
    """An Algorithm whose advantages follow from what other versions, the teachers, would have said."""

    def teacher(self, kind: str) -> str:
        """The id of the version that teaches a kind of task."""
        ...

    def complete(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their advantages; `reference` holds the teacher's log-probabilities."""
        ...


class StepResult(Noun, frozen=True, kw_only=True):
    """What one pass or one optimiser step did. `skipped` says why nothing was applied ("" = applied)."""

    loss: float = 0.0
    num_samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    grad_norm: float = 0.0
    seconds: float = 0.0
    skipped: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Snapshot(Noun, frozen=True, kw_only=True):
    """Files of a trained state in the blob store: verified by `digest`, loadable only when its manifest exists."""

    uri: str
    digest: str
    optimiser: str = ""
    kind: VersionKind = "adapter"


class Trainer(Protocol):
    """Owns the weights being trained. It sums per-token losses; every normaliser came with the samples."""

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult: ...
    async def step(self, learning_rate: float | None = None) -> StepResult: ...
    async def logprobs(self, samples: Sequence[Sample]) -> list[Scores]:
        """Per sample, the current weights' log-probability of each token given those before it; position 0 is 0.0.
        At each sample's temperature."""
        ...

    async def snapshot(self, name: str) -> Snapshot:
        """Writes weights, then optimiser state, then the manifest, under `name`; idempotent by content."""
        ...

    async def restore(self, snapshot: Snapshot | None, *, optimiser: bool = True) -> None:
        """Takes a snapshot's weights (None: a fresh adapter over the base model) and, if asked, its optimiser state."""
        ...

    async def publish(self, version: str) -> None:
        """Hands the current weights to the rollout engine beside it, under this version's name, through memory."""
        ...

    async def close(self) -> None: ...


class Channel(Protocol):
    """Moves named tensors of a version; the hot path beside the durable blob store."""

    async def publish(self, version: str, tensors: dict[str, Any]) -> None: ...
    async def fetch(self, version: str) -> dict[str, Any]: ...


class Learner(Protocol):
    """What a place to run gives the loop: a trainer and the rollout engine that shares its memory."""

    @property
    def trainer(self) -> Trainer: ...
    @property
    def engine(self) -> Engine: ...
    async def close(self) -> None: ...


Job = Callable[[], Coroutine[Any, Any, Any]]


class Runtime(Protocol):
    """Where the work runs: this machine, a cluster, or a virtual clock."""

    async def learner(self) -> Learner: ...
    async def gather(self, jobs: Sequence[Job], limit: int) -> list[Any]:
        """Runs the jobs, at most `limit` at a time; results in order. An exception cancels the rest and propagates."""
        ...


class TaskMaker(Protocol):
    """Turns a production trace of a kind of failure into a Task, or None when it can't be checked by a program."""

    def __call__(self, trace: Trace) -> Task | None: ...
