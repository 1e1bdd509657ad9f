"""One TOML file, strictly read: the base class of every settings section, and errors that name the key.

The sections themselves sit beside what they configure; assemble.py joins them. No section writes another.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from honed import codec
from honed.errors import ConfigError

S = TypeVar("S", bound="Settings")


class Settings(BaseModel):
    """Base of a settings section: frozen, unknown keys are errors, a field's docstring is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def read_toml(path: str | Path) -> dict[str, Any]:
    """The file as a dict. Raises ConfigError that names the file and the line."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {path}.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error


def parse(settings: type[S], data: dict[str, Any], *, source: str = "the config") -> S:
    """Validates `data` as `settings`. Raises one ConfigError that lists every wrong key, with the nearest right one."""
    try:
        return settings.model_validate(data)
    except ValidationError as error:
        lines = [_explain(settings, problem) for problem in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines) + ".") from None


def recipe_digest(settings: Settings) -> str:
    """Digest of the full config, defaults included: what a Version's `recipe` holds."""
    return codec.digest(settings.model_dump(mode="json"))[:24]


def _explain(settings: type[Settings], problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(settings, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        return f"unknown key {key!r}" + (f" (did you mean {near[0]!r}?)" if near else f" (known: {', '.join(known)})")
    if problem["type"] == "missing":
        return f"{key!r} is missing"
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{key!r} = {problem['input']!r}: {message}" if problem["type"] != "value_error" else f"{key!r}: {message}"


def _fields_at(settings: type[Settings], path: tuple[Any, ...]) -> list[str]:
    current: Any = settings
    for part in path:
        field = current.model_fields.get(part) if isinstance(current, type) and issubclass(current, BaseModel) else None
        current = field.annotation if field is not None else None
    return sorted(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []
