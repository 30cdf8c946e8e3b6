"""A run announced in a hivemind DHT and found through it; needs `flockstep[hivemind]`: scripts/test-references."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import trio
from flockstep.dht.hivemind.directory import HivemindDirectory
from flockstep.dht.keys import member_key, run_key
from flockstep.dht.members.body import MEMBER_KIND, MemberBody
from flockstep.dht.members.table import LIFETIME
from flockstep.dht.published import validate_published
from flockstep.dht.records import Record
from flockstep.dht.rendezvous import fetch_manifest, publish_manifest
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Data, Manifest, SignedManifest
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.schema import encode
from support.loopback import LOOPBACK
from support.recorded import recorded

# Not `importorskip`: hivemind and libp2p cannot be imported into one process.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("hivemind") is None, reason="flockstep[hivemind] is missing")

NODE = """
import json, sys, hivemind
from hivemind.utils import get_dht_time
dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
for line in sys.stdin:
    key, subkey, value = json.loads(line)
    dht.store(key, bytes.fromhex(value), get_dht_time() + 600, subkey=subkey)
    print("stored", flush=True)
dht.shutdown()
"""
PEER = Identity.from_seed(bytes([1]) * 32)


class Stranger:
    """A node of the DHT that belongs to nobody of ours, and stores what it likes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.addresses: list[str] = json.loads(self._process.stdout.readline())

    def store(self, key: str, subkey: str, value: bytes) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([key, subkey, value.hex()]).encode() + b"\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"stored\n"

    def end(self) -> None:
        self._process.communicate(timeout=120)


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    node = Stranger()
    yield node
    node.end()


def signed_run() -> SignedManifest:
    owner = Identity.generate()
    return SignedManifest.sign(Manifest(owner.peer_id, "found elsewhere", Data("text:{stdlib}")), owner)


def record_of(run_id: str, *addresses: str) -> bytes:
    body = encode(MemberBody("training", addresses))
    fields = {"run": run_id, "kind": MEMBER_KIND, "sequence": 1, "lifetime": LIFETIME}
    return Record.sign(PEER, body=body, **fields).encode()  # type: ignore[arg-type]  # Mixed values.


def test_a_run_is_published_and_found_through_a_hivemind_dht_alone(stranger: Stranger) -> None:
    signed = signed_run()
    link = JoinLink.parse(f"flockstep://{signed.run_id}?via=hivemind:{stranger.addresses[0]}")
    assert link.bootstraps == ()
    publish_manifest(signed, link, LOOPBACK, Telemetry())
    assert fetch_manifest(link, LOOPBACK, Telemetry()) == signed
    other = replace(link, run_id="a" * 52)
    with pytest.raises(NetworkError, match="know no run"):
        fetch_manifest(other, LOOPBACK, Telemetry())


async def test_members_are_found_with_their_addresses_and_junk_is_told(stranger: Stranger) -> None:
    run_id, address = signed_run().run_id, "/ip4/127.0.0.1/tcp/4001"
    telemetry, events = recorded()

    directory = HivemindDirectory(telemetry, validate_published)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.run, stranger.addresses[:1])
        await directory.put(member_key(run_id, PEER.peer_id), record_of(run_id, address))
        stranger.store(f"flockstep/{run_id}/members", Identity.generate().peer_id, record_of(run_id, address))
        stranger.store(f"flockstep/{run_id}/run", "manifest", b"junk")
        assert await directory.find(run_id) == (PEER.peer_id,)
        assert directory.addresses(PEER.peer_id) == (address,)
        assert await directory.get(run_key(run_id)) is None
        nursery.cancel_scope.cancel()
    assert [event["event"] for event in events] == ["directory.junk"] * 2


def test_a_dht_that_is_not_there_is_told(stranger: Stranger) -> None:
    dead = stranger.addresses[0].rpartition("/tcp/")[0] + "/tcp/9/p2p/" + stranger.addresses[0].rpartition("/")[2]
    link = JoinLink("a" * 52, (f"hivemind:{dead}",))
    with pytest.raises(NetworkError, match="hivemind DHT is not there"):
        fetch_manifest(link, LOOPBACK, Telemetry())
