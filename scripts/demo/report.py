"""`report.html` and `summary.json` of a demo: a self-contained page, and its figures.

The page loads no script, font or picture, so that it works offline and in a mail.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape

from ..processes import Killed
from ..story import ROOT_DIGITS, PeerStory, RoundFacts, bits_per_parameter, rounds_of
from .charts import ChartLine, loss_chart, series_class
from .style import STYLE

CELLS = {
    "cut": ("●", "in the cut: its work entered the round"),
    "roster": ("○", "in the roster, but not in the cut"),
    "keeper": ("◆", "a keeper: it holds the state and votes, and trains nothing"),
    "absent": ("·", "not in the roster"),
    "killed": ("✕", "killed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of a demo."""

    run_id: str
    model: str
    parameters: int
    fragments: int
    """A round averages one of so many fragments of the parameters."""
    data: str
    peers: Sequence[PeerStory]
    """Those that trained."""
    keeper: PeerStory
    """The process of the run's owner."""
    started: float
    """Unix seconds."""
    seconds: float
    heldout_loss_start: float
    heldout_loss_end: float
    prompt: str
    sample: str
    killed: Killed | None
    """The fate of the killed peer's child processes, if a peer was killed."""

    @property
    def rounds(self) -> list[RoundFacts]:
        """All rounds, in order."""
        return rounds_of([*self.peers, self.keeper])

    @property
    def fall(self) -> float:
        """The relative reduction of the held-out loss."""
        return 1 - self.heldout_loss_end / self.heldout_loss_start

    @property
    def bits(self) -> tuple[float, float] | None:
        """Bits sent and received per parameter and round, for an infinite roster."""
        return bits_per_parameter(self.peers, self.parameters / self.fragments)

    @property
    def tokens(self) -> int:
        """The tokens of all peers."""
        return sum(peer.tokens for peer in self.peers)

    def faults(self) -> list[str]:
        """Return one line for each fault of the demo."""
        split = [str(facts.round) for facts in self.rounds if not facts.agreed]
        return [
            *([f"state roots differ in round {', '.join(split)}"] if split else []),
            *(["no round was finished"] if all(facts.outcome == "void" for facts in self.rounds) else []),
            *([str(self.killed)] if self.killed and self.killed.left else []),
            *([] if self.fall > 0 else [f"held-out loss did not fall ({self.loss_text()})"]),
        ]

    def figures(self) -> list[tuple[str, str]]:
        """Return the main figures as (name, text)."""
        done = [facts for facts in self.rounds if facts.outcome == "done"]
        sent, received = self.bits or (float("nan"), float("nan"))
        return [
            ("held-out loss", self.loss_text()),
            ("state roots", f"equal on all peers in {sum(facts.agreed for facts in done)} of {len(done)} rounds"),
            ("bytes", f"{sent:.2f} bits sent, {received:.2f} received per parameter and round, divided by (n-1)/n"),
            ("tokens", f"{self.tokens:,} in {self.seconds:.0f} s"),
        ]

    def loss_text(self) -> str:
        """Return the held-out loss before and after as text."""
        return f"{self.heldout_loss_start:.3f} → {self.heldout_loss_end:.3f}, {-100 * self.fall:+.1f} %"


def report_summary(findings: Findings) -> dict[str, object]:
    """Return the figures of the report for JSON."""
    sent, received = findings.bits or (None, None)
    return {
        "run_id": findings.run_id,
        "model": findings.model,
        "parameters": findings.parameters,
        "data": findings.data,
        "seconds": round(findings.seconds, 1),
        "tokens": findings.tokens,
        "heldout_loss_start": findings.heldout_loss_start,
        "heldout_loss_end": findings.heldout_loss_end,
        "bits_per_param_per_direction": max(findings.bits) if findings.bits else None,
        "bits_per_param_sent": sent,
        "bits_per_param_received": received,
        "sample": findings.sample,
        "killed": asdict(findings.killed) if findings.killed else None,
        "peers": {
            peer.name: {"id": peer.peer_id, "state": peer.state, "device": peer.device, "tokens": peer.tokens}
            for peer in (*findings.peers, findings.keeper)
        },
        "rounds": [
            {
                "round": facts.round,
                "roster": list(facts.roster),
                "cut": list(facts.cut),
                "outcome": facts.outcome,
                "state_roots": dict(facts.state_roots),
                "loss": facts.loss,
                "seconds": facts.seconds,
                "voids": list(facts.voids),
            }
            for facts in findings.rounds
        ],
        "faults": findings.faults(),
    }


