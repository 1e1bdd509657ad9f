"""Turns the demo's figures (demo.json) into report.html and the picture of success over time. Reads nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from support import plots
from support.plots import percent

HERE = Path(__file__).parent


def write_report(demo: dict[str, Any], path: Path) -> None:
    """Renders the page. `demo` is what demo.py writes as demo.json."""
    pages = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    verdicts = [
        {**verdict, "plot": plots.forest([_forest_row(suite) for suite in verdict["suites"]])}
        for verdict in demo["verdicts"]
    ]
    demo = {**demo, "verdicts": verdicts}
    drawn = {"success": success_plot(demo), "spend": plots.spend(_spend_rows(demo)), "reward": _reward_plot(demo)}
    page = pages.get_template("report.html.j2").render(
        demo=demo, plots=drawn, headline=headline(demo), criteria=criteria_rows(demo["criteria"])
    )
    path.write_text(page, encoding="utf-8")


def success_plot(demo: dict[str, Any]) -> str:
    """Live success of the changed and the unchanged kinds over requests, with marks for changes and releases."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, changed in (("kinds whose tools change", True), ("kinds that stay", False)):
        points = [
            (index, request["success"])
            for index, request in enumerate(demo["requests"])
            if request["changed"] is changed
        ]
        means = plots.rolling([value for _, value in points], demo["window"])
        curves[name] = [(float(index), mean) for (index, _), mean in zip(points, means, strict=True)]
    marks = [(float(mark["request"]), mark["label"]) for mark in demo["marks"]]
    return plots.over_time(curves, marks, x_label="requests", end=float(len(demo["requests"])))


def criteria_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What the run was to show, what it showed, and whether that is enough."""
    gain, guard = found["gain"], found["guard"]
    return [
        {
            "wanted": "held out, the repaired version gains 30 points on the changed kinds, its interval above 0",
            "found": f"{gain['points']:+.1f} points [{gain['low']:+.1f}, {gain['high']:+.1f}]",
            "met": found["gain_met"],
        },
        {
            "wanted": f"the other kinds lose no more than {guard['margin']:.0f} points",
            "found": f"{guard['points']:+.1f} points, at worst {guard['low']:+.1f}",
            "met": found["guard_met"],
        },
        {
            "wanted": "all of it in 25 minutes on two cores",
            "found": f"{found['minutes']:.1f} minutes",
            "met": found["minutes_met"],
        },
    ]


def headline(demo: dict[str, Any]) -> str:
    """One sentence with the figures that matter."""
    h = demo["headline"]
    return (
        f"Live success on the changed kinds fell from {percent(h['before'])} to {percent(h['decayed'])} when their "
        f"tools changed, and came back to {percent(h['repaired'])} after one turn of the loop"
    )


def _reward_plot(demo: dict[str, Any]) -> str:
    values = [(str(row["step"]), row["reward"], row["phase"]) for row in demo["rewards"]]
    return plots.per_step(values, y_label="mean reward") if values else ""


def _spend_rows(demo: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    rows: dict[str, dict[str, float]] = {}
    for row in demo["spend"]:
        if row["dollars_value"] is not None:
            rows.setdefault(row["activity"], {})[row["outcome"]] = row["dollars_value"]
    return sorted(rows.items(), key=lambda item: -sum(item[1].values()))


def _forest_row(suite: dict[str, Any]) -> tuple[str, float, float, float, float | None, bool]:
    margin = 100 * suite["margin"] if suite["role"] == "guard" else None
    label = f"{suite['role']}: {suite['suite']} ({suite['num_tasks']})"
    return label, 100 * suite["gain"], 100 * suite["low"], 100 * suite["high"], margin, suite["passed"]
