"""Threads of products: libgomp lets the workers of a team spin between two products only while all teams of a process
fit its cores; each thread that ever made a product keeps a team. A second one costs a wake-up (70 us on two AVX2 cores)
at every product."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def apart(work: Callable[P, R]) -> Callable[P, R]:
    """`work` on a thread of its own, whose team of workers ends with it. Whoever calls it waits, and gets its error."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        found: list[R] = []
        failed: list[BaseException] = []

        def one() -> None:
            try:
                found.append(work(*args, **kwargs))
            except BaseException as error:  # raised below, on the caller's thread
                failed.append(error)

        thread = threading.Thread(target=one, name="honed-apart", daemon=True)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    return run
