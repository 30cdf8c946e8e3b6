"""A run's loss as inline SVG: a line per peer, held-out loss before and after, rounds.

Plain markup without scripts: it prints, it scales, and a screen reader gets its title and description. Colours come
from the page's style sheet (`--s1` …), so that both colour schemes have enough contrast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SERIES_COLOURS = 8
"""Hues that colour-blind readers can distinguish (Okabe and Ito, 2008); further lines are dashed."""
MAX_POINTS = 240
"""Points per line, about one for every third pixel of the chart."""

WIDTH, HEIGHT = 920, 380
LEFT, RIGHT, TOP, BOTTOM = 46, 76, 18, 38
INSET = 10  # Keeps the ring at the start off the numbers of the axis.
TICKS = HEIGHT - BOTTOM + 18


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One peer's training loss: (seconds since the start, loss), and whether it was killed."""

    name: str
    points: Sequence[tuple[float, float]]
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data to pixels on both axes."""

    x_most: float
    y_least: float
    y_most: float

    def x(self, seconds: float) -> float:
        """Return the pixel column of a time."""
        return LEFT + INSET + (WIDTH - LEFT - INSET - RIGHT) * seconds / self.x_most

    def y(self, loss: float) -> float:
        """Return the pixel row of a loss."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.y_most - loss) / (self.y_most - self.y_least)


def loss_chart(
    lines: Sequence[ChartLine], rounds: Sequence[tuple[int, float]], heldout: tuple[float, float], seconds: float
) -> str:
    """Return the chart; `rounds` are (number, second of its end), `heldout` the loss before and after."""
    losses = [loss for line in lines for _, loss in line.points if math.isfinite(loss)] + list(heldout)
    ticks = nice_ticks(min(losses), max(losses))
    scale = Scale(max(seconds, 1e-9), ticks[0], ticks[-1])
    before, after = heldout
    described = f"Held-out loss {before:.2f} before and {after:.2f} after. " + " ".join(
        f"{line.name}: {line.points[0][1]:.2f} to {line.points[-1][1]:.2f}{' (killed)' if line.killed else ''}."
        for line in lines
        if line.points
    )
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="loss-title loss-desc" class="chart">',
            '<title id="loss-title">Training loss of each peer over time</title>',
            f'<desc id="loss-desc">{escape(described)}</desc>',
            *_axes(scale, ticks),
            *_rounds(scale, rounds),
            *(markup for index, line in enumerate(lines) for markup in _line(scale, index, line)),
            _heldout(scale, 0.0, before, "before"),
            _heldout(scale, seconds, after, "after"),
            "</svg>",
        ]
    )


def nice_ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Return round numbers that enclose a range, 1, 2 or 5 times a power of ten apart (Heckbert, Graphics Gems, 1990)."""
    rough = max(most - least, 1e-6) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(least / step), math.ceil(most / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def series_class(index: int) -> str:
    """Return the CSS classes of the n-th series: a hue, and dashes once all hues are used."""
    return f"s{index % SERIES_COLOURS + 1}" + (" dashed" if index >= SERIES_COLOURS else "")


def _axes(scale: Scale, ticks: Sequence[float]) -> list[str]:
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(tick):.1f}" y2="{scale.y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{scale.y(tick) + 4:.1f}" text-anchor="end">{tick:.{digits}f}</text>'
        for tick in ticks
    ]
    columns = [
        f'<text class="tick" x="{scale.x(tick):.1f}" y="{TICKS}" text-anchor="middle">{tick:.0f} s</text>'
        for tick in nice_ticks(0, scale.x_most, 6)
        if tick <= scale.x_most
    ]
    return rows + columns


def _rounds(scale: Scale, rounds: Sequence[tuple[int, float]]) -> list[str]:
    bottom = HEIGHT - BOTTOM
    return [
        f'<line class="round" x1="{scale.x(end):.1f}" x2="{scale.x(end):.1f}" y1="{TOP}" y2="{bottom}">'
        f"<title>round {number} ended after {end:.0f} s</title></line>"
        for number, end in rounds
    ]


def _line(scale: Scale, index: int, line: ChartLine) -> list[str]:
    points = [point for point in line.points if math.isfinite(point[1])]
    if not points:
        return []
    every = math.ceil(len(points) / MAX_POINTS)
    drawn = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])
    path = " ".join(f"{scale.x(seconds):.1f},{scale.y(loss):.1f}" for seconds, loss in drawn)
    look, name = series_class(index), escape(line.name)
    markup = [f'<polyline class="line {look}" points="{path}"><title>{name}</title></polyline>']
    seconds, loss = points[-1]
    x, y = scale.x(seconds), scale.y(loss)
    if line.killed:
        markup.append(
            f'<path class="killed {look}" d="M{x - 5:.1f},{y - 5:.1f}l10,10m0,-10l-10,10"/>'
            f'<line class="kill" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 20}" y2="{y - 9:.1f}"/>'
            f'<text class="note" x="{x:.1f}" y="{TOP + 13}" text-anchor="middle">{name} killed</text>'
        )
    return markup


def _heldout(scale: Scale, seconds: float, loss: float, when: str) -> str:
    x, y = scale.x(seconds), scale.y(loss)
    text = f'<text class="note strong" x="{x + 9:.1f}" y="{y + 4:.1f}">{loss:.2f}</text>'
    return f'<circle class="heldout" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>held-out loss {when}</title></circle>{text}'
