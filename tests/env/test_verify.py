import asyncio
import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from honed import plugins
from honed.env.verify import VerifierHost
from honed.errors import ConfigError, VerifierError
from honed.protocols import Outcome
from honed.types import Message, Score, Task, Trace

TASK = Task(
    id="task_1",
    prompt=(Message(role="user", content="hello"),),
    environment="",
    verifier="",
    split="train",
    split_key="k",
)
TRACE = Trace(id="trace_1", origin="rollout", at=0.0)


async def ask(host: VerifierHost, name: str, timeout_seconds: float = 30.0, sandbox: Any = None, **state: Any) -> Score:
    verifier = name if ":" in name or name == "registered" else f"env.judges:{name}"
    return await host.score(verifier, TASK, TRACE, Outcome(state=state), sandbox, timeout_seconds=timeout_seconds)


@pytest.fixture
async def host() -> Any:
    host = VerifierHost()
    yield host
    await host.close()


async def kind_of(host: VerifierHost, name: str, timeout_seconds: float = 30.0, **state: Any) -> str:
    with pytest.raises(VerifierError) as caught:
        await ask(host, name, timeout_seconds, **state)
    assert name in str(caught.value)
    return caught.value.kind


async def test_a_sync_verifier_sees_the_attempt_and_its_score_comes_back(host: VerifierHost) -> None:
    score = await ask(host, "scores", value=0.5)
    assert score == Score(value=0.5, parts={"half": 0.5}, verifier="env.judges:scores", evidence="task_1 trace_1 None")


async def test_a_score_keeps_the_name_that_it_gave_itself(host: VerifierHost) -> None:
    assert (await ask(host, "names_itself")).verifier == "mine"


async def test_a_bool_is_a_number(host: VerifierHost) -> None:
    score = await ask(host, "true")
    assert (score.value, score.parts) == (1.0, {"a": 0.0})
    assert type(score.value) is float


@pytest.mark.parametrize(
    "name", ["raises", "none", "none_inside", "number", "async_raises", "async_none", "async_exits"]
)
async def test_what_is_raised_or_is_no_score_is_an_error_and_no_zero(host: VerifierHost, name: str) -> None:
    assert await kind_of(host, name) == "raised"


async def test_what_was_raised_is_in_the_message(host: VerifierHost) -> None:
    with pytest.raises(VerifierError, match="no such order"):
        await ask(host, "raises")


@pytest.mark.parametrize("name", ["nan", "infinite_part", "async_nan"])
async def test_what_is_not_finite_is_refused(host: VerifierHost, name: str) -> None:
    assert await kind_of(host, name) == "not_finite"


@pytest.mark.parametrize("name", ["sleeps", "backtracks", "async_sleeps", "async_stubborn"])
async def test_what_never_ends_is_ended(host: VerifierHost, name: str) -> None:
    assert await kind_of(host, name, timeout_seconds=0.2) == "timeout"


@pytest.mark.parametrize("name", ["exits", "leaves"])
async def test_what_ends_its_process_has_died(host: VerifierHost, name: str) -> None:
    assert await kind_of(host, name) == "died"


async def test_prints_do_not_break_the_channel(host: VerifierHost) -> None:
    assert (await ask(host, "prints")).value == 1.0
    assert (await ask(host, "scores", value=0.5)).value == 0.5


async def test_a_child_is_kept_warm_and_replaced_after_a_kill(host: VerifierHost) -> None:
    first, second = await ask(host, "counts"), await ask(host, "counts")
    assert (first.value, second.value) == (1.0, 2.0)
    assert first.evidence == second.evidence
    await kind_of(host, "backtracks", timeout_seconds=0.2)
    third = await ask(host, "counts")
    assert third.value == 1.0
    assert third.evidence != first.evidence
    assert not psutil.pid_exists(int(first.evidence))


async def test_a_child_that_died_while_idle_is_not_blamed_on_the_next(host: VerifierHost) -> None:
    pid = int((await ask(host, "counts")).evidence)
    await ask(host, "dies_later")
    await until(lambda: not psutil.pid_exists(pid))
    await asyncio.sleep(0.05)
    assert (await ask(host, "counts")).value == 1.0