def report(findings: Findings) -> str:
    """Return the page as HTML."""
    faults = findings.faults()
    verdict = "".join(f'<p class="fault">{escape(fault)}</p>' for fault in faults)
    started = datetime.fromtimestamp(findings.started, UTC)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>flockstep: {len(findings.peers)} peers, one model</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<p class="brand">flockstep</p>
<h1>{len(findings.peers)} peers trained one model</h1>
<p class="lead">{escape(findings.model)}, {findings.parameters:,} parameters, on {escape(findings.data)}.
{escape(_events(findings))}</p>
{verdict}
</header>
{_tiles(findings)}
<section>
<h2>Loss</h2>
<p>Training loss of each peer as its own inner steps report it; the rings are the shared model's loss on text that no
peer trained on, before the first and after the last round. Hairlines mark the ends of rounds.</p>
{_legend(findings.peers)}
<div class="wide chart-box">{_chart(findings)}</div>
</section>
<section>
<h2>Who took part</h2>
{_grid(findings)}
</section>
<section>
<h2>Rounds</h2>
<p>A state root is a hash over all parameters and the momentum, so equal roots mean equal models, bit for bit.</p>
{_table(findings)}
</section>
<section>
<h2>A sample of its text</h2>
<pre class="sample"><b>{escape(findings.prompt)}</b>{escape(findings.sample)}</pre>
</section>
<footer>
<p>Run <code>{escape(findings.run_id)}</code>, {started:%Y-%m-%d %H:%M} UTC. Every figure is measured: losses, roots and
bytes come from the peers' event logs. Bits count every byte on a peer's sockets during a round, encryption, heartbeats
and void attempts included: the median over peers and rounds, divided by (n&minus;1)/n for n peers in the roster.</p>
</footer>
</main>
</body>
</html>
"""


def _events(findings: Findings) -> str:
    """Describe kills and their consequences in one sentence."""
    killed = [peer for peer in findings.peers if peer.state == "killed"]
    if not killed:
        return ""
    names = " and ".join(peer.name for peer in killed)
    last = max((number for peer in killed for number in peer.rounds), default=-1)
    went_on = sum(facts.round > last and facts.outcome == "done" for facts in findings.rounds)
    when = f"after round {last}" if last >= 0 else "before its first round ended"
    return f"{names} was killed with SIGKILL {when}; the others finished {went_on} more rounds. {findings.killed or ''}"


def _tiles(findings: Findings) -> str:
    done = [facts for facts in findings.rounds if facts.outcome == "done"]
    agreed = sum(facts.agreed for facts in done)
    bits = f"{max(findings.bits):.2f}" if findings.bits else "&ndash;"
    start, end = findings.heldout_loss_start, findings.heldout_loss_end
    tiles = [
        ("Held-out loss", f"{end:.2f}", f"from {start:.2f}, {-100 * findings.fall:+.0f} %"),
        ("Rounds with equal roots", f"{agreed}/{len(done)}", f"{len(findings.rounds) - len(done)} void"),
        ("Bits per parameter", bits, "and direction and round, divided by (n&minus;1)/n"),
        ("Tokens", f"{findings.tokens / 1e6:.2f}M", f"in {findings.seconds:.0f} s, by all peers"),
    ]
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{name}</dt><dd>{figure}</dd><dd class='of'>{note}</dd></div>" for name, figure, note in tiles
        )
        + "</dl>"
    )


def _legend(peers: Sequence[PeerStory]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 24 8" aria-hidden="true"><path class="line {series_class(index)}" d="M1 4h22"/></svg>'
        f"{escape(peer.name)}</li>"
        for index, peer in enumerate(peers)
    )
    ring = '<svg viewBox="0 0 24 12" aria-hidden="true"><circle class="heldout" cx="12" cy="6" r="4.5"/></svg>'
    return f'<ul class="legend">{items}<li>{ring}held-out</li></ul>'


def _chart(findings: Findings) -> str:
    lines = [
        ChartLine(
            peer.name,
            [(time - findings.started, loss) for time, loss in peer.curve],
            killed=peer.state == "killed",
        )
        for peer in findings.peers
    ]
    ends: dict[int, float] = {}
    for peer in findings.peers:
        for number, seen in peer.rounds.items():
            ends[number] = min(ends.get(number, seen.time), seen.time)
    rounds = [(number, end - findings.started) for number, end in sorted(ends.items())]
    return loss_chart(lines, rounds, (findings.heldout_loss_start, findings.heldout_loss_end), seconds=findings.seconds)


def _grid(findings: Findings) -> str:
    rounds = findings.rounds
    head = "".join(f'<th scope="col">{facts.round}</th>' for facts in rounds)
    rows = "".join(
        f'<tr><th scope="row"><span class="dot {series_class(index)}"></span>{escape(peer.name)}</th>'
        + "".join(_cell(peer, facts) for facts in rounds)
        + "</tr>"
        for index, peer in enumerate(findings.peers)
    ) + (
        f'<tr><th scope="row">{escape(findings.keeper.name)}</th>'
        + "".join(_cell(findings.keeper, facts) for facts in rounds)
        + "</tr>"
    )
    keys = "".join(
        f'<li><span class="cell {kind}" aria-hidden="true">{sign}</span>{title}</li>'
        for kind, (sign, title) in CELLS.items()
    )
    return (
        f'<ul class="legend">{keys}</ul><div class="wide"><table class="grid-table">'
        f'<thead><tr><th scope="col">round</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _cell(peer: PeerStory, facts: RoundFacts) -> str:
    kind = taken_part(peer, facts)
    sign, title = CELLS[kind]
    return f'<td><span class="cell {kind}" title="{escape(peer.name)}, round {facts.round}: {title}">{sign}</span></td>'


def taken_part(peer: PeerStory, facts: RoundFacts) -> str:
    """Return a peer's role in a round: a key of `CELLS`."""
    if peer.keeps:
        return "keeper" if facts.round in peer.rounds else "absent"
    if peer.name in facts.cut:
        return "cut"
    if peer.state == "killed" and facts.round > max(peer.rounds, default=-1):
        return "killed"
    return "roster" if peer.name in facts.roster else "absent"


