"""The demo's figures, gathered from a small store made by hand: what each number is taken from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import configs, env, figures, results, world

from honed.assemble import load_config, open_store
from honed.store import Store
from honed.types import (
    Entry,
    Feedback,
    Message,
    Release,
    Sampling,
    Span,
    SuiteResult,
    Trace,
    Turn,
    Usage,
    Verdict,
    Version,
)

LINE = "support"
SERVING = {"before": 1, "after": 1, "repaired": 2, "forced": 3, "restored": 2}


def suite(name: str, role: Any, baseline: float, candidate: float, **more: Any) -> SuiteResult:
    gain = candidate - baseline
    return SuiteResult(
        suite=name, role=role, gain=gain, low=gain - 0.1, high=gain + 0.1, baseline=baseline, candidate=candidate,
        num_tasks=64, num_clusters=64, p_value=0.001, margin=0.15 if role == "guard" else 0.0, passed=gain > 0, **more,
    )  # fmt: skip


def verdict(number: int, decision: Any, *suites: SuiteResult) -> Verdict:
    name = f"verdict_{number}"
    baseline = f"{LINE}@{min(number - 1, 2)}"
    return Verdict(id=name, version=f"{LINE}@{number}", baseline=baseline, decision=decision, suites=suites, at=number)


VERDICTS = (
    verdict(1, "promote", suite("support-changed-before+support-unchanged-before", "target", 0.0, 0.97)),
    verdict(
        2, "promote", suite("support-changed", "target", 0.25, 0.75), suite("support-unchanged", "guard", 0.85, 0.9)
    ),
    verdict(3, "reject", suite("support-changed", "target", 0.75, 0.0)),
)


def conversation(id: str, number: int, seed: int, at: float) -> Trace:
    """A served request: 100 tokens read, 20 sampled."""
    found = world.case(seed, "after")
    turn = Turn(
        id=f"turn_{id}", trace=id, added=world.prompt(found), reply=Message(role="assistant", content=f"said by {id}"),
        versions=(Span(version=f"{LINE}@{number}", count=20),), finish="stop", at=at, model=LINE,
        sampling=Sampling(), fidelity="text",
        usage=Usage(prompt=100, cached=0, output=20, seconds=0.5),
    )  # fmt: skip
    tags = {"case": str(seed), "era": "after"}
    return Trace(id=id, origin="production", line=LINE, turns=(turn,), tags=tags, at=at)


def row(part: str, seed: int, success: float, turn: str = "") -> dict[str, Any]:
    kind = world.case(seed, "after").kind
    return {
        "part": part,
        "seed": seed,
        "kind": kind,
        "changed": kind in world.CHANGED,
        "success": success,
        "turn": turn,
        "version": f"{LINE}@{SERVING[part]}",
    }


def seeds(changed: bool, num: int) -> list[int]:
    found = [seed for seed in range(1000, 1400) if (world.case(seed, "after").kind in world.CHANGED) is changed]
    return found[:num]


@pytest.fixture
def story(tmp_path: Path) -> SimpleNamespace:
    """Three turns; changed kinds served at 3 of 4, 1 of 4, 4 of 4, 0 of 4, 2 of 2 in the five parts."""
    paths = configs.write(tmp_path, 1, threads=1)
    requests = []
    for part, successes in {
        "before": (1, 1, 1, 0), "after": (1, 0, 0, 0), "repaired": (1, 1, 1, 1), "forced": (0, 0, 0, 0),
        "restored": (1, 1),
    }.items():  # fmt: skip
        requests += [
            row(part, seed, s, "turn_trace_served") for seed, s in zip(seeds(True, 4), successes, strict=False)
        ]
    measured = [
        {
            "after": after,
            "suite": env.TARGET,
            "num_tasks": 24,
            "success": value,
            "low": value - 0.2,
            "high": value + 0.2,
        }
        for after, value in (("nothing", 0.25), ("sft", 0.5), ("practice", 0.75))
    ]
    turns = {
        name: {"version": v.version, "verdict": {"id": v.id}, "ended": v.decision, "rewards": [0.4, 0.6]}
        for name, v in zip(("teach", "repair", "broken"), VERDICTS, strict=True)
    }
    turns["repair"]["measured"] = measured
    config = load_config(paths["repair"])
    with open_store(config) as store:
        fill(store)
    return SimpleNamespace(seed=1, configs=paths, requests=requests, marks=[], events=[], turns=turns)


def fill(store: Store) -> None:
    """Versions, verdicts, releases; a failure of version 1 that taught version 2, and its kind served well since."""
    seed = seeds(True, 1)[0]
    failed, served = conversation("trace_failed", 1, seed, 10.0), conversation("trace_served", 2, seed, 50.0)
    good = conversation("trace_good", 1, seed + 1, 11.0)
    task = env.task(world.case(seed, "after"), "train", failed.id)
    store.tasks.put([task])
    shown = Trace(id="trace_shown", origin="demonstration", line=LINE, task=task.id, at=20.0)
    for trace in (failed, good, served, shown):
        store.traces.put(trace)
    for trace, value in ((failed, 0.0), (good, 1.0), (served, 1.0)):
        store.feedback.add([Feedback(id=f"fb_{trace.id}", target=trace.id, name="success", value=value, at=trace.at)])
        turn = trace.turns[0]
        store.ledger.add(
            [
                Entry(
                    id=f"e_{trace.id}", activity="generate", device="cpu-core", seconds=0.5, tokens=120, dollars=0.0001,
                    subject=turn.trace, line=LINE, stage="serve", outcome="used", at=trace.at,
                )
            ]
        )  # fmt: skip
    store.ledger.add(
        [
            Entry(
                id="train", activity="train", device="cpu-core", seconds=100.0, tokens=1000, dollars=0.002,
                subject=f"{LINE}@2", line=LINE, stage="learn", outcome="used", at=30.0,
            )
        ]
    )  # fmt: skip
    for number, each in enumerate(VERDICTS, 1):
        version = Version(line=LINE, number=number, parent=min(number - 1, 2), kind="adapter", at=float(number))
        store.versions.put(version, {"demonstration": [shown.id]} if number == 2 else {})
        store.verdicts.put(each)
    for at, number in ((5.0, 1), (40.0, 2)):
        store.releases.put(
            Release(
                id=f"release_{number}", line=LINE, version=f"{LINE}@{number}", kind="promote",
                verdict=f"verdict_{number}", at=at,
            )
        )  # fmt: skip


@pytest.fixture
def demo(story: SimpleNamespace) -> dict[str, Any]:
    return figures.gather(story, {"cores": 2}, 600.0, 24)  # type: ignore[arg-type]


def test_live_success_is_counted_by_part(demo: dict[str, Any]) -> None:
    h = demo["headline"]
    assert (h["before"], h["decayed"], h["repaired"]) == (0.75, 0.25, 1.0)


def test_a_versions_row_holds_its_own_figures(demo: dict[str, Any]) -> None:
    first, second, broken = demo["versions"]
    assert first["changed"].startswith("25 % [")  # as the second's baseline, under the tools as they are now
    assert first["unchanged"].startswith("85 % [")
    assert first["live"] == "75 %, then 25 %"
    assert (second["changed"][:4], second["unchanged"][:4], second["live"]) == ("75 %", "90 %", "100 %")
    assert (broken["changed"][:3], broken["unchanged"], broken["live"]) == ("0 %", "not run", "0 %")
    assert first["tokens_per_success"] == "240"  # two requests of 120 tokens for one success
    assert second["tokens_per_success"] == "120"
    assert second["intelligence_per_dollar"].startswith("16000 [")  # 0.5 x 64 tasks / 0.002 dollars


def test_what_each_phase_added_comes_from_the_same_dev_tasks(demo: dict[str, Any]) -> None:
    assert [(stage["tasks"], stage["success"]) for stage in demo["stages"]] == [
        (24, "25 % [5 %, 45 %]"),
        (24, "50 % [30 %, 70 %]"),
        (24, "75 % [55 %, 95 %]"),
    ]


def test_the_criteria_are_the_gates_own_figures(demo: dict[str, Any]) -> None:
    c = demo["criteria"]
    assert c["gain"]["points"] == pytest.approx(50.0)
    assert c["gain"]["low"] == pytest.approx(40.0)
    assert (c["gain_met"], c["guard_met"], c["minutes_met"], c["minutes"]) == (True, True, True, 10.0)


def test_the_lineage_begins_with_a_failure(demo: dict[str, Any], story: SimpleNamespace) -> None:
    assert "trace_failed" in demo["lineage"][0]["title"]
    assert "said by trace_failed" in demo["lineage"][0]["text"]
    assert demo["rollback"] == "Nothing was taken back."


def test_figures_are_json_and_have_a_summary(demo: dict[str, Any]) -> None:
    assert json.loads(json.dumps(demo)) == demo
    said = figures.summary(demo)
    for text in ("support@3", "75 % before, 25 % after the tools changed, 100 %", "+50 points [+40, +60]", "240"):
        assert text in said


def test_several_runs_make_a_table(demo: dict[str, Any]) -> None:
    taken_back = {**demo, "rollback": "live success of support@3 was 0% over its first 6 outcomes, against 83%"}
    title, _, first, second = results.table([demo, {**taken_back, "seed": 2}]).splitlines()
    assert title.startswith("| seed | live, changed kinds")
    assert first.startswith("| 1 | 75 %, 25 %, 100 % |")
    assert "| +50.0 [+40.0, +60.0] | +5.0 (at worst -5.0, tolerated -15) | 25 %, 50 %, 75 % |" in second
    assert second.endswith("| 6 outcomes | 10.0 |")
