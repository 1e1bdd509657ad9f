"""The ledger, joined from the store: spend, cost per token and per success, intelligence per dollar of versions.

Serving is charged the CPU seconds that it used. The learner is charged its busy seconds and, as idle, the rest of the
cores that it reserved (train.threads, or engine.threads where those are more) for as long as it was up, less what
serving used of the machine meanwhile: so no core-second is billed twice.
"""

from __future__ import annotations

from honed.assemble.config import Config
from honed.assemble.model import price_book
from honed.economics.meter import Meter, turn_entry
from honed.economics.report import LedgerReport, VersionCost, ledger_report, loop_entries, version_cost
from honed.economics.success import SuccessCost, served_requests, served_tokens, success_cost
from honed.store import Store
from honed.types import Entry, Release, Verdict


def ledger_of(config: Config, records: Store) -> LedgerReport:
    """The whole ledger of the config's line."""
    line = config.model.line
    owed = [entry for entry in unpaid(config, records) if entry.dollars is not None]
    entries = [*records.ledger.list(line=line, limit=None), *owed]
    served = _served(config, records, entries)
    return ledger_report(
        entries, price_book(config), successes=list(served.values()), versions=_versions(records, line, entries, served)
    )


def unpaid(config: Config, records: Store) -> list[Entry]:
    """The entries of stored production turns that have none: a gateway that is killed takes its last second's along.
    They bear their turns' names, so adding them to the ledger twice, or after the gateway did, changes nothing."""
    meter = Meter(price_book(config), line=config.model.line, stage="serve")
    for turn in records.ledger.unpaid(config.model.line, turn_entry("")):
        meter.charge_turn(turn)
    return meter.drain()


def _served(config: Config, records: Store, entries: list[Entry]) -> dict[str, SuccessCost]:
    """What a success cost while each version served."""
    line, metric = config.model.line, config.watch.metric
    success = {trace: float(value) for trace, _, value, _ in records.feedback.live(line, name=metric)}
    traces = records.traces.list(origin="production", line=line, limit=None)
    by_version = served_requests(traces, entries, success)
    tokens = served_tokens(traces, entries)
    return {
        version: success_cost(requests, version, tokens=tokens.get(version))
        for version, requests in sorted(by_version.items())
    }


def _versions(records: Store, line: str, entries: list[Entry], served: dict[str, SuccessCost]) -> list[VersionCost]:
    """Intelligence per dollar of every version that a gate promoted, each against the turns since the one before."""
    costs: list[VersionCost] = []
    previous_at = 0.0
    verdicts = {verdict.id: verdict for verdict in records.verdicts.list()}
    for release in records.releases.list(line):
        verdict = verdicts.get(release.verdict or "")
        if release.kind != "promote" or verdict is None:
            continue
        costs.append(_cost(release, verdict, loop_entries(entries, release.at, previous_at, line), served))
        previous_at = release.at
    return costs


def _cost(release: Release, verdict: Verdict, turn: list[Entry], served: dict[str, SuccessCost]) -> VersionCost:
    target = next(suite for suite in verdict.suites if suite.role == "target")
    return version_cost(
        release.version,
        verdict.baseline,
        target,
        turn,
        before=served.get(verdict.baseline),
        after=served.get(release.version),
    )
