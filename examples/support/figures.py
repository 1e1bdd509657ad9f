"""Gathers the figures of a demo run from its store: what demo.json holds and the report shows. Computes no statistics
of its own but rates; intervals come from the gate and the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from honed import codec
from honed.assemble import Config, ledger_of, load_config, open_store
from honed.economics.report import LedgerReport
from honed.economics.success import rate_interval
from honed.store import Store
from honed.types import SuiteResult, Trace, Verdict

if TYPE_CHECKING:
    from support.demo import Story


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
            "versions": [_version(name, verdicts, ledger) for name in verdicts],
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
    h = demo["headline"]
    head = f"{'version':<12}{'held-out changed':>26}{'held-out unchanged':>26}{'live':>8}{'$ a success':>14}  verdict"
    rows = [
        f"{v['id']:<12}{v['changed']:>26}{v['unchanged']:>26}{v['live']:>8}{v['dollars_per_success']:>14}"
        f"  {v['decision']}"
        for v in demo["versions"]
    ]
    story = (
        f"Live success on the changed kinds: {_percent(h['before'])} before, {_percent(h['decayed'])} after the tools "
        f"changed, {_percent(h['repaired'])} after one turn of the loop. The others: {_percent(h['others_before'])}, "
        f"{_percent(h['others_decayed'])}, {_percent(h['others_repaired'])}."
    )
    lineage = "\n".join(f"  {step['title']}" for step in demo["lineage"])
    return "\n".join([head, *rows, "", story, demo["rollback"], "", "One repaired request:", lineage])


def _headline(requests: list[dict[str, Any]]) -> dict[str, float]:
    def rate(part: str, changed: bool) -> float:
        mine = [row["success"] for row in requests if row["part"] == part and row["changed"] is changed]
        return sum(mine) / len(mine) if mine else 0.0

    parts = {"before": "before", "decayed": "after", "repaired": "repaired"}
    found = {name: rate(part, True) for name, part in parts.items()}
    return {**found, **{f"others_{name}": rate(part, False) for name, part in parts.items()}}


def _version(name: str, verdicts: dict[str, Verdict], ledger: LedgerReport) -> dict[str, Any]:
    verdict = verdicts[name]
    suites = {suite.suite: suite for suite in verdict.suites}
    served = next((cost for cost in ledger.successes if cost.version == name), None)
    bought = next((cost for cost in ledger.versions if cost.version == name), None)
    per_dollar = "" if bought is None or bought.successes_per_dollar is None else (
        f"{bought.successes_per_dollar:.0f} "
        f"[{bought.successes_per_dollar_low:.0f}, {bought.successes_per_dollar_high:.0f}]"
    )  # fmt: skip
    price = None if served is None else served.dollars_per_success
    tokens = sum(row.tokens for row in ledger.tokens if row.stage == "serve")
    successes = sum(cost.num_successes for cost in ledger.successes)
    return {
        "id": name,
        "changed": _suite(suites.get("support-changed")),
        "unchanged": _suite(suites.get("support-unchanged")),
        "live": "" if served is None or served.success_rate is None else _percent(served.success_rate),
        "tokens_per_success": f"{tokens / successes:.0f} (all)" if successes else "",
        "dollars_per_success": "" if price is None else f"${price:.6f}",
        "intelligence_per_dollar": per_dollar or (bought.note if bought is not None else ""),
        "decision": verdict.decision,
    }  # fmt: skip


def _suite(result: SuiteResult | None) -> str:
    if result is None:
        return ""
    low, high = rate_interval(result.candidate * result.num_tasks, result.num_tasks)
    return f"{_percent(result.candidate)} [{_percent(low)}, {_percent(high)}]"


def _stages(story: Story) -> list[dict[str, Any]]:
    """Success on the tasks that the repair practised: live, after SFT on corrections (the probe), at the last step."""
    decayed = [row["success"] for row in story.requests if row["part"] == "after" and row["changed"]]
    rows = [{"name": "live, before the turn", "tasks": len(decayed), "success": _percent(sum(decayed) / len(decayed))}]
    probe = [event["scores"] for event in story.events if event.get("event") == "learn.group" and event["step"] == 0]
    if probe:
        flat = [score for scores in probe for score in scores]
        rows.append(
            {"name": "after SFT on corrections", "tasks": len(probe), "success": _percent(sum(flat) / len(flat))}
        )
    rewards = story.turns["repair"]["rewards"]
    if rewards:
        rows.append({"name": "reward in the last step of practice", "tasks": "", "success": _percent(rewards[-1])})
    return rows


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
    trace = records.traces.get(failures[0])
    kind = next((row["kind"] for row in story.requests if str(row["seed"]) == trace.tags.get("case")), "")
    since = next((r for r in story.requests if r["part"] == "repaired" and r["kind"] == kind and r["success"]), None)
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


def _said(trace: Trace) -> str:
    lines = []
    for turn in trace.turns:
        for message in (*turn.added, turn.reply):
            if message.role != "system":
                calls = "".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
                lines.append(f"{message.role}: {message.content or ''}{calls}")
    return "\n".join(lines)


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
