"""Names to objects: "name" (built in or an installed entry point) or "module:attribute" (anybody's file).

`register` is used by assemble.py and by tests; entry points live in the group `honed.<slot>`. Resolving imports
code and creates no objects: that is assemble.py's work.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from typing import Any

from honed.errors import ConfigError

_registry: dict[str, dict[str, str]] = {}


def register(slot: str, name: str, target: str) -> None:
    """Makes `name` resolve to "module:attribute" in `slot` (environment, verifier, algorithm, ...)."""
    _registry.setdefault(slot, {})[name] = target


def names(slot: str) -> list[str]:
    """What can be named in a slot, sorted."""
    points = importlib.metadata.entry_points(group=f"honed.{slot}")
    return sorted({*_registry.get(slot, {}), *(point.name for point in points)})


def resolve(slot: str, name: str) -> Any:
    """The object that `name` stands for. Raises ConfigError with the nearest names when there is none."""
    if ":" in name:
        return _load(slot, name)
    target = _registry.get(slot, {}).get(name)
    if target is not None:
        return _load(slot, target)
    for point in importlib.metadata.entry_points(group=f"honed.{slot}", name=name):
        return point.load()
    near = difflib.get_close_matches(name, names(slot), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"no {slot} is called {name!r}.{hint} Known: {', '.join(names(slot)) or 'none'}; or write module:attribute."
    )


def _load(slot: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    if not module.strip(".") or not attribute:
        raise ConfigError(f"the {slot} {target!r} names no object; write module:attribute.")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the {slot} {target!r} cannot be imported: {error}. Is its folder on PYTHONPATH?") from error
    except AttributeError as error:
        raise ConfigError(f"the module {module!r} has no {attribute!r} to use as {slot}.") from error
