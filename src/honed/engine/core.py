"""The local engine's inside: schedule, run, sample, tell. Called from one thread only, never from the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from honed.engine import sampler
from honed.engine.full import FullModel
from honed.engine.runner import Runner
from honed.engine.scheduler import Piece, Scheduler, Sequence, cache_key
from honed.errors import EngineError, HonedError
from honed.log import log
from honed.model.linear import Adapter
from honed.protocols import Chunk, Scores
from honed.types import Finish, Precision, Usage

MAX_FAILED_STEPS = 8
"""In a row: a device that is lost fails every step, and only a new process gets it back."""


class Core:
    """Runs steps until nothing is left to do. Counters may be read from any thread.

    `busy_seconds` are CPU seconds of the whole process while it was in a step, all of its threads together: a part that
    one thread does alone costs one thread. What else the process does meanwhile (a socket, a version being read) is in
    them; beside a step it is little. `row_by_row`: each row is sampled alone, for the sum of one row is made otherwise
    than the sums of many.
    """

    def __init__(self, scheduler: Scheduler, runners: Mapping[Precision, Runner], *, row_by_row: bool = False) -> None:
        self.scheduler, self._runners, self._row_by_row = scheduler, runners, row_by_row
        self.versions: dict[str, Adapter | FullModel] = {}
        self._draining: list[tuple[Adapter | FullModel, Callable[[], None]]] = []
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.busy_seconds = 0.0
        self._failed_steps = 0

    @property
    def busy(self) -> bool:
        """Whether there is a step to run."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> None:
        """One forward pass for all that run. An exception fails the requests of this step and nothing else, until
        MAX_FAILED_STEPS in a row have said that no request is to blame: then EngineError is raised."""
        started = time.process_time()
        pieces: list[Piece] = []
        try:
            pieces = self.scheduler.plan()
            sampling, logits = self._run(pieces)
            self.scheduler.advance(pieces)
            self._charge(pieces, started)
            self._sample(sampling, logits)
            self._end_scoring(pieces)
            self._failed_steps = 0
        except Exception as error:  # the boundary of a step: the engine lives on
            log("engine.step_failed", error=f"{type(error).__name__}: {error}", requests=len(pieces))
            failed = [piece.sequence for piece in pieces] or [*self.scheduler.running, *self.scheduler.waiting]
            for sequence in failed:
                self._fail(sequence, EngineError(f"the engine failed in a step: {error}", retryable=True))
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineError(f"{self._failed_steps} steps in a row failed, the last with: {error}") from error
        self._drain()

    def add(self, sequence: Sequence) -> None:
        """Takes a request in."""
        self.scheduler.add(sequence)

    def cancel(self, id: str) -> None:
        """Frees a request's row at once and ends it with finish "cancelled"; an unknown id does nothing."""
        sequence = self.scheduler.find(id)
        if sequence is not None:
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Ends one request with finish "cancelled"; one that has ended already is left alone."""
        if sequence in self.scheduler.running or sequence in self.scheduler.waiting:
            self._finish(sequence, "cancelled", Chunk(id=sequence.id, version=sequence.version))
            self._drain()

    def load(self, version: Adapter | FullModel) -> None:
        """New requests for the version's name get it."""
        self.versions[version.name] = version

    def unload(self, name: str, done: Callable[[], None]) -> None:
        """New requests don't find it; `done` is called once those that use it have ended."""
        version = self.versions.pop(name, None)
        if version is None:
            done()
            return
        self._draining.append((version, done))
        self._drain()

    def abandon(self, error: HonedError) -> None:
        """Ends all that has not ended with `error`, and leaves the cache as it is: no step may follow."""
        ended, draining = [*self.scheduler.running, *self.scheduler.waiting], self._draining
        self.scheduler.running, self.scheduler.waiting, self._draining = [], [], []
        for sequence in ended:
            sequence.sink(error)
        for _, done in draining:
            done()

    def _run(self, pieces: list[Piece]) -> tuple[list[Piece], torch.Tensor]:
        """The pieces that sample and their logits; a pass for each whole model and each precision asked for."""
        by_runner: dict[Runner, list[Piece]] = {}
        for piece in pieces:
            runners = piece.sequence.model.runners if piece.sequence.model else self._runners
            by_runner.setdefault(runners[piece.sequence.precision], []).append(piece)
        ran = [runner.run(own) for runner, own in by_runner.items()]
        if len(ran) == 1:
            return ran[0]
        return [piece for sampling, _ in ran for piece in sampling], torch.cat([logits for _, logits in ran])

    def _charge(self, pieces: list[Piece], started: float) -> None:
        """Splits the step's CPU seconds by tokens computed."""
        seconds = time.process_time() - started
        self.busy_seconds += seconds
        total = sum(piece.count for piece in pieces)
        for piece in pieces:
            piece.sequence.seconds += seconds * piece.count / total

    def _sample(self, pieces: list[Piece], logits: torch.Tensor) -> None:
        if not pieces:
            return
        started = time.process_time()
        sequences = [piece.sequence for piece in pieces]
        masks = [self._mask(sequence) for sequence in sequences]
        draws = []
        for rows in [[i] for i in range(len(sequences))] if self._row_by_row else [range(len(sequences))]:
            drawn = [sequences[i] for i in rows]
            draws += sampler.draw(
                logits[rows[0] : rows[-1] + 1],
                [s.sampling for s in drawn],
                [s.seed for s in drawn],
                [len(s.tokens) for s in drawn],
                [s.tokens for s in drawn],
                [masks[i] for i in rows],
            )
        self._charge(pieces, started)
        for sequence, draw in zip(sequences, draws, strict=True):
            if sequence.bank is not None:  # it did not fail above
                self._take(sequence, draw)

    def _mask(self, sequence: Sequence) -> torch.Tensor | None:
        """What a sequence in a grammar may draw. Where its grammar broke, that sequence alone fails."""
        if sequence.constraint is None:
            return None
        try:
            return sequence.constraint.mask()
        except EngineError as error:
            self._fail(sequence, error)
            return None

    def _take(self, sequence: Sequence, draw: sampler.Draw) -> None:
        if not draw.finite:
            self._fail(sequence, EngineError(f"the logits of {sequence.version or 'the base model'} are not finite."))
            return
        sequence.tokens.append(draw.id)
        if sequence.constraint is not None:
            sequence.constraint.take(draw.id)
        self.output_tokens += 1
        chunk = Chunk(
            id=sequence.id,
            ids=(draw.id,),
            logprobs=(draw.logprob,),
            raw_logprobs=(draw.raw_logprob,),
            top=(draw.top,) if sequence.sampling.top_logprobs else (),
            version=sequence.version,
        )
        if draw.id in sequence.sampling.stop_ids:
            self._finish(sequence, "stop", chunk)
        elif sequence.num_output >= sequence.sampling.max_tokens:
            self._finish(sequence, "length", chunk)
        else:
            sequence.sink(chunk)

    def _finish(self, sequence: Sequence, finish: Finish, chunk: Chunk) -> None:
        self.scheduler.remove(sequence)
        self.prompt_tokens += sequence.num_prompt
        self.cached_tokens += sequence.cached
        usage = Usage(
            prompt=sequence.num_prompt,
            cached=sequence.cached,
            output=sequence.num_output,
            seconds=sequence.seconds,
        )
        sequence.sink(msgspec.structs.replace(chunk, finish=finish, usage=usage))

    def _end_scoring(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            sequence = piece.sequence
            if sequence.scores is not None and sequence.computed == sequence.num_prompt:
                self.scheduler.remove(sequence, keep=False)
                self.prompt_tokens += sequence.num_prompt
                sequence.sink(Scores(values=sequence.scores, seconds=sequence.seconds))

    def _fail(self, sequence: Sequence, error: HonedError) -> None:
        if sequence.bank is not None:
            sequence.bank.clear(sequence.row, sequence.need)  # it may hold values that are not finite
        self.scheduler.remove(sequence, keep=False)
        sequence.sink(error)

    def _drain(self) -> None:
        if not self._draining:
            return
        alive = {s.weights for s in (*self.scheduler.running, *self.scheduler.waiting)}
        for version, done in list(self._draining):
            if version.key not in alive:
                self._draining.remove((version, done))
                for precision in self._runners:
                    self.scheduler.blocks.forget(cache_key(version.key, precision))
                done()
