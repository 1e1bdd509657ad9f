"""The nouns: every record that honed keeps, as frozen value types.

Nothing here does I/O or knows an engine, a store or a trainer. Each type states its law in its docstring. Sequences are
tuples so that a value can be shared between threads and hashed into digests; a Sample's per-token arrays are numpy.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

Role = Literal["system", "user", "assistant", "tool"]
Origin = Literal["production", "rollout", "eval", "demonstration", "import"]
Fidelity = Literal["tokens", "text", "redacted"]
Finish = Literal["stop", "length", "tool_calls", "cancelled", "error"]
Split = Literal["train", "dev", "holdout"]
FeedbackKind = Literal["metric", "comment", "demonstration", "correction"]
Precision = Literal["full", "int8"]
VersionKind = Literal["full", "adapter"]
Decision = Literal["promote", "reject", "inconclusive", "invalid"]
Activity = Literal["generate", "verify", "sandbox", "train", "sync", "eval", "idle"]
Spend = Literal["used", "stale", "zero_variance", "fault", "truncated", "rejected"]


class Noun(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every record: frozen, slotted, keyword-only."""


class ToolCall(Noun, frozen=True, kw_only=True):
    """A call the model asked for. `arguments` is the JSON text exactly as the model wrote it, valid or not."""

    id: str
    name: str
    arguments: str


class Message(Noun, frozen=True, kw_only=True):
    """What people read. `content` is None where an assistant only called tools. `weight` is how much imitation makes of
    an assistant's message beside the others: 0 only reads it."""

    role: Role
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    weight: float | msgspec.UnsetType = msgspec.UNSET

    @property
    def emphasis(self) -> float:
        """The weight, 1 where none is given."""
        return 1.0 if isinstance(self.weight, msgspec.UnsetType) else self.weight


