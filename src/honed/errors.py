"""Every exception that honed raises on purpose, ordered by cause. Each message says what, why, and what to set.

HonedError
├── UserError (ValueError)      the caller can mend it: exit code 2, HTTP 4xx
│   ├── ConfigError             a key, a value or a combination in a config file
│   ├── BadRequest              an API request; carries `param`
│   ├── NotFound                an id, a name or a plug-in that does not exist
│   └── Refused                 a legal request that would only lose data or money
│       └── NothingLearned      a turn of the loop had nothing to learn from
├── CorruptData                 a file or row that fails its digest or does not parse
├── StoreError                  the database is newer, locked by another loop, or unreachable
├── EngineError                 the engine died or refused; `retryable` says whether to ask again
└── VerifierError               a verifier raised, hung or returned a value that is not finite
"""

from __future__ import annotations


class HonedError(Exception):
    """Base of all."""


class UserError(HonedError, ValueError):
    """The caller can mend it."""


class ConfigError(UserError):
    """A key, a value or a combination of keys in a config file; the message names the keys."""


class BadRequest(UserError):
    """A malformed API request. `param` names the offending field, `code` is OpenAI's machine-readable reason."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class NotFound(UserError):
    """An id, a name or a plug-in that does not exist."""


class Refused(UserError):
    """A legal request that would only lose data or waste money."""


class NothingLearned(Refused):
    """No demonstration, and no group of different scores: a version would be its parent."""


class CorruptData(HonedError):
    """A file or a row that fails its digest or does not parse; the message names it and the way out."""


class StoreError(HonedError):
    """The database is newer than the code, held by another loop, or unreachable."""


class EngineError(HonedError):
    """The engine died or refused a request."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class VerifierError(HonedError):
    """A verifier raised, hung, or returned something that is not a finite score. `kind` says which."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
