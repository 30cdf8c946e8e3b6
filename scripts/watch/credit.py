"""`flockstep run credit`: who has contributed how much to a run, summed over its certificates, which are all checked.

The sums are those of the light client behind every view. A name is what the holder of a key calls itself in its record, now
or when this computer last saw it: it proves nothing, and two peers may have the same one. So every row shows the peer's id.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ...collectives.accountability.credit import PeerCredit
from ...collectives.chain.chain import NOTHING
from ...collectives.chain.fork_choice import head_of
from ...collectives.picture.fold import MAX_ROWS
from ...dht.members.remembered import Remembered
from ...dht.run.link import JoinLink
from ...peer.base.config import PeerConfig
from ...peer.base.errors import NetworkError, UsageError
from ...peer.base.plain import SHORT_ID, plain_text
from ...peer.base.transport import PeerId
from ...peer.log.telemetry import Telemetry
from .console import PlainConsole
from .watching import watched

if TYPE_CHECKING:
    from ...collectives.visit.watcher import RunWatcher


@dataclass(frozen=True, slots=True)
class CreditTable:
    """The credit of a run's contributors in the rounds that were verified, with the names that they give themselves."""

    first: int
    round: int
    credit: tuple[PeerCredit, ...]
    names: Mapping[PeerId, str]
    """By peer; as its holder wrote it, to be shown by `plain_text` alone."""
    before: int = 0
    """Rounds of the runs that this one goes on from, which are in the sums."""

    def rows(self) -> list[dict[str, str | int]]:
        """Return one row a peer, for programs."""
        return [
            {"peer": it.peer, "name": plain_text(self.names.get(it.peer, "")), "tokens": it.tokens, "rounds": it.rounds}
            for it in self.credit
        ]


def show_credit(link_text: str, config: PeerConfig, write_line: Callable[[str], None], *, as_json: bool) -> None:
    """Show the credit of all contributors of a run. Raises `FlockstepError`."""
    table = fetch_credit(JoinLink.parse(link_text), config)
    rows = table.rows()
    if as_json:
        figures = {"first_round": table.first, "round": table.round, "rounds_before": table.before, "credit": rows}
        write_line(json.dumps(figures))
    elif rows:
        PlainConsole().print(table_of(rows))
        before = f", and {table.before:,} of the runs that it goes on from" if table.before else ""
        write_line(f"Rounds {table.first} to {table.round}{before}; each name is what the peer calls itself.")
    else:
        write_line("No round of this run is certified yet.")


def table_of(rows: Sequence[Mapping[str, str | int]]) -> Table:
    """Return rows as a table for a terminal. Names are shown as texts, whatever stands in them."""
    view = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    view.add_column("peer", no_wrap=True)
    view.add_column("name")
    view.add_column("tokens", justify="right", no_wrap=True)
    view.add_column("rounds", justify="right", no_wrap=True)
    for row in rows:
        view.add_row(
            Text(str(row["peer"])[-SHORT_ID:]), Text(str(row["name"])), f"{row['tokens']:,}", f"{row['rounds']:,}"
        )
    return view


def fetch_credit(link: JoinLink, config: PeerConfig) -> CreditTable:
    """Verify a run's chain back to its first round, and sum up its credit. Raises `FlockstepError`."""

    async def read(watcher: "RunWatcher") -> CreditTable:
        if not watcher.shows_chain:
            raise UsageError(
                "the certificates of this run are for its members only, so it shows its credit to no visitor",
                remedy="--home shows it where one of its peers has its home folder",
            )
        await watcher.look(MAX_ROWS)
        chain, seen = watcher.chain, {member.peer: member.body.name for member in watcher.members()}
        if chain.head == NOTHING and any(head_of(member) != NOTHING for member in watcher.members()):
            raise NetworkError("no member shows the run's certificates", remedy="ask again while its keepers are here")
        credit, before = await watcher.credit(config.home)
        return CreditTable(chain.first, chain.head.round, credit, names | seen, before)

    with closing(Telemetry()) as telemetry:
        bodies = Remembered(config.home / "runs" / link.run_id, link.run_id, telemetry).bodies()
    names = {peer: body.name for peer, body in bodies.items() if body.name}
    return watched(link, config, read)
