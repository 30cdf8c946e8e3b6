"""What the peers of a run have earned, from the certificates that one of its members shows."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ..collectives.accountability.trust import WINDOW, Standing, Trust
from ..collectives.chain.certificate import verify
from ..collectives.chain.chain import rank
from ..collectives.chain.fork_choice import head_of, training
from ..collectives.chain.packed import checked
from ..collectives.chain.replay import ask_range
from ..dht.directory.kademlia import Directory
from ..dht.members.table import Member
from ..dht.rendezvous import find_members, visit
from ..dht.run.link import JoinLink
from ..dht.run.manifest import SignedManifest
from ..optim.pinned import charter_of
from ..peer.config import PeerConfig
from ..peer.errors import NetworkError, RemoteError
from ..peer.host import Libp2pHost
from ..peer.node.node import Node
from ..peer.telemetry import Telemetry
from ..peer.transport import PeerId


def fetch_standings(
    link: JoinLink, signed: SignedManifest, config: PeerConfig, telemetry: Telemetry
) -> tuple[list[Member], Mapping[PeerId, Standing]]:
    """Who is in a run now, and what each has earned as far as the last certificates tell. Raises `FlockstepError`."""

    async def errand(host: Libp2pHost, directory: Directory) -> tuple[list[Member], Mapping[PeerId, Standing]]:
        members = list(await find_members(host, directory, link.run_id, telemetry))
        async with Node(host, host.identity, config, telemetry) as node:
            for member in members:
                node.learn(member.peer, member.body.addresses)
            return members, await _standings(node, members, signed)

    return visit(link, config, telemetry, errand)


async def _standings(node: Node, members: Sequence[Member], signed: SignedManifest) -> Mapping[PeerId, Standing]:
    """From whoever shows valid certificates, those of the chain that most are on first; nothing where nobody does."""
    charter = charter_of(signed)
    heads = Counter(head_of(member) for member in training(members))
    for giver in sorted(training(members), key=lambda member: (-heads[head_of(member)], rank(head_of(member)), member.peer)):
        last = giver.body.round
        # A member holds the certificates since the state that it took when it came: maybe only the last ones.
        for first in (max(1, last - WINDOW + 1), last):
            trust = Trust(charter.earned)
            try:
                certificates = await ask_range(node, giver.peer, signed.run_id, range(first, last + 1))
                checked(certificates, signed.run_id, verify, charter)
            except NetworkError as error:
                node.telemetry.emit("trust.unknown", peer=giver.peer, step="ask for certificates", reason=str(error))
                continue
            except RemoteError as error:
                node.charge(giver.peer, "show certificates", error)
                break
            for certificate in certificates:
                trust.take(certificate)
            return trust.all()
    return {}
