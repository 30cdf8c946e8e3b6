"""A picture of gaps over rounds: one line for each case, as SVG. Pure."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle

from ....peer.base.errors import UsageError

Gap = Sequence[tuple[int, float]]
"""(round, percent above data parallel), by round."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 48, 16, 40, 40
"""Of the picture, and of the margins around its plot, in px."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by the colour-blind (Okabe and Ito)."""
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def gap_picture(title: str, gaps: Mapping[str, Gap]) -> str:
    """Draw these cases by name. Raises `UsageError` where none has a finite gap."""
    shown = {name: [point for point in gap if math.isfinite(point[1])] for name, gap in gaps.items()}
    points = [point for gap in shown.values() for point in gap]
    if not points:
        raise UsageError("there is no gap to draw", remedy="train the baseline, too")
    last, lowest, highest = (
        max(it for it, _ in points),
        min(0.0, *(it for _, it in points)),
        max(it for _, it in points),
    )
    step = next((it for it in STEPS if (highest - lowest) / it <= 8), STEPS[-1])
    bottom, top = step * math.floor(lowest / step), step * max(1, math.ceil(highest / step))

    def x(round_: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * round_ / last:.1f}"

    def y(percent: float) -> str:
        return f"{TOP + (HEIGHT - TOP - BOTTOM) * (top - percent) / (top - bottom):.1f}"

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">rounds</text>',
    ]
    for count in range(round((top - bottom) / step) + 1):
        percent = bottom + count * step
        drawn.append(f'<path d="M{LEFT} {y(percent)}H{WIDTH - RIGHT}" stroke="{"#555" if not percent else "#ddd"}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y(percent)}" dy="4" text-anchor="end">{percent:+g} %</text>')
    for round_ in sorted({it for gap in shown.values() for it, _ in gap}):
        drawn.append(f'<text x="{x(round_)}" y="{HEIGHT - 24}" text-anchor="middle">{round_}</text>')
    for place, ((name, gap), colour) in enumerate(zip(shown.items(), cycle(COLOURS), strict=False)):
        line = " ".join(f"{x(round_)},{y(percent)}" for round_, percent in gap)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(
            f'<text x="{WIDTH - RIGHT}" y="{TOP + 14 * (place + 1)}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*drawn, "</svg>", ""])
