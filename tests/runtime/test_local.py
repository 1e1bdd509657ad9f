"""A real learner child over a tiny random model in a Hugging Face directory."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, models
from train.models import VOCABULARY, family, sample, scored, tiny

from honed.engine.settings import EngineSettings
from honed.errors import ConfigError, EngineError, NotFound, Refused
from honed.model.lora import LoraSettings
from honed.protocols import Request
from honed.runtime.local import LocalLearner, LocalRuntime
from honed.runtime.settings import LearnerSettings
from honed.train.settings import TrainSettings
from honed.types import Sample, Sampling, Version

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny(torch.float32).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def runtime(source: str | Path, folder: Path, **options: object) -> LocalRuntime:
    settings = LearnerSettings(
        blobs=str(folder / "blobs"),
        train=TrainSettings(threads=1),
        lora=LoraSettings(rank=4, alpha=8),
        engine=EngineSettings(threads=1, slots=4, capacity=2048, context=128),
        threads=1,
    )
    log_path = folder / "log" / "learner.log"
    return LocalRuntime(str(source), settings, folder=folder / "run", log_path=log_path, **options)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("room")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def child(source: Path, room: Path) -> AsyncIterator[LocalLearner]:
    place = runtime(source, room)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_DISPLAY_ENV", "verbose")  # OpenMP says in the child's log what it was told
        found = await place.learner()
    yield found
    await place.close()


@pytest_asyncio.fixture(loop_scope="module")
async def learner(child: LocalLearner) -> LocalLearner:
    """One child for all tests, its trainer fresh."""
    await child.trainer.restore(None)
    return child


async def sampled(learner: LocalLearner, version: str, *, tokens: int = 8, seed: int = 0) -> tuple[list, list, set]:
    request = Request(id=f"r{seed}", ids=(1, 2, 3), sampling=Sampling(max_tokens=tokens, seed=seed), version=version)
    ids, logprobs, versions = [], [], set()
    async for chunk in learner.engine.submit(request):
        ids += chunk.ids
        logprobs += chunk.logprobs
        versions.add(chunk.version)
    return ids, logprobs, versions


def attempt(ids: list[int], logprobs: list[float], advantage: float) -> Sample:
    tokens = np.array([1, 2, 3, *ids], np.int32)
    mask = np.arange(len(tokens)) >= 3
    return Sample(
        tokens=tokens,
        weights=(mask / len(ids)).astype(np.float32),
        advantages=(mask * advantage).astype(np.float32),
        logprobs=np.array([0, 0, 0, *logprobs], np.float32),
    )


async def test_what_is_trained_is_sampled_after_publishing_and_both_agree_on_it(learner: LocalLearner) -> None:
    """The engine's log-probabilities equal the trainer's, before and after an update, through the same route."""
    trainer, engine = learner.trainer, learner.engine
    await trainer.publish("support@0.0")
    ids, logprobs, versions = await sampled(learner, "support@0.0")
    assert versions == {"support@0.0"}
    first = await trainer.forward_backward([attempt(ids, logprobs, 1.0)], "policy_gradient")
    assert first.metrics["mismatch_max"] < 1e-4
    assert (await trainer.step(1e-2)).skipped == ""
    await trainer.publish("support@0.1")
    ids, logprobs, versions = await sampled(learner, "support@0.1", seed=1)
    assert versions == {"support@0.1"}
    second = await trainer.forward_backward([attempt(ids, logprobs, 1.0)], "policy_gradient")
    assert second.metrics["mismatch_max"] < 1e-4
    base = (await engine.logprobs([1, 2, 3, 4], "")).values
    new = (await engine.logprobs([1, 2, 3, 4], "support@0.1")).values
    assert max(abs(a - b) for a, b in zip(base, new, strict=True)) > 1e-3
    trained = await scored(trainer, [sample([1, 2, 3, 4], 1)])
    assert trained[0][1:] == pytest.approx(new, abs=1e-4)


async def test_a_name_published_again_answers_with_the_new_weights(learner: LocalLearner) -> None:
    await learner.trainer.publish("support@0.1")
    old = (await learner.engine.logprobs([1, 2, 3, 4], "support@0.1")).values
    await learner.trainer.forward_backward(family(), "cross_entropy")
    await learner.trainer.step(1e-2)
    await learner.trainer.publish("support@0.1")
    assert (await learner.engine.logprobs([1, 2, 3, 4], "support@0.1")).values != old


async def test_a_snapshot_serves_as_a_version_and_restores(learner: LocalLearner) -> None:
    await learner.trainer.forward_backward(family(), "cross_entropy")
    await learner.trainer.step(1e-2)
    kept = await learner.trainer.snapshot("versions/support/1")
    base = (await learner.engine.status()).base
    await learner.engine.load(Version(line="support", number=1, uri=kept.uri, digest=kept.digest, base=base))
    served = (await learner.engine.logprobs([1, 2, 3, 4], "support@1")).values
    await learner.trainer.restore(None)
    await learner.trainer.restore(kept)
    trained = await scored(learner.trainer, [sample([1, 2, 3, 4], 1)])
    assert trained[0][1:] == pytest.approx(served, abs=1e-4)
    with pytest.raises(NotFound):
        await sampled(learner, "support@7")


async def test_requests_and_passes_asked_for_at_once_all_end(learner: LocalLearner) -> None:
    await learner.trainer.publish("support@0.0")
    work = [sampled(learner, "support@0.0", tokens=20, seed=seed) for seed in range(8)]
    passes = [learner.trainer.forward_backward(family(), "cross_entropy") for _ in range(3)]
    results = await asyncio.gather(*work, *passes)
    assert all(len(ids) == 20 for ids, _, _ in results[:8])
    assert all(result.trained_tokens == 24 for result in results[8:])


async def test_errors_keep_their_kind_across_the_wire(learner: LocalLearner) -> None:
    bad = msgspec.structs.replace(family()[0], weights=np.zeros(3, np.float32))
    with pytest.raises(Refused, match="weights has shape"):
        await learner.trainer.forward_backward([bad], "cross_entropy")
    plain = msgspec.structs.replace(family()[0], advantages=None)
    with pytest.raises(Refused, match="no advantages"):
        await learner.trainer.forward_backward([plain], "policy_gradient")


async def test_a_killed_child_fails_its_calls_as_retryable_with_its_log(source: Path, tmp_path: Path) -> None:
    place = runtime(source, tmp_path)
    learner = await place.learner()
    os.kill(learner.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"(?s)died with code -9.*learner.ready") as error:
        await learner.trainer.logprobs(family())
    assert error.value.retryable
    with pytest.raises(EngineError, match="died with code -9"):
        await sampled(learner, "")
    await learner.close()
    again = await place.learner()
    assert len(await again.trainer.logprobs(family())) == 6
    await place.close()
    with pytest.raises(ProcessLookupError):
        os.kill(again.pid, 0)


PARENT = """
import asyncio, sys
from pathlib import Path
from honed.runtime.local import LocalRuntime
from honed.runtime.settings import LearnerSettings

