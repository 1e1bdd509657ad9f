"""Fakes that fill every slot of the loop.

The fakes are honest about processes, files and tokens and invent only the intelligence: a fake policy is a skill per
kind of request (the first word of the user's message), the probability that it says "right". The trainer moves skills
by the very samples that a real one would be given. Nothing here loads torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from honed import codec
from honed.engine.scripted import ByteRenderer
from honed.engine.token_model import TokenModel
from honed.errors import BadRequest, CorruptData, EngineError, NotFound
from honed.loop import paths
from honed.protocols import (
    Chunk,
    Engine,
    EngineStatus,
    Job,
    Learner,
    Loss,
    Outcome,
    Request,
    Sandbox,
    Scores,
    Session,
    Snapshot,
    StepResult,
    Verifier,
)
from honed.record import RecordedSession
from honed.types import (
    Message,
    Origin,
    Sample,
    Sampling,
    Score,
    Task,
    Trace,
    Usage,
    Version,
)

RIGHT, WRONG = "right", "wrong"
Skills = dict[str, float]


RENDERER = ByteRenderer()


# ---------------------------------------------------------------------------------------- an engine and a trainer


class FakeEngine:
    """Says "right" with the version's skill at the kind of request, else "wrong"; the draw depends on the seed alone.

    `base` are the skills of the base model; a kind that a version has never seen has skill `floor`. `broken` requests
    (counted down) raise EngineError(retryable=True).
    """

    def __init__(self, base: Skills | None = None, *, floor: float = 0.05, context: int = 4096) -> None:
        self.skills: dict[str, Skills] = {"": dict(base or {})}
        self.floor, self.context = floor, context
        self.broken = 0
        self.served: list[Request] = []
        self._cancelled: set[str] = set()
        self._running: set[str] = set()

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Streams the reply, one id a chunk."""
        if self.broken:
            self.broken -= 1
            raise EngineError("the engine was killed", retryable=True)
        skill = self._skill(request)
        if len(request.ids) + request.sampling.max_tokens > self.context:
            raise BadRequest("the prompt is longer than the context.", param="messages")
        self.served.append(request)
        seed = request.sampling.seed if request.sampling.seed is not None else random.getrandbits(31)
        right = _uniform(seed, len(request.ids)) < skill
        chance = skill if right else 1 - skill
        wanted = [*(RIGHT if right else WRONG).encode(), RENDERER.stop_ids[0]]
        stopped = next((at for at, id in enumerate(wanted) if id in request.sampling.stop_ids), len(wanted) - 1)
        wanted = wanted[: stopped + 1]
        ids = wanted[: request.sampling.max_tokens]
        finish, sent = ("stop" if ids == wanted else "length"), 0
        self._running.add(request.id)
        try:
            for index, id in enumerate(ids):
                await asyncio.sleep(0)
                if request.id in self._cancelled:
                    finish = "cancelled"
                    break
                logprob = math.log(max(chance, 1e-6)) if index == 0 else 0.0
                sent += 1
                yield Chunk(
                    id=request.id, ids=(id,), logprobs=(logprob,), raw_logprobs=(logprob,), version=request.version
                )
            usage = Usage(prompt=len(request.ids), cached=0, output=sent, seconds=0.001 * sent)
            yield Chunk(id=request.id, version=request.version, finish=finish, usage=usage)  # type: ignore[arg-type]
        finally:
            self._running.discard(request.id)
            self._cancelled.discard(request.id)

    async def cancel(self, id: str) -> None:
        """Ends a running request; unknown ids do nothing."""
        if id in self._running:
            self._cancelled.add(id)

    async def logprobs(self, ids: Sequence[int], version: str, temperature: float = 1.0) -> Scores:
        """Zeros, of the right number."""
        self._require(version)
        return Scores(values=[0.0] * (len(ids) - 1), seconds=0.002)

    async def load(self, version: Version) -> None:
        """Reads the version's skills from its folder, verified against its digest."""
        if version.number:
            self.skills[version.id] = read_fake(Path(version.uri), version.digest)[0]

    async def unload(self, version: str) -> None:
        """Forgets a version."""
        self.skills.pop(version, None)

    async def status(self) -> EngineStatus:
        """What is loaded."""
        return EngineStatus(base="fake", versions=tuple(v for v in self.skills if v), context=self.context)

    async def close(self) -> None:
        """Nothing to free."""

    def _skill(self, request: Request) -> float:
        return self._require(request.version).get(kind_of(RENDERER.decode(request.ids)), self.floor)

    def _require(self, version: str) -> Skills:
        name = "" if version.endswith("@0") else version
        if name not in self.skills:
            raise NotFound(f"the version {version} is not loaded")
        return self.skills[name]


