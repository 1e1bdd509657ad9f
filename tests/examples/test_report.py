import copy
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import plots, report

NASTY = '<b>"R&D"</b>'
VOID = {"meta", "br", "img", "hr", "link", "input"}


def demo() -> dict[str, Any]:
    """A small run, with text in it that would break a page that does not escape."""
    requests = [{"success": float(i % 3 > 0), "changed": i % 2 == 0, "part": "before"} for i in range(20)]
    suite = {"num_tasks": 64, "gain": 0.5, "low": 0.31, "high": 0.7, "margin": 0.15, "passed": True}
    verdict = {
        "version": "support@2",
        "baseline": "support@1",
        "decision": "promote",
        "reasons": [NASTY],
        "note": NASTY,
        "suites": [
            {**suite, "suite": "support-changed", "role": "target"},
            {**suite, "suite": "support-unchanged", "role": "guard", "gain": -0.2, "passed": False},
        ],
    }
    version = {
        "id": "support@2",
        "changed": "91 % [80 %, 96 %]",
        "unchanged": "88 %",
        "live": "90 %",
        "tokens_per_success": "301",
        "dollars_per_success": "$0.000123",
        "intelligence_per_dollar": "88 [12, 140]",
        "decision": "promote",
    }
    spend = {"activity": "learn train", "outcome": "used", "seconds": 12.5, "tokens": 900, "dollars": "$0.0012",
             "share": "60.0 %", "dollars_value": 0.0012}  # fmt: skip
    return {
        "seed": 7,
        "seconds": 1500.0,
        "machine": {"cores": 4, "processor": "x86", "model": NASTY},
        "window": 5,
        "basis": "rented",
        "headline": {"before": 0.9, "decayed": 0.25, "repaired": 0.875},
        "requests": requests,
        "marks": [{"request": 4, "label": NASTY}, {"request": 19, "label": "late"}],
        "versions": [version],
        "criteria": {
            "gain": {"points": 50.0, "low": 31.0, "high": 70.0},
            "gain_met": True,
            "guard": {"points": -20.0, "low": -31.0, "margin": 15.0},
            "guard_met": False,
            "minutes": 25.0,
            "minutes_met": True,
        },
        "stages": [{"name": "before", "tasks": 30, "success": "25 %"}],
        "rewards": [{"step": 1, "reward": 0.4, "phase": "practice"}, {"step": 2, "reward": 0.6, "phase": "practice"}],
        "verdicts": [verdict],
        "rollback": "taken back: success fell",
        "spend": [spend, {**spend, "outcome": "stale", "dollars_value": None, "dollars": "unpriced"}],
        "lineage": [
            {"title": "A customer's request failed", "text": f"user: {NASTY}"},
            {"title": "A task", "text": ""},
        ],
    }


class Outline(HTMLParser):
    """Checks that every tag is closed in order; keeps the tags and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def svg(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in text
    return root


def tags(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_the_page_is_well_formed_and_shows_the_figures(tmp_path: Path) -> None:
    report.write_report(demo(), tmp_path / "report.html")
    page = outline((tmp_path / "report.html").read_text())
    for text in ("fell from 90 % to 25 %", "came back to 88 %", "support@2", "301", "25.0 minutes", "unpriced",
                 "+50.0 points [+31.0, +70.0]", "-20.0 points, at worst -31.0", "missed",
                 "taken back: success fell", "A customer's request failed", NASTY):  # fmt: skip
        assert text in page.text
    assert page.tags.count("svg") == 4
    assert "b" not in page.tags
    assert "script" not in page.tags


def test_the_page_stands_alone(tmp_path: Path) -> None:
    report.write_report(demo(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=|url\(|@import", page)


def test_an_almost_empty_run_still_has_a_page(tmp_path: Path) -> None:
    empty = {**demo(), "requests": [], "marks": [], "rewards": [], "verdicts": [], "spend": [], "lineage": [],
             "versions": [], "stages": [], "rollback": ""}  # fmt: skip
    report.write_report(empty, tmp_path / "report.html")
    outline((tmp_path / "report.html").read_text())


def test_writing_the_page_does_not_change_the_figures(tmp_path: Path) -> None:
    figures = demo()
    before = copy.deepcopy(figures)
    report.write_report(figures, tmp_path / "report.html")
    assert figures == before


def test_the_picture_of_success_is_a_file_of_its_own() -> None:
    root = svg(report.success_plot(demo()))
    assert len(tags(root, "polyline")) == 2
    texts = [element.text for element in tags(root, "text")]
    assert NASTY in texts
    assert "kinds that stay" in texts


def test_rolling_means() -> None:
    assert plots.rolling([1, 0, 0, 1], 2) == [1.0, 0.5, 0.0, 0.5]
    assert plots.rolling([1, 0], 9) == [1.0, 0.5]
    assert plots.rolling([], 3) == []


def test_a_curve_runs_from_left_to_right_and_full_success_is_at_the_top() -> None:
    root = svg(plots.over_time({"a": [(0.0, 1.0), (10.0, 0.0)]}, [], x_label="x", end=10.0))
    points = [tuple(map(float, point.split(","))) for point in tags(root, "polyline")[0].attrib["points"].split()]
    assert points == [(plots.LEFT, plots.TOP), (plots.WIDTH - plots.RIGHT, plots.HEIGHT - plots.BOTTOM)]


def test_bars_are_as_high_as_their_values() -> None:
    root = svg(plots.per_step([("1", 0.5, "p"), (NASTY, 1.0, "q")], y_label="reward"))
    bars = [bar for bar in tags(root, "rect") if bar.find("{http://www.w3.org/2000/svg}title") is not None]
    whole = plots.HEIGHT - plots.TOP - plots.BOTTOM
    assert [float(bar.attrib["height"]) for bar in bars] == [whole / 2, whole]


def test_spend_bars_are_proportional_and_the_largest_fills_the_row() -> None:
    root = svg(plots.spend([("train", {"used": 3.0, "stale": 1.0}), ("serve", {"used": 2.0})]))
    widths = [float(bar.attrib["width"]) for bar in tags(root, "rect") if bar.attrib["height"] == "18"]
    assert widths == pytest.approx([3 * widths[1], widths[1], 2 * widths[1]], abs=0.2)
    assert widths[0] + widths[1] == pytest.approx(plots.WIDTH - 110 - 110, abs=0.2)
    svg(plots.spend([("train", {"used": 0.0})]))
    svg(plots.spend([]))


def test_a_forest_shows_gain_interval_and_margin_and_stays_inside() -> None:
    rows = [("target", 50.0, 31.0, 70.0, None, True), ("guard", -20.0, -130.0, 5.0, 15.0, False)]
    root = svg(plots.forest(rows))
    centres = [float(circle.attrib["cx"]) for circle in tags(root, "circle")]
    assert centres[0] > centres[1]
    for line in tags(root, "line"):
        assert 0 <= float(line.attrib["x1"]) <= plots.WIDTH
        assert 0 <= float(line.attrib["x2"]) <= plots.WIDTH
    assert len([line for line in tags(root, "line") if line.attrib.get("class") == "mark"]) == 1
