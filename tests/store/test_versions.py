import pytest

from honed.errors import NotFound, Refused
from honed.store import Store
from honed.types import SuiteResult, Verdict, Version

from .nouns import captured, task, trace


def version(number: int, **fields: object) -> Version:
    return Version(line="support", number=number, digest=f"d{number}", **fields)  # type: ignore[arg-type]


def test_versions_are_numbered_along_their_line(store: Store) -> None:
    assert store.versions.next_number("support") == 1
    store.versions.put(version(1, parent=0))
    store.versions.put(Version(line="other", number=7))
    assert store.versions.next_number("support") == 2
    assert store.versions.list("support") == [version(1, parent=0)]
    assert [one.id for one in store.versions.list()] == ["other@7", "support@1"]


def test_find_and_get(store: Store) -> None:
    store.versions.put(version(3))
    assert store.versions.find("support@3") == store.versions.get("support", 3) == version(3)
    assert store.versions.find("support@0") == Version(line="support", number=0), "the base needs no row"
    for wrong in ("support@4", "support", "support@", "@3", "support@3.5", "support@-1"):
        with pytest.raises(NotFound):
            store.versions.find(wrong)


def test_a_number_is_taken_once(store: Store) -> None:
    store.versions.put(version(1), {"practice": ["a"]})
    store.versions.put(version(1), {"practice": ["a"]})
    with pytest.raises(Refused, match="support@1 exists"):
        store.versions.put(version(1, recipe="another"))


def test_lineage_goes_down_to_the_base(store: Store) -> None:
    for number in (1, 2, 3):
        store.versions.put(version(number, parent=number - 1 if number != 3 else 1))
    assert [one.id for one in store.versions.lineage("support@3")] == ["support@3", "support@1", "support@0"]


def test_sources_lead_to_the_production_failures(store: Store) -> None:
    store.traces.capture([captured("t1", "complaint"), captured("t2", "thanks")], "log", 1)
    store.tasks.put([task("from-complaint", source="complaint"), task("made", source="generator:orders")])
    store.traces.put(trace("attempt", task="from-complaint"))
    store.traces.put(trace("exercise", task="made"))
    store.traces.put(trace("shown", task="from-complaint", origin="demonstration"))
    practice = ["attempt", "exercise", "gone"]
    store.versions.put(version(1), {"demonstration": ["shown"], "replay": ["thanks"], "practice": practice})
    store.versions.put(version(2), {"practice": ["attempt"]})
    assert store.versions.sources("support@1") == [
        ("attempt", "from-complaint", "complaint"),
        ("exercise", "made", None),
        ("gone", None, None),
        ("shown", "from-complaint", "complaint"),
        ("thanks", None, None),  # it went well: rehearsed, and no failure that taught
    ]
    assert store.versions.sources("support@1", role="replay") == [("thanks", None, None)]
    assert store.versions.sources("support@1", role="demonstration") == [("shown", "from-complaint", "complaint")]
    assert [id for id, _, _ in store.versions.sources("support@1", role="practice")] == practice
    assert store.versions.sources("support@9") == []
    assert store.versions.taught_by("complaint") == ["support@1", "support@2"]
    assert store.versions.taught_by("thanks") == ["support@1"]
    assert store.versions.taught_by("nothing") == []


def test_a_trace_has_the_first_role_that_is_given(store: Store) -> None:
    store.versions.put(version(1), {"demonstration": ["a"], "practice": ["a", "b"]})
    assert [id for id, _, _ in store.versions.sources("support@1", role="demonstration")] == ["a"]
    assert [id for id, _, _ in store.versions.sources("support@1", role="practice")] == ["b"]


def test_verdicts(store: Store) -> None:
    suite = SuiteResult(
        suite="orders",
        role="target",
        gain=0.5,
        low=0.25,
        high=0.75,
        baseline=0.25,
        candidate=0.75,
        num_tasks=64,
        num_clusters=32,
        p_value=0.001,
    )
    good = Verdict(id="v1", version="support@1", baseline="support@0", decision="promote", suites=(suite,), at=1.0)
    bad = Verdict(id="v2", version="support@2", baseline="support@1", decision="reject", reasons=("worse",), at=2.0)
    for verdict in (bad, good, good):
        store.verdicts.put(verdict)
    assert store.verdicts.get("v1") == good
    assert store.verdicts.list() == [good, bad]
    assert store.verdicts.list("support@2") == [bad]
    with pytest.raises(NotFound):
        store.verdicts.get("v3")