class FakeTrainer:
    """Moves skills by samples: policy gradient by weight x advantage, cross entropy by weight, times the learning rate
    and `gain`. Snapshots are folders under `root`: skills, then optimiser, then a manifest with their digests."""

    def __init__(self, root: Path, engine: FakeEngine, *, gain: float = 400.0) -> None:
        self.root, self.engine, self.gain = root, engine, gain
        self.skills: Skills = dict(engine.skills[""])
        self.steps = 0
        self._gradient: dict[str, float] = {}

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Sums each kind's gradient; a "wrong" reply counts with the opposite sign."""
        trained = 0
        for sample in samples:
            text = RENDERER.decode([int(id) for id in sample.tokens])
            said = [id for id, weight in zip(sample.tokens, sample.weights, strict=True) if weight]
            sign = 1.0 if bytes(int(id) for id in said if id < 256).startswith(RIGHT.encode()) else -1.0
            values = sample.weights * (sample.advantages if sample.advantages is not None else 1.0)
            self._gradient[kind_of(text)] = self._gradient.get(kind_of(text), 0.0) + sign * float(np.sum(values))
            trained += len(said)
        total = float(sum(abs(value) for value in self._gradient.values()))
        return StepResult(loss=total, num_samples=len(samples), trained_tokens=trained, seconds=0.01)

    async def step(self, learning_rate: float | None = None) -> StepResult:
        """Applies the gradient; skills stay in [0.01, 0.99]."""
        for kind, value in self._gradient.items():
            moved = self.skills.get(kind, self.engine.floor) + self.gain * (learning_rate or 0.0) * value
            self.skills[kind] = min(0.99, max(0.01, moved))
        self._gradient, self.steps = {}, self.steps + 1
        return StepResult(seconds=0.001)

    async def logprobs(self, samples: Sequence[Sample]) -> list[Scores]:
        """Zeros."""
        return [Scores(values=[0.0] * len(sample.tokens), seconds=0.001) for sample in samples]

    async def snapshot(self, name: str) -> Snapshot:
        """Writes the folder `name`, its manifest last."""
        folder = self.root / name
        return write_fake(folder, self.skills, {"steps": self.steps})

    async def restore(self, snapshot: Snapshot | None, *, optimiser: bool = True) -> None:
        """Takes a snapshot's skills, or the base model's."""
        self._gradient = {}
        if snapshot is None:
            self.skills, self.steps = dict(self.engine.skills[""]), 0
            return
        self.skills, state = read_fake(Path(snapshot.uri), snapshot.digest)
        self.steps = state["steps"] if optimiser else 0

    async def publish(self, version: str) -> None:
        """Hands the skills to the engine."""
        self.engine.skills[version] = dict(self.skills)

    async def close(self) -> None:
        """Nothing to free."""


def write_fake(folder: Path, skills: Skills, state: dict[str, Any]) -> Snapshot:
    """A checkpoint of a fake policy: the manifest is written last, so that half of one can't be loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"skills.json": codec.to_json(dict(sorted(skills.items()))), "optimiser.json": codec.to_json(state)}
    sums = {}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        sums[name] = hashlib.sha256(data).hexdigest()
    digest = codec.digest(sums)
    partial = folder / "manifest.json.part"
    partial.write_text(json.dumps({"digest": digest, "files": sums}))
    partial.replace(folder / "manifest.json")
    return Snapshot(uri=str(folder), digest=digest, optimiser=str(folder / "optimiser.json"))


def read_fake(folder: Path, digest: str) -> tuple[Skills, dict[str, Any]]:
    """The inverse. Raises CorruptData, naming the file, for what is missing, half-written or changed."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CorruptData(f"{folder / 'manifest.json'}: {error}") from error
    if manifest["digest"] != digest or codec.digest(manifest["files"]) != digest:
        raise CorruptData(f"{folder / 'manifest.json'} does not match the digest {digest}.")
    data = {}
    for name, sum in manifest["files"].items():
        data[name] = (folder / name).read_bytes() if (folder / name).exists() else b""
        if hashlib.sha256(data[name]).hexdigest() != sum:
            raise CorruptData(f"{folder / name} does not match its manifest.")
    return json.loads(data["skills.json"]), json.loads(data["optimiser.json"])


class FakeLearner:
    """A FakeTrainer and its FakeEngine."""

    def __init__(self, engine: FakeEngine, trainer: FakeTrainer) -> None:
        self.engine, self.trainer = engine, trainer

    async def close(self) -> None:
        """Nothing to free."""


