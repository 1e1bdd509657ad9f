"""Gathers the figures of a demo run from its store: what demo.json holds and the report shows. Computes no statistics
of its own but rates; intervals come from the gate and the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from honed import codec
from honed.assemble import Config, ledger_of, load_config, open_store
from honed.economics.report import LedgerReport, VersionCost
from honed.economics.success import rate_interval
from honed.store import Store
from honed.types import SuiteResult, Trace, Verdict
from support.plots import percent
from support.world import CHANGED

if TYPE_CHECKING:
    from support.demo import Story

SERVED_IN = {
    "teach": (("before",), ("after",)), "repair": (("repaired", "forced", "restored"),), "broken": (("forced",),)
}  # fmt: skip
"""The parts of the story in which the version of each turn answered, one figure for each group."""


def gather(story: Story, machine: dict[str, Any], seconds: float, window: int) -> dict[str, Any]:
    """Everything as one JSON-able dict."""
    config = load_config(story.configs["repair"])
    with open_store(config) as records:
        ledger = ledger_of(config, records)
        verdicts = {turn["version"]: records.verdicts.get(turn["verdict"]["id"]) for turn in story.turns.values()}
        return {
            "seed": story.seed,
            "seconds": seconds,
            "machine": machine,
            "window": window,
            "basis": ledger.basis,
            "headline": _headline(story.requests),
            "requests": story.requests,
            "marks": story.marks,
            "criteria": _criteria(story, verdicts, seconds),
            "versions": _versions(story, verdicts, ledger),
            "stages": _stages(story),
            "rewards": _rewards(story),
            "verdicts": [_verdict(verdict) for verdict in verdicts.values()],
            "rollback": _rollback(config, records),
            "spend": _spend(ledger),
            "lineage": _lineage(story, records),
            "ledger": codec.from_json(codec.to_json(ledger), dict),
            "turns": story.turns,
        }


def summary(demo: dict[str, Any]) -> str:
    """What the terminal shows in the end."""
    h, c = demo["headline"], demo["criteria"]
    live = (
        f"Live success on the changed kinds: {percent(h['before'])} before, {percent(h['decayed'])} after the tools "
        f"changed, {percent(h['repaired'])} after one turn of the loop. The others: {percent(h['others_before'])}, "
        f"{percent(h['others_decayed'])}, {percent(h['others_repaired'])}."
    )
    held_out = (
        f"Held-out: {c['gain']['points']:+.0f} points [{c['gain']['low']:+.0f}, {c['gain']['high']:+.0f}] on the "
        f"changed kinds, {c['guard']['points']:+.0f} on the others (at worst {c['guard']['low']:+.0f}; "
        f"{-c['guard']['margin']:.0f} is tolerated)."
    )
    stages = "; ".join(f"{row['name']} {row['success']}" for row in demo["stages"])
    lineage = "\n".join(f"  {step['title']}" for step in demo["lineage"])
    parts = [_table(demo["versions"]), "", live, held_out, f"On dev tasks: {stages}.", demo["rollback"]]
    return "\n".join([*parts, "", "One repaired request:", lineage])


def _table(versions: list[dict[str, Any]]) -> str:
    titles = {
        "id": "version", "changed": "changed kinds", "unchanged": "other kinds", "live": "live",
        "tokens_per_success": "tokens/success", "dollars_per_success": "$/success",
        "intelligence_per_dollar": "successes per $ of training", "decision": "verdict",
    }  # fmt: skip
    rows = [titles, *versions]
    widths = {key: max(len(row[key]) for row in rows) for key in titles}
    return "\n".join("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip() for row in rows)


def _headline(requests: list[dict[str, Any]]) -> dict[str, float]:
    def rate(part: str, changed: bool) -> float:
        mine = [row["success"] for row in requests if row["part"] == part and row["changed"] is changed]
        return sum(mine) / len(mine) if mine else 0.0

    parts = {"before": "before", "decayed": "after", "repaired": "repaired"}
    found = {name: rate(part, True) for name, part in parts.items()}
    return {**found, **{f"others_{name}": rate(part, False) for name, part in parts.items()}}


def _versions(story: Story, verdicts: dict[str, Verdict], ledger: LedgerReport) -> list[dict[str, Any]]:
    """One row a version: held out and live, and what a success costs. Held-out rates are of the tools as they are now,
    so the first version's are those that it had as the baseline of the second."""
    held_out: dict[tuple[str, str], SuiteResult] = {}
    for verdict in verdicts.values():
        for suite in verdict.suites:
            held_out[verdict.version, suite.suite] = suite
            baseline = msgspec.structs.replace(suite, candidate=suite.baseline)
            held_out.setdefault((verdict.baseline, suite.suite), baseline)
    rows = []
    for turn, name in zip(story.turns, verdicts, strict=True):
        served = next((cost for cost in ledger.successes if cost.version == name), None)
        bought = next((cost for cost in ledger.versions if cost.version == name), None)
        price, tokens = (None, None) if served is None else (served.dollars_per_success, served.tokens_per_success)
        rows.append(
            {
                "id": name,
                "changed": _suite(held_out.get((name, "support-changed"))),
                "unchanged": _suite(held_out.get((name, "support-unchanged"))),
                "live": ", then ".join(_live(story.requests, name, parts) for parts in SERVED_IN[turn]),
                "tokens_per_success": "" if tokens is None else f"{tokens:.0f}",
                "dollars_per_success": "" if price is None else f"${price:.6f}",
                "intelligence_per_dollar": "" if bought is None else _per_dollar(bought),
                "decision": verdicts[name].decision,
            }
        )
    return rows