def _table(findings: Findings) -> str:
    rows = "".join(_row(facts, findings.peers) for facts in findings.rounds)
    return (
        '<div class="wide"><table class="rounds"><thead><tr><th scope="col">round</th><th scope="col">outcome</th>'
        '<th scope="col">cut / roster</th><th scope="col">loss</th><th scope="col">seconds</th>'
        '<th scope="col">sent per peer</th><th scope="col">state root</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(facts: RoundFacts, peers: Sequence[PeerStory]) -> str:
    sent = [peer.rounds[facts.round].sent for peer in peers if facts.round in peer.rounds]
    roots = " ≠ ".join(
        f'<code title="{escape(root)}">{escape(root[: 2 * ROOT_DIGITS])}</code>'
        for root in dict.fromkeys(facts.state_roots.values())
    )
    void = f"<small class='why'>void before: {escape('; '.join(facts.voids))}</small>" if facts.voids else ""
    return (
        f'<tr class="{facts.outcome if facts.agreed else "split"}"><td>{facts.round}</td><td>{facts.outcome}{void}</td>'
        f"<td>{len(facts.cut)} / {len(facts.roster)}</td>"
        f"<td>{'&ndash;' if facts.loss is None else f'{facts.loss:.3f}'}</td><td>{facts.seconds:.1f}</td>"
        f"<td>{f'{sum(sent) / len(sent) / 1e6:.2f} MB' if sent else '&ndash;'}</td>"
        f"<td>{roots or '&ndash;'} <small>{len(facts.state_roots)} peers</small></td></tr>"
    )
