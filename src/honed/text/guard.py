"""Keeps what people wrote from being read as structure: a special token's name in a message is text, never the token.

Without it a user could end their own message and speak as the system. Names in content are swapped for marks before the
template renders them, and each mark is then tokenised as the plain text that it stands for.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from tokenizers import Tokenizer


class Guard:
    """The special tokens of one tokenizer. `hide` takes any tree of strings, `encode` the text rendered from it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True  # the library's name for: split them like any other text
        names = sorted(
            (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special), key=len
        )
        self._names = names[::-1]  # the longest first, where one begins another
        self._find = re.compile("|".join(map(re.escape, self._names))) if names else None
        nonce = secrets.token_hex(8)  # nobody can write a mark that they can't guess
        self._mark = f"\ue000{nonce}.{{}}\ue001"
        self._marks = re.compile(f"\ue000{nonce}\\.(\\d+)\ue001")

    def hide(self, value: Any) -> Any:
        """The same tree with special tokens' names swapped for marks, in keys as well."""
        if isinstance(value, str):
            return self._find.sub(self._mark_of, value) if self._find is not None else value
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: special tokens that the template wrote are tokens, marks the text they stand for."""
        ids: list[int] = []
        for position, piece in enumerate(self._marks.split(text)):
            if position % 2:
                ids += self._plain.encode(self._names[int(piece)], add_special_tokens=False).ids
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def _mark_of(self, match: re.Match[str]) -> str:
        return self._mark.format(self._names.index(match.group()))
