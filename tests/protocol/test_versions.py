"""A swarm of two versions: a later one has further fields in its messages and records, and further kinds of messages."""

from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from flockstep.collectives.accountability import signing
from flockstep.dht.members import table
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.session import HEAD_BYTES, MESSAGE, SESSION_PROTOCOL
from flockstep.peer.wire.framing import frame
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign_encoded
from support.keepers import KeptRun, all_at, in_memory, kept_run, key

KEEPER = 10
NEW_KIND = 0xF0
NEWER = frozenset(key(number).peer_id for number in (1, KEEPER, KEEPER + 2))
"""Who runs the later version: half of those that train, and half of the keepers."""
STRICT = {wire.code_of_kind(kind) for kind in (wire.Prevote, wire.Precommit, wire.Appointment)}


def grown(data: bytes, *, at: int) -> bytes:
    """Return an encoded message with all fields up to the one at `at` written out, and a further one behind."""
    known = msgpack.unpackb(data)
    return bytes(msgpack.packb([*known, *([b""] * (at - len(known))), "of a later version"]))


NUM_FIELDS = {wire.code_of_kind(wire.Roster): 7}
"""The fields of messages that have added ones already."""


def sign_as_later(me: Identity, code: int, payload: bytes) -> wire.Signed:
    if me.peer_id in NEWER and code not in STRICT:
        payload = grown(payload, at=NUM_FIELDS.get(code, 0))
    return sign_encoded(me, code, payload)


def encode_as_later(message: object) -> bytes:
    """Members of both versions write later bodies here: who encodes one is not known at this place."""
    return grown(encode(message), at=0)


async def send_new_kinds(run: KeptRun) -> None:
    """The later ones send everybody messages of kinds that the others do not know."""
    while True:
        for peer in [*run.peers.values()]:
            if peer.peer not in NEWER or peer.node is None:
                continue
            for other in [*run.peers.values()]:
                if other is not peer:
                    signed = wire.Signed(peer.peer, NEW_KIND, b"new", peer.identity.sign(wire.signed_bytes(NEW_KIND, b"new")))
                    peer.node.send(other.peer, signed)
                    stream = await peer.node.transport.open_stream(other.peer, SESSION_PROTOCOL)
                    await stream.send_all(frame(bytes((MESSAGE,)) + bytes(HEAD_BYTES - 1) + bytes((NEW_KIND,)) + b"\x91\x01"))
                    await trio.sleep(0.1)
                    await stream.aclose()
        await trio.sleep(3)


def test_two_versions_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "sign_encoded", sign_as_later)
    monkeypatch.setattr(table, "encode", encode_as_later)

    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers: list[Any] = [run.train(number) for number in range(2)]
        everybody = [*keepers, *trainers]
        await run.until(lambda: all_at(everybody, 1))
        run.start(send_new_kinds)
        await run.until(lambda: all_at(everybody, 4))
        late = run.train(7)
        await run.until(lambda: all_at([*everybody, late], 6))
        for peer in (*everybody, late):
            assert not peer.named("peer.charged")
            assert not peer.named("peer.banned")
            assert not [event for event in peer.named("round.void") if event["reason"] != "no member that trains is ready"]
            assert set(peer.named("round.done")[1]["roster"]) >= {it.peer for it in trainers}
        refused = [event for peer in everybody for event in peer.events if "of a version that I do not know" in str(event)]
        assert {event["peer"] for event in refused} <= NEWER
        assert len({event["peer"] for event in refused}) >= 2  # Keepers': those that train have no node here.

    run_virtual(lambda: in_memory(kept_run(4, first=KEEPER, rule="gramguard"), tmp_path, body), seed=0)
