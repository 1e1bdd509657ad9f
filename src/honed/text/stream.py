"""Reads a reply token by token: what is safe to show now, and in the end the message with its calls parsed.

It holds back half a character, the start of a stop string and everything from the start of a tool call on.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from honed.text.tools import ToolFormat
from honed.types import Message


class ReplyStream:
    """One reply. `stopped` turns true when a stop string was met: what follows is not part of the reply.

    `malformed` is, after `finish`, the number of tool calls that could not be read."""

    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int], format: ToolFormat | None, stop: Sequence[str]
    ) -> None:
        self._tokenizer, self._hidden, self._format = tokenizer, hidden, format
        self._stop = tuple(text for text in stop if text)
        self._holds = (*self._stop, *((format.opening,) if format else ()))
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""
        self._shown = 0
        self.stopped = False
        self.malformed = 0

    def push(self, ids: Sequence[int]) -> str:
        """Takes newly sampled ids and returns the text that became safe to show."""
        for id in ids:
            if self.stopped:
                break
            if id in self._hidden:
                continue
            self._ids.append(id)
            self._grow(self._decoder.step(self._tokenizer, id) or "")
        return self._show()

    def finish(self, finish_reason: str | None = None) -> Message:
        """The whole reply. An unfinished character at the end becomes a replacement character."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            if whole.startswith(self._text):
                self._grow(whole[len(self._text) :])
        if self._format is None:
            return Message(role="assistant", content=self._text)
        parsed = self._format.parse(self._text)
        self.malformed = parsed.malformed
        return Message(
            role="assistant",
            content=None if parsed.calls and not parsed.content else parsed.content,
            tool_calls=parsed.calls,
        )

    def _grow(self, piece: str) -> None:
        start = max(0, len(self._text) - max((len(stop) for stop in self._stop), default=0))
        self._text += piece
        found = [at for at in (self._text.find(stop, start) for stop in self._stop) if at >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _show(self) -> str:
        end = len(self._text)
        if self._format is not None and (at := self._text.find(self._format.opening)) >= 0:
            end = at
        elif not self.stopped:
            end -= max((_overlap(self._text, hold) for hold in self._holds), default=0)
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _overlap(text: str, hold: str) -> int:
    """Length of the longest end of `text` that is a proper start of `hold`."""
    return next((size for size in range(min(len(text), len(hold) - 1), 0, -1) if hold.startswith(text[-size:])), 0)
