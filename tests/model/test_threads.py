"""Work on a thread of its own."""

import threading

import pytest

from honed.model.threads import apart


def test_it_returns_what_the_work_does_and_ends() -> None:
    ran: list[threading.Thread] = []

    @apart
    def work(one: int, *, other: int) -> int:
        ran.append(threading.current_thread())
        return one + other

    assert work(1, other=2) == 3
    assert ran[0] is not threading.current_thread()
    assert not ran[0].is_alive()


def test_its_error_reaches_the_caller() -> None:
    @apart
    def work() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        work()
