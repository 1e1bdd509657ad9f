"""The one composition root: a config file becomes objects, and no other module makes another's parts.

Nothing here loads torch: models live in child processes.
"""

from honed.assemble.config import Config, check, load_config, recipe
from honed.assemble.gateway import serve_gateway
from honed.assemble.ledger import ledger_of
from honed.assemble.loop import (
    build_loop,
    build_rollouts,
    build_runtime,
    evaluate_version,
    given_lessons,
    release_version,
    rollback_version,
    verify_version,
)
from honed.assemble.model import merge_version, open_store, prepared, price_book, renderer_of

__all__ = [
    "Config",
    "build_loop",
    "build_rollouts",
    "build_runtime",
    "check",
    "evaluate_version",
    "given_lessons",
    "ledger_of",
    "load_config",
    "merge_version",
    "open_store",
    "prepared",
    "price_book",
    "recipe",
    "release_version",
    "renderer_of",
    "rollback_version",
    "serve_gateway",
    "verify_version",
]
