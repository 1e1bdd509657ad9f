"""Plots as inline SVG strings: no library, no script, readable in light and dark. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 260, 46, 14, 18, 34
CURVES = ("var(--a)", "var(--b)", "var(--c)", "var(--d)")


def percent(value: float) -> str:
    """A share of 1, for people."""
    return f"{100 * value:.0f} %"


def rolling(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each position (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def over_time(
    curves: dict[str, Sequence[tuple[float, float]]], marks: Sequence[tuple[float, str]], *, x_label: str, end: float
) -> str:
    """Curves of (x, share of 1) with labelled vertical marks; x runs from 0 to `end`."""
    parts = [_grid(0.0, 1.0, percent=True), _axis(x_label, end)]
    for index, (x, label) in enumerate(marks):
        at, y = _x(x, end), TOP + 9 + 11 * (index % 3)
        anchor, offset = ("end", -4) if at > WIDTH - 150 else ("start", 4)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="mark"/>')
        parts.append(f'<text x="{at + offset:.1f}" y="{y}" text-anchor="{anchor}" class="small">{escape(label)}</text>')
    for (name, points), colour in zip(curves.items(), CURVES, strict=False):
        path = " ".join(f"{_x(x, end):.1f},{_y(y, 0.0, 1.0):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" style="stroke:{colour}" class="curve"><title>{escape(name)}</title></polyline>'
        )
    return _figure("".join(parts), list(curves))


def per_step(values: Sequence[tuple[str, float, str]], *, y_label: str) -> str:
    """One bar a step: (label, share of 1, colour group); groups are coloured in order of appearance."""
    groups = list(dict.fromkeys(group for _, _, group in values))
    width = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    parts = [_grid(0.0, 1.0, percent=True), f'<text x="4" y="{TOP - 6}" class="small">{escape(y_label)}</text>']
    for index, (label, value, group) in enumerate(values):
        x, y = LEFT + index * width, _y(value, 0.0, 1.0)
        colour = CURVES[groups.index(group) % len(CURVES)]
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{max(1.0, width - 4):.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
            f'style="fill:{colour}"><title>{escape(label)}: {100 * value:.1f} %</title></rect>'
        )
        if width > 22:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle" class="small">'
                f"{escape(label)}</text>"
            )
    return _figure("".join(parts), groups)


def spend(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Horizontal stacked bars: (activity, {outcome: dollars}); the hatched outcomes are waste."""
    outcomes = list(dict.fromkeys(outcome for _, shares in rows for outcome in shares))
    most = max((sum(shares.values()) for _, shares in rows), default=0.0) or 1.0
    step, left = 26, 110
    parts = []
    for index, (activity, shares) in enumerate(rows):
        y, x = 6 + index * step, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(activity)}</text>')
        for outcome, value in shares.items():
            width = value / most * (WIDTH - left - 110)
            colour = CURVES[outcomes.index(outcome) % len(CURVES)]
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" style="fill:{colour}">'
                f"<title>{escape(activity)}, {escape(outcome)}: ${value:.6f}</title></rect>"
            )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}" class="small">${sum(shares.values()):.5f}</text>')
    return _figure("".join(parts), outcomes, height=12 + step * len(rows))


def forest(rows: Sequence[tuple[str, float, float, float, float | None, bool]]) -> str:
    """One line a suite: (label, gain, low, high, margin or None, passed), gains in points between -100 and 100."""
    step, left = 26, 240
    scale = (WIDTH - left - 150) / 200

    def at(points: float) -> float:
        return left + (max(-100.0, min(100.0, points)) + 100) * scale

    height = 34 + step * len(rows)
    parts = [f'<line x1="{at(0):.1f}" x2="{at(0):.1f}" y1="4" y2="{height - 22}" class="axis"/>']
    for tick in (-100, -50, 0, 50, 100):
        parts.append(f'<text x="{at(tick):.1f}" y="{height - 8}" text-anchor="middle" class="small">{tick:+d}</text>')
    for index, (label, gain, low, high, margin, passed) in enumerate(rows):
        y, colour = 16 + index * step, "var(--good)" if passed else "var(--bad)"
        name = label if len(label) <= 34 else label[:33] + "…"
        parts.append(
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}<title>{escape(label)}</title></text>'
        )
        parts.append(
            f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y}" y2="{y}" style="stroke:{colour};stroke-width:3"/>'
        )
        parts.append(
            f'<circle cx="{at(gain):.1f}" cy="{y}" r="5" style="fill:{colour}">'
            f"<title>{gain:+.1f} points</title></circle>"
        )
        if margin is not None:
            parts.append(
                f'<line x1="{at(-margin):.1f}" x2="{at(-margin):.1f}" y1="{y - 9}" y2="{y + 9}" class="mark"/>'
            )
        parts.append(
            f'<text x="{WIDTH - 4}" y="{y + 4}" text-anchor="end" class="small">'
            f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]</text>"
        )
    return _figure("".join(parts), [], height=height)


def _x(x: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (x / end if end else 0.0)


def _y(y: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)


def _grid(low: float, high: float, *, percent: bool) -> str:
    lines = []
    for tick in range(5):
        value = low + (high - low) * tick / 4
        y = _y(value, low, high)
        text = f"{100 * value:.0f} %" if percent else f"{value:g}"
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="small">{text}</text>')
    return "".join(lines)


def _axis(label: str, end: float) -> str:
    ticks = "".join(
        f'<text x="{_x(end * t / 4, end):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle" class="small">'
        f"{end * t / 4:.0f}</text>"
        for t in range(5)
    )
    return ticks + f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle" class="small">{escape(label)}</text>'


def _figure(body: str, legend: Sequence[str], *, height: int = HEIGHT) -> str:
    """A complete SVG; its style travels with it, so that it can stand alone as a file."""
    style = (
        "<style>:root{--a:#2563eb;--b:#d97706;--c:#6b7280;--d:#9333ea;--good:#15803d;--bad:#b91c1c}"
        "@media(prefers-color-scheme:dark){:root{color:#ddd}}"
        "text{font:12px system-ui,sans-serif;fill:currentColor}.small{font-size:10.5px;opacity:.8}"
        ".grid{stroke:currentColor;opacity:.12}.axis{stroke:currentColor;opacity:.5}"
        ".mark{stroke:currentColor;opacity:.45;stroke-dasharray:3 3}.curve{fill:none;stroke-width:2.2}</style>"
    )
    names, x = [], float(LEFT)
    for name, colour in zip(legend, CURVES, strict=False):
        names.append(f'<rect x="{x:.0f}" y="{height + 4}" width="11" height="11" style="fill:{colour}"/>')
        names.append(f'<text x="{x + 16:.0f}" y="{height + 14}">{escape(name)}</text>')
        x += 34 + 7.0 * len(name)
    total = height + (22 if legend else 0)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img">'
    return head + style + body + "".join(names) + "</svg>"