class FakeRuntime:
    """This process: a fresh FakeLearner for every turn."""

    def __init__(self, root: Path, base: Skills | None = None, *, gain: float = 400.0) -> None:
        self.root, self.base, self.gain = root, base, gain
        self.learners: list[FakeLearner] = []

    async def learner(self) -> Learner:
        """A new learner."""
        engine = FakeEngine(self.base)
        self.learners.append(FakeLearner(engine, FakeTrainer(self.root, engine, gain=self.gain)))
        return self.learners[-1]

    async def gather(self, jobs: Sequence[Job], limit: int) -> list[Any]:
        """Runs the jobs, at most `limit` at a time."""
        return await gather(jobs, limit)


async def gather(jobs: Sequence[Job], limit: int) -> list[Any]:
    """Runtime.gather on this event loop: results in order; an exception cancels the rest and propagates."""
    gate = asyncio.Semaphore(limit)

    async def one(job: Job) -> Any:
        async with gate:
            return await job()

    running = [asyncio.ensure_future(one(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


# ------------------------------------------------------------------------------- sessions, environment, verifier


def fake_session(engine: Engine, *, version: str, trace: str, line: str, sampling: Sampling, origin: Origin) -> Session:
    """A real session (record.py) over any engine that reads and writes bytes."""
    model = TokenModel(engine, RENDERER, index_size=64)
    short = msgspec.structs.replace(sampling, max_tokens=16)
    return RecordedSession(model, trace=trace, origin=origin, line=line, version=version, sampling=short)


def fake_sessions(engine: Engine, line: str) -> Callable[..., Session]:
    """The Sessions that Rollouts wants, over an engine."""

    def make(
        task: Task, *, version: str, trace: str, sampling: Sampling, origin: Origin, tags: dict[str, str]
    ) -> Session:
        return fake_session(engine, version=version, trace=trace, line=line, sampling=sampling, origin=origin)

    return make


class FakeEnvironment:
    """Asks the task's prompt once. `before` is awaited first, for tests of faults and of stuck attempts."""

    def __init__(self, before: Callable[[Task], Any] | None = None) -> None:
        self._before = before
        self.ran: list[str] = []

    async def run(self, task: Task, session: Session, sandbox: Sandbox | None) -> Outcome:
        """One question, one answer."""
        self.ran.append(task.id)
        if self._before is not None:
            await self._before(task)
        turn = await session.reply(task.prompt, task.tools)
        return Outcome(messages=(*task.prompt, turn.reply))


def says_right(task: Task, trace: Trace, outcome: Outcome, sandbox: Sandbox | None) -> Score:
    """The fakes' verifier: 1 for a reply that is "right"."""
    said = outcome.messages[-1].content if outcome.messages else ""
    return Score(value=float(said == RIGHT), verifier="says_right", evidence=f"said {said!r}")


class FakeScorer:
    """Calls one function for every verifier's name, in this process."""

    def __init__(self, verifier: Verifier = says_right) -> None:
        self._verifier = verifier

    async def score(
        self,
        verifier: str,
        task: Task,
        trace: Trace,
        outcome: Outcome,
        sandbox: Sandbox | None,
        *,
        timeout_seconds: float,
        on_spent: Callable[[float], None] = lambda seconds: None,
    ) -> Score:
        """The function's score; what an async one spent after its call is not seen."""
        started = time.thread_time()
        found = self._verifier(task, trace, outcome, sandbox)
        on_spent(time.thread_time() - started)
        return found if isinstance(found, Score) else await found


def fake_task(text: str, *, suite: str = "", key: str = "", split: str | None = None) -> Task:
    """A task whose kind is the text's first word; its split follows from `key` (the text) unless given."""
    task = Task(
        id="",
        prompt=(Message(role="user", content=text),),
        environment="fake",
        verifier="says_right",
        split=split or codec.split_of(key or text),  # type: ignore[arg-type]
        split_key=key or text,
        kind=text.split(maxsplit=1)[0],
        suite=suite,
    )
    return msgspec.structs.replace(task, id=codec.task_id(task))


def make_fake_task(trace: Trace) -> Task | None:
    """The fakes' TaskMaker: what the user first asked."""
    asked = next((message.content for message in paths.opening(trace) if message.role == "user"), None)
    return fake_task(asked) if asked else None


class VirtualClock:
    """A Clock that moves only when somebody sleeps on it."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Moves on at once."""
        self._now += seconds
        await asyncio.sleep(0)


def kind_of(text: str) -> str:
    """The first word of the last user message in rendered text."""
    asked = text.rpartition("user\n")[2]
    return asked.split(maxsplit=1)[0].partition("<|")[0] if asked.strip() else ""


def _uniform(*parts: int) -> float:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big") / 2**56