def _suite(result: SuiteResult | None) -> str:
    if result is None:
        return "not run"
    low, high = rate_interval(result.candidate * result.num_tasks, result.num_tasks)
    return f"{percent(result.candidate)} [{percent(low)}, {percent(high)}]"


def _live(requests: list[dict[str, Any]], version: str, parts: Sequence[str]) -> str:
    mine = [row["success"] for row in requests if row["part"] in parts and row["version"] == version]
    return percent(sum(mine) / len(mine)) if mine else "none"


def _per_dollar(bought: VersionCost) -> str:
    """Held-out successes gained per dollar of post-training, with its interval; or why there is no such figure."""
    if bought.successes_per_dollar is None:
        return bought.note
    low, high = bought.successes_per_dollar_low, bought.successes_per_dollar_high
    return f"{bought.successes_per_dollar:.0f} [{low:.0f}, {high:.0f}]"


def _stages(story: Story) -> list[dict[str, Any]]:
    """Success on the same dev tasks before the repair, after SFT on corrections, and after practice."""
    names = {"nothing": "before", "sft": "after SFT on corrections", "practice": "after practice (GRPO)"}
    return [
        {
            "name": names[row["after"]],
            "tasks": row["num_tasks"],
            "success": f"{percent(row['success'])} [{percent(row['low'])}, {percent(row['high'])}]",
        }
        for row in story.turns["repair"]["measured"]
    ]


def _criteria(story: Story, verdicts: dict[str, Verdict], seconds: float) -> dict[str, Any]:
    """What the story is to show, each with its figure: a gain of 30 points on the changed kinds with an interval above
    0, no fall of the others beyond the margin, a rejected and a taken-back version, and all in 25 minutes."""
    suites = {suite.role: suite for suite in verdicts[story.turns["repair"]["version"]].suites}
    target, guard = suites["target"], suites["guard"]
    return {
        "gain": {"points": 100 * target.gain, "low": 100 * target.low, "high": 100 * target.high},
        "gain_met": target.gain >= 0.3 and target.low > 0,
        "guard": {"points": 100 * guard.gain, "low": 100 * guard.low, "margin": 100 * guard.margin},
        "guard_met": guard.low > -guard.margin,
        "minutes": seconds / 60,
        "minutes_met": seconds <= 25 * 60,
    }


def _rewards(story: Story) -> list[dict[str, Any]]:
    return [{"step": i, "reward": r, "phase": "practice"} for i, r in enumerate(story.turns["repair"]["rewards"], 1)]


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "version": verdict.version,
        "baseline": verdict.baseline,
        "decision": verdict.decision,
        "reasons": list(verdict.reasons),
        "suites": [codec.from_json(codec.to_json(suite), dict) for suite in verdict.suites],
        "note": "",
    }


def _rollback(config: Config, records: Store) -> str:
    reverted = [row for row in records.releases.list(config.model.line) if row.kind == "rollback"]
    return reverted[-1].reason if reverted else "Nothing was taken back."


def _spend(ledger: LedgerReport) -> list[dict[str, Any]]:
    return [
        {
            "activity": f"{row.stage} {row.activity}", "outcome": row.outcome, "seconds": row.seconds,
            "tokens": row.tokens,
            "dollars_value": row.dollars, "dollars": f"${row.dollars:.6f}", "share": f"{100 * row.share:.1f} %",
        }
        for row in ledger.spend
    ]  # fmt: skip


def _lineage(story: Story, records: Store) -> list[dict[str, Any]]:
    """A production failure that taught the repaired version, and a request of its kind served since."""
    name = story.turns["repair"]["version"]
    failures = [source for _, _, source in records.versions.sources(name) if source]
    if not failures:
        return []
    trace, since = _repaired(story, [records.traces.get(id) for id in dict.fromkeys(failures)])
    steps = [
        {"title": f"A customer's request failed: {trace.id}", "text": _said(trace)},
        {"title": f"It became a task and a lesson of {name}, with {len(set(failures)) - 1} others.", "text": ""},
        {
            "title": f"The gate said {story.turns['repair']['ended']} ({story.turns['repair']['verdict']['id']}).",
            "text": "",
        },
    ]
    if since is not None:
        served = records.traces.get(records.traces.turn(since["turn"]).trace)
        steps.append({"title": f"A request of the same kind since then: {served.id}", "text": _said(served)})
    return steps


def _repaired(story: Story, failures: list[Trace]) -> tuple[Trace, dict[str, Any] | None]:
    """A failure under the changed tools, and a request of its kind that was served since; else the first failure."""
    for trace in failures:
        kind = next((row["kind"] for row in story.requests if str(row["seed"]) == trace.tags.get("case")), "")
        for row in story.requests:
            if kind in CHANGED and (row["part"], row["kind"], row["success"]) == ("repaired", kind, 1):
                return trace, row
    return failures[0], None


def _said(trace: Trace) -> str:
    lines = []
    for turn in trace.turns:
        for message in (*turn.added, turn.reply):
            if message.role != "system":
                calls = "".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
                lines.append(f"{message.role}: {message.content or ''}{calls}")
    return "\n".join(lines)
