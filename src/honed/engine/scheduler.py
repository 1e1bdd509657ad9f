"""Which sequences run, and what each contributes to the next step. Owned by the engine's one worker thread.

Admission reserves prompt + max_tokens, so nothing that runs is ever preempted. A request whose prompt begins like one
that is being read right now waits for it and takes its blocks: identical prompts are read once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from honed.engine.cache import BLOCK, Blocks, Rows
from honed.engine.grammar import Constraint
from honed.model.bank import Bank
from honed.model.linear import Adapter
from honed.types import Precision, Sampling

if TYPE_CHECKING:  # which runs what is planned here
    from honed.engine.full import FullModel

Sink = Callable[[Any], None]


def cache_key(weights: str, precision: Precision) -> str:
    """What blocks computed by these weights at this precision are kept under."""
    return f"{weights}#{precision}"


@dataclass(eq=False)
class Sequence:
    """One request on its way. `tokens` = prompt, then what was sampled; the first `computed` have keys and values.

    `scores` collects log-probabilities where the request only asks for those of its own tokens (max_tokens 0).
    """

    id: str
    tokens: list[int]
    version: str
    sampling: Sampling
    sink: Sink
    order: tuple[int, int]
    seed: int = 0
    adapter: Adapter | None = None
    model: FullModel | None = None
    precision: Precision = "full"
    constraint: Constraint | None = None
    scores: list[float] | None = None
    num_prompt: int = 0
    computed: int = 0
    cached: int = 0
    seconds: float = 0.0
    bank: Bank | None = None
    row: int = -1

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def need(self) -> int:
        """The most tokens it can come to."""
        return self.num_prompt + (0 if self.scores is not None else self.sampling.max_tokens)

    @property
    def weights(self) -> str:
        """The identity of its adapter or whole model, "" for the base."""
        found = self.adapter or self.model
        return found.key if found else ""

    @property
    def key(self) -> str:
        """What its cached blocks are kept under: its weights and the precision of their products."""
        return cache_key(self.weights, self.precision)

    @property
    def num_output(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class Piece:
    """Tokens start..end of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether a token follows from it: it ends at the last known token."""
        return self.sequence.scores is None and self.end == len(self.sequence.tokens)


@dataclass
class Scheduler:
    """Waiting and running sequences over the cache's rows and blocks."""

    rows: Rows
    blocks: Blocks
    slots: int
    capacity: int
    prefill_chunk: int
    prefix: bool = True
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    reserved: int = 0

    @property
    def used(self) -> int:
        """Tokens reserved by running sequences and held for reuse."""
        return self.reserved + self.blocks.num_tokens

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence: lower priority first, then first come first served."""
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda waiting: waiting.order)

    def plan(self) -> list[Piece]:
        """Admits what fits, then the next step's pieces: one token of each that decodes, and chunks of prompts.

        Ordered by adapter, so that each adapter's rows are one stretch, and by row, so that nothing is gathered.
        """
        self._admit()
        budget, pieces = self.prefill_chunk, []
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            count = left if left == 1 else min(left, budget)
            if left > 1:
                budget -= count
            if count:
                pieces.append(Piece(sequence, sequence.computed, sequence.computed + count))
        pieces.sort(key=lambda piece: (piece.sequence.key, piece.sequence.row))
        return pieces

    def advance(self, pieces: list[Piece]) -> None:
        """After a step: its tokens are computed, and prompts that were read may be reused at once."""
        for piece in pieces:
            sequence = piece.sequence
            sequence.computed = piece.end
            if piece.start < sequence.num_prompt and piece.end // BLOCK > piece.start // BLOCK:
                self._keep(sequence)

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Ends a sequence wherever it is; `keep` leaves its blocks for reuse."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence not in self.running:
            return
        self.running.remove(sequence)
        self.reserved -= sequence.need
        assert sequence.bank is not None
        if keep:
            self._keep(sequence)
        moved = self.rows.give_back(sequence.bank, sequence.row)
        if moved is not None:
            moved[0].row = moved[1]
        sequence.bank, sequence.row = None, -1

    def find(self, id: str) -> Sequence | None:
        """The sequence of that request, if it has not ended."""
        return next((s for s in (*self.running, *self.waiting) if s.id == id), None)

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self.slots or self.reserved + sequence.need > self.capacity:
                return
            found = self._reusable(sequence)
            if self._comes_soon(sequence, len(found) * BLOCK):
                continue
            self.waiting.remove(sequence)
            self._start(sequence, found)

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        sequence.bank, sequence.row = self.rows.take(sequence, sequence.need)
        self.running.append(sequence)
        self.blocks.load(found, sequence.bank, sequence.row)
        sequence.computed = sequence.cached = len(found) * BLOCK
        self.reserved += sequence.need
        self.blocks.shrink(self.capacity - self.reserved)
        self._release()

    def _reusable(self, sequence: Sequence) -> list[int]:
        if not self.prefix or sequence.scores is not None:
            return []
        # the last token is always computed: its logits are needed
        return self.blocks.find(sequence.key, sequence.tokens[: len(sequence.tokens) - 1])

    def _comes_soon(self, sequence: Sequence, have: int) -> bool:
        """Whether a running sequence is about to compute the next block of this one's prompt."""
        if not self.prefix or sequence.scores is not None:
            return False
        end = have + BLOCK
        if end >= len(sequence.tokens) or self.capacity - self.reserved < end:
            return False
        return any(
            other.key == sequence.key
            and other.scores is None
            and other.computed < end <= other.num_prompt
            and other.tokens[:end] == sequence.tokens[:end]
            for other in self.running
        )

    def _keep(self, sequence: Sequence) -> None:
        if self.prefix and sequence.bank is not None and sequence.scores is None:
            tokens = sequence.tokens[: sequence.computed]
            self.blocks.keep(sequence.key, tokens, sequence.bank, sequence.row, self.capacity - self.reserved)
            self._release()

    def _release(self) -> None:
        """Where rows and blocks that were freed still take memory, and more is held than may be: gives it back."""
        if self.rows.held + self.blocks.held > self.capacity:
            self.blocks.release()
            self.rows.release()