async def test_what_a_verifier_started_is_killed_with_it(host: VerifierHost, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    asked = asyncio.create_task(ask(host, "starts_a_child", 600.0, pid_file=str(file)))
    await until(lambda: file.exists() and file.read_text())
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await gone(int(file.read_text()))


async def test_a_hundred_attempts_cancelled_at_once_leave_no_process() -> None:
    host = VerifierHost(processes=4)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    asked = [asyncio.create_task(ask(host, "sleeps", 600.0)) for _ in range(100)]
    await until(lambda: len({c.pid for c in psutil.Process().children(recursive=True)} - before) == 4)
    for task in asked:
        task.cancel()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    assert (await ask(host, "counts")).value == 1.0  # and the next one is served
    await host.close()
    await until(lambda: not {c.pid for c in psutil.Process().children(recursive=True)} - before)


async def test_closing_ends_idle_and_busy_children() -> None:
    host = VerifierHost(processes=2)
    idle = int((await ask(host, "counts")).evidence)
    busy = asyncio.create_task(ask(host, "sleeps", 600.0))
    other = asyncio.create_task(ask(host, "counts"))
    pids = {idle, int((await other).evidence)}
    await host.close()
    with pytest.raises(VerifierError) as caught:
        await busy
    assert caught.value.kind == "died"
    for pid in pids:
        await gone(pid)
    assert not [
        child for child in psutil.Process().children() if "honed.env.verify_worker" in " ".join(child.cmdline())
    ]
    assert await kind_of(host, "counts") == "died"


async def test_children_work_side_by_side_and_no_more_than_allowed() -> None:
    host = VerifierHost(processes=2)
    try:
        scores = await asyncio.gather(*(ask(host, "counts") for _ in range(6)))
        assert len({score.evidence for score in scores}) <= 2
        assert len(scores) == 6
    finally:
        await host.close()


async def test_async_verifiers_run_here_with_the_sandbox(host: VerifierHost) -> None:
    assert await ask(host, "async_scores", sandbox=object()) == Score(
        value=0.25, verifier="env.judges:async_scores", evidence="object"
    )
    assert (await ask(host, "judge")).value == 0.75


async def test_a_registered_name_is_found_in_the_child(host: VerifierHost) -> None:
    plugins.register("verifier", "registered", "env.judges:scores")
    score = await ask(host, "registered", value=1.0)
    assert (score.value, score.verifier) == (1.0, "registered")


async def test_an_unknown_verifier_is_the_users_error(host: VerifierHost) -> None:
    with pytest.raises(ConfigError):
        await ask(host, "nobody_wrote_this")


async def test_an_outcome_that_is_no_json_is_an_error_of_its_own(host: VerifierHost) -> None:
    with pytest.raises(VerifierError, match="JSON-able"):
        await ask(host, "scores", value=2**80)
    assert (await ask(host, "scores", value=1.0)).value == 1.0


async def spent_by(host: VerifierHost, name: str, seconds: float, timeout_seconds: float = 30.0) -> float:
    told: list[float] = []
    question = (f"env.judges:{name}", TASK, TRACE, Outcome(state={"seconds": seconds}), None)
    with contextlib.suppress(VerifierError):
        await host.score(*question, timeout_seconds=timeout_seconds, on_spent=told.append)
    (spent,) = told
    return spent


@pytest.mark.parametrize("name", ["spins", "spins_and_raises", "async_spins"])
async def test_each_verifier_is_charged_its_own_cpu_seconds_however_many_run(name: str) -> None:
    host = VerifierHost(processes=2)
    try:
        spent = await asyncio.gather(*(spent_by(host, name, 0.1) for _ in range(6)))
    finally:
        await host.close()
    # By this process's clock each of six at once would seem to take what all take, or nothing at all.
    assert min(spent) >= 0.1
    assert statistics.median(spent) < 0.2  # a child's first one imports the verifier as well


async def test_what_a_verifier_started_is_charged_to_it(host: VerifierHost) -> None:
    assert await spent_by(host, "spins_in_a_child", 0.2) >= 0.2


async def test_a_verifier_that_was_killed_is_charged_what_it_took(host: VerifierHost) -> None:
    assert await spent_by(host, "spins_on", 0.0, timeout_seconds=0.5) > 0.05


async def until(condition: Callable[[], Any]) -> None:
    """Waits for other processes; pytest's own timeout ends a wait in vain."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def gone(pid: int) -> None:
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