class Tool(Noun, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema of type object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


LEAST_TEMPERATURE = 1e-5
"""Below it logits divided by a temperature leave what fp32 can hold; 0 is greedy."""


class Sampling(Noun, frozen=True, kw_only=True):
    """How to draw tokens. `seed` None asks the engine to pick one; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing,
    `repetition_penalty` 1 changes nothing.

    `top_logprobs` is the number of alternatives to report per sampled token; `grammar`, in llguidance's variation of
    Lark, is what the whole reply must match ("" = anything). `precision` is that of the engine's products ("" = what
    the engine serves at).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    grammar: str = ""
    precision: Precision | Literal[""] = ""

    @property
    def whole(self) -> bool:
        """Whether it draws from the policy's own distribution at a temperature: nothing left out, nothing bent."""
        unbent = self.min_p == 0 and self.repetition_penalty == 1 and not self.grammar
        return self.temperature > 0 and self.top_p >= 1 and self.top_k == 0 and unbent


class Usage(Noun, frozen=True, kw_only=True):
    """What an engine reports: tokens read, tokens of those found in a cache, tokens sampled, busy seconds.

    Unknown usage is None on the Turn, never zeros.
    """

    prompt: int
    cached: int
    output: int
    seconds: float


class Span(Noun, frozen=True, kw_only=True):
    """A run of `count` consecutive output tokens sampled by `version`."""

    version: str
    count: int


class Turn(Noun, frozen=True, kw_only=True):
    """One model call; its id is the response's id and the caller's receipt.

    It stores only what is new: `added` are the messages since `parent` (all of them when parent is None), `context` the
    ids that the world added since the parent's last output, `output` the ids that were sampled. The ids that the engine
    read are therefore the parent's path followed by `context`. `logprobs` are under the distribution that sampled
    (temperature and filters applied), `raw_logprobs` unfiltered at temperature 1. `tools` is the digest of the tool
    list. With fidelity "text" or "redacted" ids and log-probabilities are empty: such a turn may be imitated, and is
    refused by policy-gradient losses.
    """

    id: str
    trace: str
    parent: str | None = None
    added: tuple[Message, ...] = ()
    tools: str = ""
    context: tuple[int, ...] = ()
    reply: Message
    output: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    sampling: Sampling
    model: str
    versions: tuple[Span, ...] = ()
    experts: bytes | None = None
    finish: Finish
    usage: Usage | None = None
    fidelity: Fidelity = "tokens"
    at: float

    @property
    def is_cut(self) -> bool:
        """Whether something else than the model ended it: the reader left, or the engine failed."""
        return self.finish in ("cancelled", "error")


class Score(Noun, frozen=True, kw_only=True):
    """What a verifier said of a trace, and why. `value` is finite."""

    value: float
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    verifier: str = ""
    evidence: str = ""


class Fault(Noun, frozen=True, kw_only=True):
    """Something broke at `boundary` (engine, environment, verifier, sandbox, tool): data, no crash, and not a zero."""

    boundary: str
    kind: str
    message: str
    retryable: bool = False


class Feedback(Noun, frozen=True, kw_only=True):
    """One append-only statement about a turn or a trace.

    `value` is a number or bool for a metric, text for a comment, a list of messages for a demonstration or a correction
    (the assistant's and the tools' messages that should have followed the target's prompt). `key` makes it idempotent.
    """

    id: str
    target: str
    name: str
    value: Any
    kind: FeedbackKind = "metric"
    source: str = "user"
    key: str | None = None
    tenant: str = ""
    at: float


class Trace(Noun, frozen=True, kw_only=True):
    """A conversation: the one record of production, practice, evaluation, demonstrations and imports alike.

    `line` names the model line that answered. `signals` are the names of what looked wrong (loop/capture.py). The live
    score of a production trace is derived from its Feedback; `score` holds a verifier's.
    """

    id: str
    origin: Origin
    line: str = ""
    task: str | None = None
    turns: tuple[Turn, ...] = ()
    tools: tuple[Tool, ...] = ()
    score: Score | None = None
    fault: Fault | None = None
    signals: tuple[str, ...] = ()
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    tenant: str = ""
    at: float


class Task(Noun, frozen=True, kw_only=True):
    """Something to practise that a program can check. `id` is a content hash, see `codec.task_id`.

    `kind` is the stratum (a kind of request), `suite` the set it is gated in, `split` = hash(split_key) decided at
    birth; `split_key` is the source conversation or its cluster of near-duplicates. `spec` is what environment and
    verifier need to know and the model must not see. `source` is the trace it came from, or "generator:..." .
    """

    id: str
    prompt: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    environment: str
    spec: dict[str, Any] = msgspec.field(default_factory=dict)
    verifier: str
    split: Split
    split_key: str
    kind: str = ""
    suite: str = ""
    source: str = ""
    weight: float = 1.0


class Group(Noun, frozen=True, kw_only=True):
    """The attempts at one task under one policy. Complete groups are persisted and replayed, never resampled."""

    id: str
    task: str
    traces: tuple[Trace, ...]


class Sample(Noun, frozen=True, kw_only=True):
    """Parallel per-token arrays of one length T, ready for the trainer. weight 0 = context.

    tokens int32 [T]; weights float32 [T] with every normaliser folded in; advantages, logprobs (of the sampler),
    old_logprobs (of the trainer before the update), reference: float32 [T] or None. `pair` joins the chosen and the
    rejected side of a preference ("<pair id>:chosen" / "<pair id>:rejected"). `branch` is the
    trace (or turn) it came from.
    """

    tokens: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    reference: np.ndarray | None = None
    temperature: float = 1.0
    experts: bytes | None = None
    pair: str | None = None
    versions: tuple[str, ...] = ()
    branch: str = ""


class Version(Noun, frozen=True, kw_only=True):
    """A point in a line's history. `number` 0 is the untouched base model, whose uri is empty.

    `base` is the digest of the base weights, `digest` that of this version's own files, `optimiser` the uri of the
    optimiser state, `recipe` the digest of the full config, `data` the digest of the trace ids it learned from.
    """

    line: str
    number: int
    parent: int | None = None
    kind: VersionKind = "adapter"
    base: str = ""
    uri: str = ""
    digest: str = ""
    optimiser: str = ""
    recipe: str = ""
    data: str = ""
    at: float = 0.0

    @property
    def id(self) -> str:
        """`line@number`, the name used in Turns, headers, logs and the command line."""
        return f"{self.line}@{self.number}"


class SuiteResult(Noun, frozen=True, kw_only=True):
    """One suite of a gate: `gain` is candidate minus baseline in success rate, with a 95 % interval [low, high]."""

    suite: str
    role: Literal["target", "guard"]
    gain: float
    low: float
    high: float
    baseline: float
    candidate: float
    num_tasks: int
    num_clusters: int
    p_value: float
    margin: float = 0.0
    passed: bool = False
    dollars: float | None = None


class Verdict(Noun, frozen=True, kw_only=True):
    """What the gate decided of `version` against `baseline`, and why: a gate must be able to explain itself."""

    id: str
    version: str
    baseline: str
    decision: Decision
    suites: tuple[SuiteResult, ...] = ()
    reasons: tuple[str, ...] = ()
    at: float


class Release(Noun, frozen=True, kw_only=True):
    """A row of the `releases` table: from its commit on, `version` serves `line`. Written by deploy, and by the watch,
    which may only revert to the parent. `kind` says why: a gate's promotion, a forced one, or a rollback."""

    id: str
    line: str
    version: str
    previous: str | None = None
    kind: Literal["promote", "force", "rollback"]
    verdict: str | None = None
    reason: str = ""
    at: float


class Entry(Noun, frozen=True, kw_only=True):
    """One line of the ledger. `dollars` None means unpriced, which is counted and never taken for 0.

    `device` is a core or an accelerator ("cpu-core"); `seconds` are busy device-seconds (CPU seconds), idle is what is
    left of the wall clock. `subject` is what it was spent on (a turn, trace, group, version or run id) and `line` the
    model line that pays. `stage` tells serving from post-training.
    """

    id: str
    activity: Activity
    device: str
    seconds: float
    tokens: int = 0
    dollars: float | None = None
    subject: str = ""
    line: str = ""
    stage: Literal["serve", "learn"] = "learn"
    outcome: Spend = "used"
    at: float


class Captured(Noun, frozen=True, kw_only=True):
    """What the capture log holds: one Turn with its trace's particulars, or one Feedback."""

    turn: Turn | None = None
    feedback: Feedback | None = None
    origin: Origin = "production"
    line: str = ""
    task: str | None = None
    tools: tuple[Tool, ...] = ()
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    tenant: str = ""
