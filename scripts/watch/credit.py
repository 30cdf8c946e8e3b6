"""`flockstep run credit`: who has contributed how much to a run, summed over its certificates, which are all checked.

A visitor asks members for the chain from the first round on, page by page, and keeps the sums alone. A name is what the
holder of a key calls itself in its record, now or when this computer last saw it: it proves nothing, and two peers may have
the same one. So every row shows the peer's id.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...collectives.accountability.credit import Credits, PeerCredit
from ...collectives.chain.certificate import value_of
from ...collectives.chain.chain import NOTHING
from ...collectives.chain.fork_choice import head_of, training
from ...collectives.chain.packed import checked
from ...collectives.chain.replay import ask_certificates
from ...collectives.spec import charter_of
from ...dht.directory.interface import Directory
from ...dht.members.remembered import Remembered
from ...dht.members.table import Member
from ...dht.rendezvous import find_manifest, find_members, visit
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...peer import wire
from ...peer.config import PeerConfig
from ...peer.errors import NetworkError, RemoteError, UsageError
from ...peer.node.node import Node
from ...peer.plain import SHORT_ID, plain_text
from ...peer.telemetry import Telemetry, log_path
from ...peer.transport import PeerId
from ...peer.wire.signed import verify_signed

FORMULAS = ("=", "+", "-", "@")
"""A spreadsheet computes a cell that begins with one of these, and a name is a stranger's: an apostrophe makes it a text."""


@dataclass(frozen=True, slots=True)
class CreditTable:
    """The credit of a run's contributors after a round, with the names that they give themselves."""

    round: int
    credit: tuple[PeerCredit, ...]
    names: Mapping[PeerId, str]
    """By peer; as its holder wrote it, to be shown by `plain_text` alone."""
    unlisted: int
    """Rounds whose certificates list no credit."""

    def rows(self) -> list[dict[str, str | int]]:
        """Return one row a peer, for programs."""
        return [
            {"peer": it.peer, "name": plain_text(self.names.get(it.peer, "")), "tokens": it.tokens, "rounds": it.rounds}
            for it in self.credit
        ]


def show_credit(
    link_text: str, config: PeerConfig, write_line: Callable[[str], None], *, as_csv: bool, as_json: bool
) -> None:
    """Show the credit of all contributors of a run. Raises `FlockstepError`."""
    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of one table", remedy="leave one of them out")
    with closing(Telemetry(log_path(config.home))) as telemetry:
        table = fetch_credit(JoinLink.parse(link_text), config, telemetry)
    rows = table.rows()
    if as_json:
        write_line(json.dumps({"round": table.round, "unlisted_rounds": table.unlisted, "credit": rows}))
    elif as_csv:
        write_line(csv_of(rows))
    elif rows:
        Console().print(table_of(rows))
        write_line(f"Up to round {table.round}; each name is what the peer calls itself.")
        if table.unlisted:
            write_line(f"The certificates of {table.unlisted} rounds are of an earlier version and list no tokens.")
    else:
        write_line("No round of this run is certified yet.")


def csv_of(rows: Sequence[Mapping[str, str | int]]) -> str:
    """Return rows as the lines of a CSV file, the last one without its end."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("peer", "name", "tokens", "rounds"))
    for row in rows:
        name = str(row["name"])
        safe = f"'{name}" if name.lstrip().startswith(FORMULAS) else name
        writer.writerow((row["peer"], safe, row["tokens"], row["rounds"]))
    return file.getvalue().rstrip("\n")


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


def fetch_credit(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> CreditTable:
    """Fetch and check a run's chain from its first round on, and sum up its credit. Raises `FlockstepError`."""
    remembered = Remembered(config.home / "runs" / link.run_id, link.run_id, telemetry)
    names = {peer: body.name for peer, body in remembered.bodies().items() if body.name}

    async def ask(node: Node, directory: Directory) -> CreditTable:
        signed = await find_manifest(directory, link.run_id)
        if charter_of(signed).kind != "open":
            raise UsageError("the certificates of this run are for its members only, so it shows its credit to no visitor")
        members = list(await find_members(node, directory, link.run_id))
        for member in members:
            node.learn(member.peer, member.body.addresses)
        found = await fold_credit(node, members, signed)
        seen = {member.peer: member.body.name for member in members}
        return CreditTable(found.round, found.all(), names | seen, found.unlisted)

    return visit(link, config, telemetry, ask)


async def fold_credit(node: Node, members: Sequence[Member], signed: SignedManifest) -> Credits:
    """Return the credit of the longest checked chain that a member shows, those first whose head most members state.

    Raises `NetworkError` where certified rounds are stated, and no member shows a chain from the first one on. A member
    that shows false certificates is charged.
    """
    here = training(members)
    if not any(head_of(member) != NOTHING for member in here):
        return Credits()
    stated = Counter(head_of(member) for member in here)
    best = Credits()
    for provider in sorted(here, key=lambda it: (-stated[head_of(it)], -it.body.round, it.body.head, it.peer)):
        found = await _chain_of(node, provider, signed)
        if found.round >= provider.body.round and found.round:
            return found
        best = max(best, found, key=lambda each: each.round)
    if not best.round:
        raise NetworkError(
            "no member that is here shows the certificates from the first round on",
            remedy="ask again while the run's owner, or a member of its first rounds, is here",
        )
    return best


async def _chain_of(node: Node, provider: Member, signed: SignedManifest) -> Credits:
    """Return the credit of a member's chain, as far as it shows and proves it."""
    found, charter = Credits(), charter_of(signed)
    before: wire.Certificate | None = None
    try:
        while found.round < provider.body.round:
            question = wire.LedgerAsk(signed.run_id, found.round + 1, wire.MAX_PAGE)
            page = await ask_certificates(node, provider.peer, question)
            if not page:
                raise NetworkError(f"it shows no certificates from round {found.round + 1} on")
            await node.compute(partial(checked, page, signed.run_id, verify_signed, charter, before=before))
            for certificate in page:
                found.take(value_of(certificate))
            before = page[-1]
    except NetworkError as error:
        node.telemetry.emit("credit.unknown", peer=provider.peer, step="ask for certificates", reason=str(error))
    except RemoteError as error:
        node.charge(provider.peer, "show certificates", error)
    return found
