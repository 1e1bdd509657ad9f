"""Keeps a reply inside a grammar: a JSON schema's values, calls of named tools. By llguidance, which computes for every
step the set of tokens that may come next.

What remains is drawn by the sampler as ever, so the log-probabilities of the distribution that sampled are those of the
model inside the grammar, and the raw ones those of the model alone.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from honed.errors import BadRequest, EngineError


class Grammars:
    """Grammars over one model's tokenizer, which is read when the first request asks for one. Thread-safe."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        self._file, self._vocabulary = directory / "tokenizer.json", vocabulary
        self._tokenizer = functools.cache(self._read)

    def begin(self, grammar: str, stop_ids: tuple[int, ...]) -> Constraint:
        """The state before the first token of a reply in `grammar`, in llguidance's variation of Lark; a whole reply
        may be followed by any of `stop_ids` and nothing else. Raises BadRequest for a grammar that can't be followed.
        """
        matcher = LLMatcher(self._tokenizer(stop_ids), grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            raise BadRequest(f"the reply's grammar or schema can't be followed: {reason}", param="response_format")
        return Constraint(matcher, self._vocabulary)

    def _read(self, stop_ids: tuple[int, ...]) -> LLTokenizer:
        if not stop_ids:
            raise BadRequest("a reply in a grammar needs a stop id to end with.", param="stop_ids")
        try:
            return LLTokenizer(str(self._file), n_vocab=self._vocabulary, eos_token=list(stop_ids))
        except Exception as error:  # the library raises bare Exceptions
            raise BadRequest(
                f"this engine's model has no tokenizer that grammars can be followed with: {error}",
                param="response_format",
            ) from error


class Constraint:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def mask(self) -> Tensor:
        """bool [vocabulary]: the tokens that may come next. Never empty: at the end the stop ids remain.

        Raises EngineError where the grammar outgrew the limits of its parser.
        """
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise EngineError(f"the reply's grammar could not be followed to its end: {reason}")
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten()[: self._vocabulary].bool()

    def take(self, id: int) -> None:
        """Goes on by a token of the mask."""
        self._matcher.consume_token(id)
