"""Prints the table of docs/results.md from the demo.json files of several runs: `python -m support.results A B C`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.plots import percent

TITLES = (
    "seed", "live, changed kinds: before, decayed, repaired", "live, other kinds", "held-out gain, changed kinds",
    "held-out change, other kinds", "dev: before, after SFT, after practice", "taken back after", "minutes",
)  # fmt: skip


def table(demos: list[dict[str, Any]]) -> str:
    """One row a run, in Markdown."""
    rows = [TITLES, ("---",) * len(TITLES), *(_row(demo) for demo in demos)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(demo: dict[str, Any]) -> tuple[str, ...]:
    head, criteria = demo["headline"], demo["criteria"]
    gain, guard = criteria["gain"], criteria["guard"]
    live = (head[name] for name in ("before", "decayed", "repaired"))
    others = (head[f"others_{name}"] for name in ("before", "decayed", "repaired"))
    return (
        str(demo["seed"]),
        _percents(live),
        _percents(others),
        f"{gain['points']:+.1f} [{gain['low']:+.1f}, {gain['high']:+.1f}]",
        f"{guard['points']:+.1f} (at worst {guard['low']:+.1f}, tolerated {-guard['margin']:.0f})",
        _percents(row["success"] for row in demo["turns"]["repair"]["measured"]),
        demo["rollback"].partition(" over its first ")[2].partition(" outcomes")[0] + " outcomes",
        f"{criteria['minutes']:.1f}",
    )


def _percents(values: Any) -> str:
    return ", ".join(map(percent, values))


def main() -> None:
    """The command line."""
    print(table([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]))


if __name__ == "__main__":
    main()
