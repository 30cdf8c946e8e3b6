"""Join links: a run id and its bootstraps in one line that survives chats, mails and reading aloud.

A link may name a certificate of the run's chain, `&at=ROUND:HASH`: a newcomer then joins no other chain than one that has
it, however many keys claim to be on another one (weak subjectivity).
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from ...peer.base.errors import UsageError
from ...peer.base.transport import Address
from ...peer.identity import is_peer_id

HIVEMIND = "hivemind:"
"""The prefix of a hivemind DHT peer's address in a link."""

MAX_VIA = 16
"""The limit of addresses in a join link: a few bootstraps on a few addresses each; more would not fit into a message."""

_RUN_ID = re.compile(r"[a-z2-7]{52}")
"""32 bytes in lower-case base32 without padding: survives being read aloud, upper-cased or taken for a host name."""
_ANY_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")
_AT = re.compile(r"([1-9][0-9]{0,17}):([0-9a-f]{64})")
_ADDRESS = re.compile(r"(/[\w.:~+=-]+)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class JoinLink:
    """All that a volunteer needs to join: the run id and the addresses of bootstraps."""

    run_id: str
    via: tuple[Address, ...]
    """Multiaddrs that end in `/p2p/<peer id>`: of bootstraps, and with the prefix `hivemind:` of a hivemind DHT's peers."""
    at: tuple[int, bytes] | None = None
    """The round and the hash of a certificate that the run's chain has; None if the link names none."""

    @property
    def bootstraps(self) -> tuple[Address, ...]:
        """The addresses of bootstraps."""
        return tuple(address for address in self.via if not address.startswith(HIVEMIND))

    @property
    def hivemind(self) -> tuple[Address, ...]:
        """The addresses of a hivemind DHT's peers, without the prefix."""
        return tuple(address.removeprefix(HIVEMIND) for address in self.via if address.startswith(HIVEMIND))

    def __str__(self) -> str:
        at = () if self.at is None else (f"at={self.at[0]}:{self.at[1].hex()}",)
        return f"flockstep://{self.run_id}?" + "&".join((*(f"via={address}" for address in self.via), *at))

    @classmethod
    def parse(cls, text: str) -> "JoinLink":
        """Parse a link from pasted text: wrapped, quoted, in angle brackets, escaped. Raises `UsageError`."""
        kept = re.sub(r"""[^!-~]|["'`<>]""", "", text)  # A link is ASCII: other characters come from the mail or the page.
        plain = unquote(kept).replace("&amp;", "&")
        start = re.search("flockstep://", plain, re.IGNORECASE)
        if start is None:
            raise _bad_link("it does not contain flockstep://")
        run_id, _, query = plain[start.end() :].rstrip(".,;)").partition("?")
        run_id = run_id.rstrip("/").lower()
        if len(run_id) != 52:
            raise _bad_link(f"its run id has {len(run_id)} characters instead of 52")
        if not _RUN_ID.fullmatch(run_id):
            raise _bad_link("its run id has characters other than a to z and 2 to 7")
        items = [item for item in query.split("&") if item]
        ats = {_parse_at(item) for item in items if item.startswith("at=")}
        if len(ats) > 1:
            raise _bad_link("it names two certificates")
        via = tuple(dict.fromkeys(_parse_via(item) for item in items if not item.startswith("at=")))
        if not 1 <= len(via) <= MAX_VIA:
            raise _bad_link(f"it has {len(via) or 'no'} via=… addresses; 1 to {MAX_VIA} are needed to find the run")
        return cls(run_id, via, next(iter(ats), None))


def is_run_id(text: str) -> bool:
    """Return True for the form of a run id."""
    return _RUN_ID.fullmatch(text) is not None


def _parse_at(item: str) -> tuple[int, bytes]:
    found = _AT.fullmatch(item.removeprefix("at=").lower())
    if found is None:
        raise _bad_link(f"{item[:80]} is not at=, a round, a colon and 64 hexadecimal digits")
    return int(found[1]), bytes.fromhex(found[2])


def _parse_via(item: str) -> Address:
    name, _, address = item.partition("=")
    if name != "via":
        raise _bad_link(f"this version does not know {name!r} in it")
    plain = address.removeprefix(HIVEMIND)
    if not _ADDRESS.fullmatch(plain) or len(plain) > 512:
        raise _bad_link(f"via={address[:80]} is not an address such as /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…")
    front, _, peer = plain.rpartition("/p2p/")
    known = is_peer_id(peer) if plain == address else _ANY_PEER_ID.fullmatch(peer)  # hivemind's have keys of other kinds.
    if not front or not known:
        raise _bad_link(f"via={address} does not end in /p2p/ and a peer id")
    return address


def _bad_link(why: str) -> UsageError:
    return UsageError(f"not a whole join link: {why}", remedy="copy the whole of it again, and give it between single quotes")
