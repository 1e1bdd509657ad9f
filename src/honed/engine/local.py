"""The local engine: continuous batching of a dense causal decoder on this machine, as an asyncio Engine.

One thread (thread.py) owns the model, the cache and the scheduler; the event loop posts commands and gets chunks back.
Left out: speculation, packed experts, adapters over other models than the first; GPUs are better
served by vLLM.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Ids
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

from honed.engine import adapters, memory, sampler, selfcheck
from honed.engine.cache import Blocks, Rows, Shape
from honed.engine.core import Core
from honed.engine.full import FullModel, FullModels
from honed.engine.grammar import Grammars
from honed.engine.runner import Servings
from honed.engine.scheduler import Scheduler, Sequence
from honed.engine.settings import EngineSettings
from honed.engine.thread import CoreThread
from honed.errors import BadRequest, ConfigError, NotFound, Refused
from honed.model import attention, checkpoint, int8
from honed.model.linear import Adapter
from honed.model.threads import apart
from honed.protocols import Chunk, EngineStatus, Request, Scores
from honed.types import Precision, Sampling, Version

MEMORY = "memory:"
VECTOR = 16
"""Single-precision numbers in the widest vector of a CPU (AVX-512)."""


class WeightChannel(Protocol):
    """What the engine asks of a channel in memory (sync/memory.py); `config` is as PEFT's adapter_config.json, empty
    where whole models cross."""

    config: Mapping[str, Any]

    def __contains__(self, version: object) -> bool: ...
    async def fetch(self, version: str) -> dict[str, Any]: ...


class LocalEngine:
    """Implements protocols.Engine over `loaded` (model, config, digest), whose model is left as it was. Raises
    ConfigError, naming it, for a model that the flat layout would compute wrongly.

    A version that is not loaded but held by `channel` is taken from there by its name. `precisions` are held ready
    beside the settings' own, for requests that ask for them. Make it and use it in one event loop; `close` ends its
    thread.
    """

    @apart
    def __init__(
        self,
        loaded: Any,
        settings: EngineSettings | None = None,
        channel: WeightChannel | None = None,
        precisions: tuple[Precision, ...] = (),
    ) -> None:
        settings = settings or EngineSettings()
        attention.refuse_unsupported(loaded.config)
        parameter = next(loaded.model.parameters())
        device = str(parameter.device)
        self._base, self._channel, self._vocabulary = loaded.digest, channel, loaded.config.vocab_size
        limits = (loaded.config.max_position_embeddings, attention.position_limit(loaded.config) or settings.context)
        room = settings.context if settings.memory_gb is not None else settings.capacity or memory.CAPACITY
        self.context = min(settings.context, room, *limits)
        tiled, threads = settings.deterministic, settings.threads or os.cpu_count() or 1
        if tiled:
            threads = _even_threads(loaded.config, threads, settings.threads > 0)
        self._default: Precision = settings.precision
        precisions = tuple(dict.fromkeys([settings.precision, *precisions]))
        largest = int8.calibrate(loaded.model, loaded.directory) if "int8" in precisions else None
        servings = Servings(precisions, loaded.config, parameter.dtype, device, tiled, largest)
        copies = servings.copies(loaded.model)
        self._serving = copies[settings.precision]  # adapters are laid out alike for all of them
        self._full = FullModels(loaded.model, servings, parameter.dtype, device)
        self._grammars = Grammars(loaded.directory, self._vocabulary)
        shape = Shape.of(loaded.config, parameter.dtype, device)
        sizes = memory.fit(settings, shape, self.context)
        scheduler = Scheduler(
            rows=Rows(shape, sizes.slots, self.context),
            blocks=Blocks(shape, sizes.kept),
            slots=sizes.slots,
            capacity=sizes.capacity,
            prefill_chunk=settings.prefill_chunk,
            prefix=settings.prefix,
        )
        self._runners = {precision: servings.runner(copy) for precision, copy in copies.items()}
        for precision, runner in self._runners.items():
            selfcheck.check(loaded.model, runner, shape, precision)
        self._core = Core(scheduler, self._runners, row_by_row=tiled)
        self._order = count()
        self._loading = asyncio.Lock()
        self._thread = CoreThread(self._core, threads)

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Streams what is sampled. Leaving the loop early cancels the request."""
        sampler.check(request.sampling)
        self._check_ids(request.ids, request.sampling.max_tokens)
        precision = request.sampling.precision or self._default
        if precision not in self._runners:
            raise BadRequest(f"this engine holds no weights in {precision}.", param="precision")
        await self._ensure(request.version)
        constraint = None
        if request.sampling.grammar:  # a large schema takes a second: not on the event loop
            begin = functools.partial(self._grammars.begin, request.sampling.grammar, request.sampling.stop_ids)
            constraint = await asyncio.to_thread(begin)
        items, sink = self._pipe()
        sequence = Sequence(
            id=request.id,
            tokens=list(request.ids),
            version=request.version,
            sampling=request.sampling,
            sink=sink,
            order=(request.priority, next(self._order)),
            seed=secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed,
            constraint=constraint,
            precision=precision,
        )
        self._thread.post(functools.partial(self._start, sequence), sink)
        ended = False
        try:
            while not ended:
                item = await items.get()
                if isinstance(item, Exception):
                    ended = True
                    raise item
                ended = item.finish is not None
                yield item
        finally:
            if not ended:
                self._thread.hint(functools.partial(self._core.drop, sequence))

    async def cancel(self, id: str) -> None:
        """Ends a request with finish "cancelled"; what it held is free at once. An unknown id does nothing."""
        self._thread.hint(functools.partial(self._core.cancel, id))

    async def logprobs(self, ids: Ids[int], version: str, temperature: float = 1.0) -> Scores:
        """Log-probability of each id after the first, of softmax(logits / temperature), temperature above 0."""
        self._check_ids(ids, 0)
        if not 0 < temperature <= 100:
            raise BadRequest(f"temperature = {temperature} is not in (0, 100].", param="temperature")
        await self._ensure(version)
        items, sink = self._pipe()
        sequence = Sequence(
            id=f"score-{next(self._order)}",
            tokens=list(ids),
            version=version,
            sampling=Sampling(temperature=temperature),
            sink=sink,
            order=(0, next(self._order)),
            scores=[],
            precision=self._default,
        )
        self._thread.post(functools.partial(self._start, sequence), sink)
        found: Scores = await _answer(items)
        return found

    async def load(self, version: Version) -> None:
        """Verifies a version's files and makes it available. A digest that is loaded already is left alone.

        A full version is a model of its own beside the first; its requests take steps of their own. Raises CorruptData,
        ConfigError for one of other shapes, Refused for another base or a name that holds other weights. A uri
        "memory:NAME" takes the tensors that the channel holds as NAME, and loads them under that name.
        """
        if _is_base(version.id):
            return
        if not version.uri:
            raise NotFound(f"{version.id} has no files: its uri is empty.")
        if version.base and version.base != self._base:
            raise Refused(
                f"{version.id} was made of the base {version.base[:12]}, but this engine runs {self._base[:12]}."
            )
        if version.uri.startswith(MEMORY):
            await self._take(version.uri.removeprefix(MEMORY) or version.id)
            return
        async with self._loading:
            loaded = self._core.versions.get(version.id)
            if loaded is not None and loaded.digest == version.digest:
                return
            if loaded is not None:
                raise Refused(f"{version.id} is loaded with other weights; unload it first.")
            directory = _local_path(version.uri)
            if version.kind == "full":
                await self._install(
                    await asyncio.to_thread(self._full.of_folder, version.id, version.digest, directory)
                )
                return
            tensors, config = await asyncio.to_thread(checkpoint.read_adapter, directory, version.digest)
            await self._install(await self._adapter(version.id, version.digest, tensors, config))

    async def unload(self, version: str) -> None:
        """Forgets a version: new requests get NotFound at once; returns when its running requests have ended.

        Raises EngineError when the engine is closed or broken.
        """
        items, sink = self._pipe()
        self._thread.post(functools.partial(self._core.unload, version, functools.partial(sink, None)), sink)
        await _answer(items)

    async def status(self) -> EngineStatus:
        """Counters, and what is loaded."""
        core, scheduler = self._core, self._core.scheduler
        return EngineStatus(
            base=self._base,
            versions=tuple(sorted(core.versions)),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            context=self.context,
            capacity=scheduler.capacity,
            used=scheduler.used,
            prompt_tokens=core.prompt_tokens,
            cached_tokens=core.cached_tokens,
            output_tokens=core.output_tokens,
            busy_seconds=core.busy_seconds,
            pid=os.getpid(),
            heartbeat=self._thread.heartbeat,
            failure=self._thread.failure,
        )

    async def close(self) -> None:
        """Fails what still runs and ends the thread."""
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    def _start(self, sequence: Sequence) -> None:
        if not _is_base(sequence.version):
            found = self._core.versions.get(sequence.version)
            if found is None:
                sequence.sink(_not_loaded(sequence.version, self._core))
                return
            if isinstance(found, FullModel):
                sequence.model = found
            else:
                sequence.adapter = found
        self._core.add(sequence)

    async def _ensure(self, version: str) -> None:
        """Raises NotFound unless the version is loaded or the channel holds it, EngineError if the engine is closed."""
        self._thread.check()
        if _is_base(version) or version in self._core.versions:
            return
        if self._channel is None or version not in self._channel:
            raise _not_loaded(version, self._core)
        await self._take(version)

    async def _take(self, name: str) -> None:
        if self._channel is None:
            raise NotFound(f"{name!r} cannot be loaded from memory: this engine has no channel.")
        async with self._loading:
            if name in self._core.versions:
                return
            tensors, config = await self._channel.fetch(name), self._channel.config
            if config:
                await self._install(await self._adapter(name, MEMORY + name, tensors, config))
            else:
                await self._install(await asyncio.to_thread(self._full.of_tensors, name, MEMORY + name, tensors))

    async def _adapter(self, name: str, digest: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Adapter:
        return await asyncio.to_thread(adapters.build, self._serving, name, digest, tensors, config)

    async def _install(self, version: Adapter | FullModel) -> None:
        items, sink = self._pipe()

        def install() -> None:
            self._core.load(version)
            sink(None)

        self._thread.post(install, sink)
        await _answer(items)

    def _check_ids(self, ids: Ids[int], max_tokens: int) -> None:
        if not ids:
            raise BadRequest("the prompt has no tokens.", param="messages")
        if len(ids) + max_tokens > self.context:
            raise BadRequest(
                f"{len(ids)} prompt tokens and max_tokens = {max_tokens} exceed the context of {self.context} tokens; "
                "shorten the messages or lower max_tokens.",
                param="messages",
                code="context_length_exceeded",
            )
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise BadRequest(f"a prompt token is not in [0, {self._vocabulary}).", param="messages")

    def _pipe(self) -> tuple[asyncio.Queue[Any], Callable[[Any], None]]:
        """A queue of this event loop and the function that fills it from the worker thread."""
        loop, items = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def sink(item: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, item)

        return items, sink


async def _answer(items: asyncio.Queue[Any]) -> Any:
    """What the thread says next; an error is raised."""
    item = await items.get()
    if isinstance(item, Exception):
        raise item
    return item


def _is_base(version: str) -> bool:
    return not version or version.endswith("@0")


def _not_loaded(version: str, core: Core) -> NotFound:
    return NotFound(f"the version {version!r} is not loaded (loaded: {', '.join(sorted(core.versions)) or 'none'}).")


def _local_path(uri: str) -> Path:
    if "://" not in uri:
        return Path(uri)
    parsed = urlparse(uri)
    if parsed.scheme not in ("file", "local"):
        raise ConfigError(f"the local engine reads weights from folders, not from {uri!r}; copy them here first.")
    return Path(unquote(parsed.path))


def _even_threads(config: Any, threads: int, given: bool) -> int:
    """How many threads, at most `threads`, may share rows and leave no element out of step: torch computes what is left
    over at the end of a thread's share by another exponential than the rest, so each share must be whole vectors.

    Raises ConfigError for mixtures of experts, and for a number that was `given` and won't do.
    """
    if any(getattr(config, key, None) for key in ("num_experts", "num_local_experts")):
        raise ConfigError("engine.deterministic: experts get rows by the batch, in no fixed shape. Set it to false.")
    width = math.gcd(config.intermediate_size, config.hidden_size)
    even = max((count for count in range(1, threads + 1) if width % (VECTOR * count) == 0), default=0)
    if not even or (given and even != threads):
        raise ConfigError(
            f"engine.deterministic with engine.threads = {threads}: layers {config.hidden_size} and "
            f"{config.intermediate_size} wide can't be shared evenly. "
            + (f"Set engine.threads to {even}." if even else "Set engine.deterministic to false.")
        )
    return even
