"""From failures to tasks and demonstrations: deduplicated, split by key, checked by a program."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest

from honed import codec
from honed.loop import curate
from honed.loop.curate import CurateSettings, keep_distinct
from honed.loop.demonstrations import demonstrate
from honed.store import Store, open_store
from honed.testing import RENDERER, FakeEngine, fake_task, make_fake_task
from honed.types import Fault, Group, Message, Score, Task, Trace, Version

from .road import LINE, traffic

SETTINGS = CurateSettings()


async def failures(store: Store, num: int = 24) -> list[Trace]:
    """`num` different refunds, all of which failed."""
    engine = FakeEngine({"refund": 0.0})
    return await traffic(
        store, engine, [f"refund case {i} of item {i * 7} now" for i in range(num)], version=f"{LINE}@0", at=1.0
    )


async def test_only_keys_of_the_train_split_are_practised_or_imitated(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    failed = await failures(store)
    found = curate.curate(store, failed, make_fake_task, RENDERER, SETTINGS, line=LINE)
    expected = [t for t in map(make_fake_task, failed) if t is not None and t.split == "train"]
    assert 0 < len(expected) < len(failed)
    assert [task.id for task in found.tasks] == [task.id for task in expected]
    assert {task.split for task in store.tasks.list()} == {"train"}
    assert found.set_aside["its key is held out"] == len(failed) - len(expected)
    sources = {task.source for task in found.tasks}
    assert {shown.tags["source"] for shown in found.demonstrations} <= sources
    assert found.kinds == {"refund": len(failed)}


async def test_curating_twice_changes_nothing(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    failed = await failures(store)
    once = curate.curate(store, failed, make_fake_task, RENDERER, SETTINGS, line=LINE)
    assert curate.curate(store, failed, make_fake_task, RENDERER, SETTINGS, line=LINE) == once
    assert store.traces.count(origin="demonstration") == len(once.demonstrations) > 0


async def test_every_task_has_a_verifier_and_its_source(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    failed = await failures(store)

    def careless(trace: Trace) -> Task | None:
        task = make_fake_task(trace)
        assert task is not None
        return msgspec.structs.replace(task, verifier="" if trace.id.endswith("1") else task.verifier)

    found = curate.curate(store, failed, careless, None, SETTINGS, line=LINE)
    assert all(task.verifier and store.traces.get(task.source) for task in found.tasks)
    assert found.set_aside["no program can check it"] == sum(trace.id.endswith("1") for trace in failed)
    assert found.demonstrations == ()


async def test_a_maker_that_raises_loses_one_conversation_only(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    failed = await failures(store)

    def fragile(trace: Trace) -> Task | None:
        if trace.id.endswith("_3"):
            raise KeyError("order")
        return make_fake_task(trace)

    found = curate.curate(store, failed, fragile, None, SETTINGS, line=LINE)
    assert found.set_aside["no program can check it"] == 1


def test_the_same_words_in_another_dress_are_one_task() -> None:
    aside: Counter[str] = Counter()
    tasks = [fake_task(text, key=text) for text in ("refund order 7 please", "refund  ORDER 7, please!", "refund it")]
    assert keep_distinct(tasks, 0.9, aside) == [tasks[0], tasks[2]]
    assert aside == {"repeats another task": 1}


def test_different_numbers_are_different_tasks() -> None:
    tasks = [fake_task(f"refund order {i} please") for i in range(5)]
    assert keep_distinct(tasks, 0.9, Counter()) == tasks


async def test_nothing_near_a_held_out_task_is_practised_or_imitated(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    failed = await failures(store)
    free = curate.curate(store, failed, make_fake_task, RENDERER, SETTINGS, line=LINE)
    shown = next(trace for trace in free.demonstrations if trace.task in {task.id for task in free.tasks})
    text = store.tasks.get(shown.task or "").prompt[0].content or ""
    store.tasks.put([fake_task(f"{text}!!", split="holdout")])
    found = curate.curate(store, failed, make_fake_task, RENDERER, SETTINGS, line=LINE)
    assert found.set_aside["near a held-out task"] == 1
    assert {task.id for task in free.tasks} - {task.id for task in found.tasks} == {shown.task}
    assert {t.id for t in free.demonstrations} - {t.id for t in found.demonstrations} == {shown.id}


async def test_what_repeats_another_task_is_still_imitated(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    texts = ["refund case 3 of item 21 now", "nothing", "refund case 3, of item 21: now!"]
    assert codec.split_of(texts[0]) == codec.split_of(texts[2]) == "train"
    failed = await traffic(store, FakeEngine({"refund": 0.0}), texts, version=f"{LINE}@0", at=1.0)
    refunds = [failed[0], failed[2]]
    found = curate.curate(store, refunds, make_fake_task, RENDERER, SETTINGS, line=LINE)
    assert (len(found.tasks), found.set_aside) == (1, {"repeats another task": 1})
    assert {trace.tags["source"] for trace in found.demonstrations} == {trace.id for trace in refunds}


async def test_nothing_near_a_held_out_task_is_replayed(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    texts = [f"order case {i} of item {i * 7} now" for i in range(20)]
    await traffic(store, FakeEngine({"order": 1.0}), texts, version=f"{LINE}@0", at=1.0)
    capture, settings = curate.CaptureSettings(), CurateSettings(replay=40)
    free = curate.replay(store, make_fake_task, capture, settings, line=LINE, since=0.0)
    text = free[0].turns[0].added[0].content or ""
    store.tasks.put([fake_task(f"{text}!", split="dev")])
    assert curate.replay(store, make_fake_task, capture, settings, line=LINE, since=0.0) == free[1:]


@pytest.mark.parametrize("role", ["task", "demonstration", "replay"])
async def test_what_was_learned_is_never_held_out_afterwards(tmp_path: Path, role: str) -> None:
    store = open_store(None, tmp_path)
    texts = [f"refund case {i} of item {i * 7} now" for i in range(60)]
    traces = await traffic(store, FakeEngine({"refund": 0.5}), texts, version=f"{LINE}@0", at=1.0)
    settings = CurateSettings(holdout_per_kind=8)
    sample = partial(curate.sample_holdout, store, ["refund"], make_fake_task, settings, line=LINE, since=0.0)
    free = sample()
    assert len(free) == 8
    learned = free[0]
    source = next(trace for trace in traces if trace.turns[0].added == learned.prompt)
    if role == "task":
        store.tasks.put([fake_task(f"{learned.prompt[0].content}!", split="train")])
    elif role == "replay":
        store.versions.put(Version(line=LINE, number=1), {"replay": [source.id]})
    else:
        shown = (Message(role="assistant", content="right"),)
        trace = demonstrate(RENDERER, learned.prompt, (), shown, line=LINE, tags={"source": source.id}, at=1.0)
        store.traces.put(trace)
        store.versions.put(Version(line=LINE, number=1), {"demonstration": [trace.id]})
    assert learned.id not in {task.id for task in sample()}
    assert len(sample()) == 8  # another one takes its place


def test_jaccard_against_hand_computed() -> None:
    one, other = fake_task("refund order 7 for me"), fake_task("refund order 7 for you")
    shared = curate.shingles(one) & curate.shingles(other)
    assert shared == {"refund order 7", "order 7 for"}  # of 3 + 3 - 2 = 4 triples: 0.5
    assert curate.near(curate.shingles(one), [curate.shingles(other)], 0.5)
    assert not curate.near(curate.shingles(one), [curate.shingles(other)], 0.51)


async def test_held_out_tasks_are_random_traffic_whatever_the_outcome(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    texts = [f"refund case {i} of item {i * 7} now" for i in range(60)]
    traces = await traffic(store, FakeEngine({"refund": 0.5}), texts, version=f"{LINE}@0", at=1.0)
    failed = [t for t in traces if t.turns[0].reply.content == "wrong"]
    settings = CurateSettings(holdout_per_kind=8)
    found = curate.curate(store, failed, make_fake_task, None, settings, line=LINE)
    assert len(found.holdout) == 8
    assert {task.split for task in found.holdout} == {"holdout"}
    outcomes = {store.traces.get(task.source).turns[0].reply.content for task in found.holdout}
    assert outcomes == {"right", "wrong"}
    assert not {t.id for t in found.holdout} & {t.id for t in found.tasks}
    again = curate.curate(store, failed, make_fake_task, None, settings, line=LINE)
    assert again.holdout == ()  # the suite is full: sealed tasks are not swapped


async def test_replay_is_what_went_well_and_is_not_held_out(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    texts = [f"order case {i} of item {i * 7} now" for i in range(40)]
    await traffic(store, FakeEngine({"order": 0.5}), texts, version=f"{LINE}@0", at=1.0)
    capture = curate.CaptureSettings()
    found = curate.replay(store, make_fake_task, capture, CurateSettings(replay=6), line=LINE, since=0.0)
    assert len(found) == 6
    assert all(trace.turns[0].reply.content == "right" for trace in found)
    assert all(codec.split_of(trace.turns[0].added[0].content or "") == "train" for trace in found)
    assert curate.replay(store, make_fake_task, capture, CurateSettings(), line=LINE, since=0.0) == []


async def test_every_kind_is_replayed_alike_however_rare_it_is(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    kinds = ["order"] * 30 + ["refund"] * 30 + ["parcel"] * 10
    texts = [f"{kind} case {i} of item {i * 7} now" for i, kind in enumerate(kinds)]
    await traffic(
        store, FakeEngine(dict.fromkeys(("order", "refund", "parcel"), 1.0)), texts, version=f"{LINE}@0", at=1.0
    )
    found = curate.replay(
        store, make_fake_task, curate.CaptureSettings(), CurateSettings(replay=9), line=LINE, since=0.0
    )
    asked = [(trace.turns[0].added[0].content or "").split()[0] for trace in found]
    assert sorted(asked) == ["order"] * 3 + ["parcel"] * 3 + ["refund"] * 3


def test_the_most_unlike_requests_are_chosen_first() -> None:
    asked = [
        (frozenset(words.split()), Trace(id=f"trace_{index}", origin="production", at=0.0))
        for index, words in enumerate(("a b", "a b c", "a b", "x y", "a x"))
    ]
    chosen = [trace.id for trace in curate.spread(asked, 4)]
    # after "a b": "x y" shares nothing; then "a x" (1/3 with both), then "a b c" (2/3) before the repeated "a b"
    assert chosen == ["trace_0", "trace_3", "trace_4", "trace_1"]
    assert len(curate.spread(asked, 9)) == 5
    assert curate.spread([], 3) == []


async def test_conversations_of_which_no_task_is_made_are_not_replayed(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    texts = [f"{kind} case {i} of item {i * 7} now" for i in range(20) for kind in ("order", "fax")]
    await traffic(store, FakeEngine({"order": 1.0, "fax": 1.0}), texts, version=f"{LINE}@0", at=1.0)

    def without_fax(trace: Trace) -> Task | None:
        task = make_fake_task(trace)
        return None if task is None or task.kind == "fax" else task

    settings = CurateSettings(replay=40)
    found = curate.replay(store, without_fax, curate.CaptureSettings(), settings, line=LINE, since=0.0)
    assert {curate.make(make_fake_task, trace, settings).kind for trace in found} == {"order"}  # type: ignore[union-attr]


def group(task: Task, scores: list[float | None]) -> Group:
    """A group with these scores; None is a fault."""
    fault = Fault(boundary="verifier", kind="timeout", message="late")
    traces = tuple(
        Trace(
            id=f"{task.id}.{i}",
            origin="rollout",
            score=None if score is None else Score(value=score),
            fault=fault if score is None else None,
            at=0.0,
        )
        for i, score in enumerate(scores)
    )
    return Group(id=task.id, task=task.id, traces=traces)


def test_a_probe_sets_aside_what_always_or_never_passes_with_the_reason(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    tasks = [fake_task(f"refund {name}", split="train") for name in ("easy", "hard", "mixed", "partly", "broken")]
    store.tasks.put(tasks)
    scores: list[list[float | None]] = [[1, 1, 1], [0, 0, None], [0, 1, 0], [0.2, 0.4, 0.2], [None, None, 0]]
    groups = [group(task, each) for task, each in zip(tasks, scores, strict=True)]
    worth, aside = curate.set_aside(store, groups, SETTINGS, version="m@1.4")
    assert aside == {"always passes": 1, "never passes": 1}
    assert worth == [tasks[2].id, tasks[3].id, tasks[4].id]
    assert [store.tasks.state(task.id) for task in tasks] == ["always", "never", "ready", "ready", "ready"]
    assert store.tasks.reason(tasks[1].id) == "0 of 2 attempts passed with m@1.4"


async def test_what_was_set_aside_is_ready_again_when_it_fails_in_production(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    failed = await failures(store)
    task = curate.curate(store, failed, make_fake_task, None, SETTINGS, line=LINE).tasks[0]
    store.tasks.set_state(task.id, "never", "0 of 4")
    curate.curate(store, failed, make_fake_task, None, SETTINGS, line=LINE)
    assert store.tasks.state(task.id) == "ready"
