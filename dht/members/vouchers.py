"""Who vouches for the presence of whom: the members' words on the sessions that they have. Pure.

Theory of operation. A member states in `Met` with which peers it has had a session in the last minute. A peer that I have
not met myself counts if those that say so hold more than a third of the votes of the next round: keys are free, and a
stranger with a few sessions could otherwise vouch for any number of keys that are nowhere. Only the words of peers that
I have a session with count.

In a crowd, of more than 64 members, nobody meets everybody. There the members nearest to a fixed hash are its *witnesses*
(`NUM_WITNESSES`), everybody keeps a session with two thirds of them, and these are its *electors*: more than a third of
them must say so, and two at least. Any two choices share at least half of their members, more than the third that is
needed. Each peer has its own fixed choice, so a witness meets two thirds of the members. So it is, too, where the votes
are not known: in what is no run, as a test.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...peer.base.digest import keyed
from ...peer.base.errors import MalformedMessage
from ...peer.base.transport import PeerId
from ...peer.wire import MAX_MET, TAG_BYTES

NUM_WITNESSES = 24
CHOSEN_WITNESSES = 16
"""Two thirds of them."""
MIN_VOUCHERS = 2
"""One peer alone vouches for nobody: a newcomer's first contact could show it any number of keys."""
MAX_VOUCHERS = 64
"""Members whose words are kept, 32 kB of each at most: 2 MiB in all."""
WORD_LIFETIME = 60.0
"""Seconds that a word holds; three periods of `Met`."""
_KEPT = 3 * MAX_MET // 2

@lru_cache(maxsize=_KEPT)
def tag_of(peer: PeerId) -> bytes:
    """Return the tag by which `Met` names a peer. 8 bytes."""
    return keyed("tag of a peer", peer.encode())[:TAG_BYTES]


def tags_of(peers: Iterable[PeerId]) -> bytes:
    """Return the tags of peers as `Met` carries them, each once; of more than fit, the smallest tags.

    Two keys of one owner can share a tag (2³² keys): a list with a tag twice would be refused by everybody.
    """
    return b"".join(sorted(set(map(tag_of, peers)))[:MAX_MET])


def witness_order(peers: Iterable[PeerId]) -> list[PeerId]:
    """Return peers in the order in which they become witnesses."""
    return sorted(peers, key=tag_of)


def witnesses(members: Iterable[PeerId]) -> list[PeerId]:
    """Return the witnesses of a crowd of members."""
    return witness_order(members)[:NUM_WITNESSES]


def chosen_witnesses(members: Iterable[PeerId], me: PeerId) -> list[PeerId]:
    """Return the witnesses with which I keep a session: two thirds of them, others for each peer."""
    others = [peer for peer in witnesses(members) if peer != me]
    return sorted(others, key=lambda peer: _rank(me, peer))[:CHOSEN_WITNESSES]


@lru_cache(maxsize=_KEPT)
def _rank(me: PeerId, witness: PeerId) -> bytes:
    return keyed("choice of a witness", me.encode(), witness.encode())


class Vouchers:
    """The words of the members that vouch for others, the newest of each."""

    def __init__(self) -> None:
        self._words: dict[PeerId, tuple[npt.NDArray[np.uint64], float]] = {}
        self._electors: frozenset[PeerId] = frozenset()
        """Those of the last count, whose words are kept before those of others."""

    def __len__(self) -> int:
        return len(self._words)

    def hear(self, voucher: PeerId, tags: bytes, now: float) -> bool:
        """Take a member's word; returns False if it repeats one that holds, so that a count would find nothing new.

        Of too many words that of the member that was silent for the longest is forgotten, electors last. Raises
        `MalformedMessage` unless these are whole tags, in ascending order.
        """
        if len(tags) % TAG_BYTES:
            raise MalformedMessage(f"{len(tags)} bytes are no list of tags")
        met = np.frombuffer(tags, ">u8").astype(np.uint64)
        if np.any(met[1:] <= met[:-1]):
            raise MalformedMessage("tags out of order")
        before, until = self._words.pop(voucher, (met, now))
        self._words[voucher] = met, now + WORD_LIFETIME
        if len(self._words) > MAX_VOUCHERS:
            others = (peer for peer in self._words if peer not in self._electors)
            del self._words[next(others, next(iter(self._words)))]
        return until <= now or not np.array_equal(before, met)

    def vouched(
        self, electors: Collection[PeerId], peers: Sequence[PeerId], now: float, votes: Mapping[PeerId, int] | None = None
    ) -> frozenset[PeerId]:
        """Return those of these peers for whose presence the electors vouch, with more than a third of these `votes`.

        Without votes each elector has one, and two must vouch.
        """
        self._electors = frozenset(peer for peer in electors if votes is None or votes.get(peer))
        if not peers or (votes is None and len(self._electors) < MIN_VOUCHERS):
            return frozenset()
        weights = dict.fromkeys(self._electors, 1) if votes is None else votes
        tags = np.frombuffer(b"".join(map(tag_of, peers)), ">u8").astype(np.uint64)
        said, heads = np.zeros(len(peers), np.int64), np.zeros(len(peers), np.int64)
        for elector in self._electors:
            met, until = self._words.get(elector, (None, now))
            if met is not None and until > now and len(met):
                found = met[np.minimum(np.searchsorted(met, tags), len(met) - 1)] == tags
                said += np.int64(weights[elector]) * found
                heads += found
        enough = 3 * said > sum(weights.values())
        if votes is None:
            enough &= heads >= MIN_VOUCHERS
        return frozenset(peer for peer, each in zip(peers, enough, strict=True) if each)
