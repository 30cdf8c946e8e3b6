"""The picture: when each peer trained, and how full its line was.

A page of its own without scripts, in the style of the demo's report.
"""

from collections.abc import Iterator, Sequence
from html import escape

from ...demo.charts import nice_ticks, series_class
from ...demo.style import STYLE
from .measure import PeerTrace, UtilizationRow

_WIDTH, _LEFT, _RIGHT = 920, 64, 20
_TOP, _BOTTOM = 10, 30
_BAR, _RATE, _GAP = 12, 26, 12
"""Heights of a peer's training, of its line's rate, and between two peers, in pixels."""
_OWN_STYLE = """
.bar { fill: currentColor; opacity: .85; } .track { fill: var(--rule); opacity: .55; }
.rate { fill: currentColor; opacity: .28; } .full { stroke: var(--soft); stroke-dasharray: 2 4; }
"""


def utilization_page(rows: Sequence[UtilizationRow]) -> str:
    """Return the page as HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>flockstep: utilization</title>
<style>{STYLE}{_OWN_STYLE}</style>
</head>
<body>
<main>
<header>
<p class="brand">flockstep</p>
<h1>When peers train, and when they wait</h1>
<p class="lead">Bars: a peer is in its inner steps; gaps: it waits. Below each bar, the rate at which it sends; the dotted
line is the rate of its line. From the first measured round to the last.</p>
</header>
{"".join(_section(index, row) for index, row in enumerate(rows))}
</main>
</body>
</html>
"""


def _section(index: int, row: UtilizationRow) -> str:
    case = row.case
    title = escape(f"{case.system}, {case.mode}, {case.codec}, {case.rate:g} Mbit/s")
    if row.failure:
        return f'<section><h2>{title}</h2><p class="fault">{escape(row.failure)}</p></section>'
    tiles = (
        ("of the time in training", f"{row.utilization:.1%}", f"{case.peers} peers, {case.params / 1e6:g}M parameters"),
        ("peak rate", f"{row.peak_rate_share:.0%}", f"of {case.rate:g} Mbit/s, over 1 s"),
        ("idle a round", f"{row.idle_seconds:.1f} s", f"of it {row.line_seconds:.1f} s of bytes at full rate"),
        ("rounds", f"{row.certified}", f"certified, {row.void} attempts void, {row.missed} results missed"),
    )
    boxes = "".join(
        f'<div><dt>{name}</dt><dd>{value}</dd><dd class="of">{escape(of)}</dd></div>' for name, value, of in tiles
    )
    return (
        f'<section><h2>{title}</h2><dl class="tiles">{boxes}</dl><br>'
        f'<div class="wide chart-box">{utilization_chart(index, row)}</div></section>'
    )


def utilization_chart(index: int, row: UtilizationRow) -> str:
    """Return the chart of a row; `index` tells it from the others on the page."""
    start = min(trace.boundaries[0].time for trace in row.traces)
    seconds = max(trace.boundaries[-1].time for trace in row.traces) - start
    height = _TOP + len(row.traces) * (_BAR + _RATE + _GAP) + _BOTTOM
    scale = (_WIDTH - _LEFT - _RIGHT) / max(seconds, 1e-9)
    shares = " ".join(f"Peer {number}: {peer.utilization:.1%}." for number, peer in enumerate(row.peers))
    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="u{index}-title u{index}-desc" class="chart">',
        f'<title id="u{index}-title">When each peer trains, and the rate at which it sends</title>',
        f'<desc id="u{index}-desc">Share of time in inner steps. {escape(shares)}</desc>',
    ]
    for number, trace in enumerate(row.traces):
        top = _TOP + number * (_BAR + _RATE + _GAP)
        lines.append(f'<text class="tick" x="{_LEFT - 8}" y="{top + _BAR - 2}" text-anchor="end">peer {number}</text>')
        lines += _bars(trace, start, scale, top, series_class(number))
        lines += _rates(trace, start, scale, top + _BAR + 2, row.case.rate * 125_000, series_class(number))
    for tick in nice_ticks(0, seconds, 6):
        if tick <= seconds:
            x = _LEFT + tick * scale
            lines.append(f'<text class="tick" x="{x:.1f}" y="{height - 10}" text-anchor="middle">{tick:.0f} s</text>')
    return "\n".join([*lines, "</svg>"])


def _bars(trace: PeerTrace, start: float, scale: float, top: int, look: str) -> Iterator[str]:
    for begin, end in training_times(trace):
        x, width = _LEFT + (begin - start) * scale, (end - begin) * scale
        yield f'<rect class="bar {look}" x="{x:.1f}" y="{top}" width="{max(width, 0.2):.1f}" height="{_BAR}"/>'


def training_times(trace: PeerTrace) -> Iterator[tuple[float, float]]:
    """Yield when a peer trained between its first and its last boundary: what its stalls leave."""
    begin, last = trace.boundaries[0].time, trace.boundaries[-1].time
    for stall, end in trace.stalls:
        if end <= begin:
            continue
        if begin < min(stall, last):
            yield begin, min(stall, last)
        begin = max(begin, end)
    if begin < last:
        yield begin, last


def _rates(trace: PeerTrace, start: float, scale: float, top: int, full: float, look: str) -> Iterator[str]:
    bottom = top + _RATE
    first, last = (_LEFT + (trace.boundaries[edge].time - start) * scale for edge in (0, -1))
    yield f'<line class="full" x1="{first:.1f}" x2="{last:.1f}" y1="{top + 2}" y2="{top + 2}"/>'
    points = [(_LEFT + (time - start) * scale, bottom - (_RATE - 2) * min(1.0, rate / full)) for time, rate in trace.rates]
    if points:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polygon class="rate {look}" points="{points[0][0]:.1f},{bottom} {path} {points[-1][0]:.1f},{bottom}"/>'