async def main():
    folder = Path(sys.argv[2])
    place = LocalRuntime(sys.argv[1], LearnerSettings(threads=1), folder=folder, log_path=folder / "log")
    print((await place.learner()).pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_child_dies_with_a_parent_that_is_killed(source: Path, tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(source), str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    await parent.wait()
    for _ in range(300):
        if not is_alive(child):
            break
        await asyncio.sleep(0.1)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="there is no model"):
        await runtime(tmp_path / "gone", tmp_path).learner()
    assert list((tmp_path / "run").iterdir()) == []


async def test_a_socket_path_that_is_too_long(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a shorter"):
        await runtime(source, tmp_path / ("x" * 100)).learner()


async def test_the_child_is_niced_and_its_socket_is_hidden(learner: LocalLearner, room: Path) -> None:
    assert os.getpriority(os.PRIO_PROCESS, learner.pid) >= 5
    assert list((room / "run").iterdir()) == []
    assert (room / "run").stat().st_mode & 0o777 == 0o700


async def test_the_child_s_threads_soon_sleep_when_they_have_nothing_to_do(learner: LocalLearner, room: Path) -> None:
    assert "GOMP_SPINCOUNT = '20000'" in (room / "log" / "learner.log").read_text()


async def test_a_child_that_is_stopped_is_killed_and_its_calls_fail_as_retryable(tmp_path: Path) -> None:
    settings = LearnerSettings(blobs=str(tmp_path), niceness=0, engine=EngineSettings(stall_seconds=1.6))
    tests = str(Path(__file__).parents[1])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
        place = LocalRuntime(
            "fake", settings, folder=tmp_path / "run", log_path=tmp_path / "log", module="crash.fake_learner"
        )
        learner = await place.learner()
    os.kill(learner.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="died with code -9") as error:
        await learner.trainer.step(1e-3)
    assert error.value.retryable
    await place.close()


async def test_gather_keeps_order_bounds_and_cancels(tmp_path: Path) -> None:
    place, running, most, cancelled = runtime("none", tmp_path), 0, 0, []

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (5 - number))
        running -= 1
        return number

    assert await place.gather([lambda n=n: work(n) for n in range(5)], 2) == [0, 1, 2, 3, 4]
    assert most == 2

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await place.gather([stuck, failing, stuck], 3)
    assert cancelled == [True, True]
