"""`honed ledger`: where the money went, and what it bought."""

from __future__ import annotations

import typer

from honed.assemble import ledger_of
from honed.cli import output
from honed.economics.report import LedgerReport, VersionCost
from honed.economics.success import SuccessCost


def ledger(config: output.ConfigOption = None, json: output.JsonOption = False) -> None:
    """Dollars by activity and outcome, per million tokens, per verified success, and intelligence per dollar."""
    found = ledger_of(output.settings(config), output.store(config))
    if json:
        output.show_json(found)
        return
    typer.echo(f"prices: {found.basis}")
    for device, basis in found.bases.items():
        typer.echo(f"  {device}: {basis}")
    typer.echo(f"spent {output.dollars(found.dollars)}, of it waste {output.dollars(found.waste_dollars)}")
    if found.num_unpriced:
        missing = output.num(found.num_unpriced, "entry without a price", "entries without a price")
        typer.echo(f"  {missing}: the sums are too small by what they cost")
    _show_spend(found)
    for cost in found.tokens:
        full, busy = output.dollars(cost.full_per_million), output.dollars(cost.busy_per_million)
        price = f", {full} per million ({busy} while busy)" if cost.tokens else " to divide the cost by"
        typer.echo(f"{cost.stage}: {output.num(cost.tokens, 'generated token')}{price}")
    for success in found.successes:
        typer.echo(_success(success))
    for version in found.versions:
        typer.echo(_version(version))


def _show_spend(found: LedgerReport) -> None:
    rows = [
        (
            r.stage,
            r.activity,
            r.outcome,
            f"{r.seconds:.1f}",
            r.tokens,
            output.dollars(r.dollars),
            output.percent(r.share),
        )
        for r in found.spend
    ]
    columns = ("stage", "activity", "outcome", "busy seconds", "tokens", "cost", "share")
    output.show_table(columns, rows, empty="Nothing was spent yet.")


def _success(cost: SuccessCost) -> str:
    requests = output.num(cost.num_requests, "request")
    if cost.dollars_per_success is None:
        rate = (
            "nobody looked at success" if cost.success_rate is None else f"success {output.percent(cost.success_rate)}"
        )
        return f"{cost.version}: {requests}, {rate}, no price of a success ({cost.note})"
    interval = (
        f" [{output.dollars(cost.low)}, {output.dollars(cost.high)}]" if cost.low is not None else f" ({cost.note})"
    )
    return (
        f"{cost.version}: {requests}, success {output.percent(cost.success_rate)}, "
        f"{output.dollars(cost.dollars_per_success)} per verified success{interval}"
    )


def _version(cost: VersionCost) -> str:
    gain = f"{100 * cost.gain:+.1f} points [{100 * cost.low:+.1f}, {100 * cost.high:+.1f}]"
    lines = [
        f"{cost.version}: held-out gain over {cost.parent} {gain} for {output.dollars(cost.dollars)} ({cost.basis})"
    ]
    if cost.successes_per_dollar is None:
        lines.append(f"  gained per dollar of post-training: {cost.note}")
    else:
        low, high = cost.successes_per_dollar_low, cost.successes_per_dollar_high
        lines.append(
            f"  gained per dollar of post-training: {cost.successes_per_dollar:.3g} of {cost.num_tasks} held-out "
            f"successes [{low:.3g}, {high:.3g}] (95 %), {cost.points_per_dollar:.3g} points {cost.note}".rstrip()
        )
    for served in (cost.served_before, cost.served_after):
        if served is not None:
            lines.append(f"  served by {served.version}: {_served(served)}")
    return "\n".join(lines)


def _served(cost: SuccessCost) -> str:
    if cost.successes_per_dollar is None:
        said = f"verified successes per dollar unknown ({cost.note})"
    elif cost.low and cost.high:
        bounds = f"[{1 / cost.high:.4g}, {1 / cost.low:.4g}] (95 %)"
        said = f"{cost.successes_per_dollar:.4g} verified successes per dollar {bounds}"
    else:
        said = f"{cost.successes_per_dollar:.4g} verified successes per dollar ({cost.note})"
    tokens = "no tokens known" if cost.tokens_per_success is None else f"{cost.tokens_per_success:.0f} tokens"
    return f"{said}, {tokens} per success"
