"""js-libp2p at a bootstrap: identify, Kademlia, relay, other keys; needs the packages that scripts/test-references adds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flockstep
import pytest
import trio
from flockstep.dht.directory.kademlia import open_directory
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.host import open_host
from flockstep.peer.https.certificate import TlsCertificate
from flockstep.peer.https.serve import WebPlace
from flockstep.peer.identity import Identity
from flockstep.peer.libp2p.gate import OTHER_KEY
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.quota.limits import BootstrapLimits
from support.tls import Authority

PACKAGES = Path(sys.prefix) / "js"
pytestmark = pytest.mark.skipif(not (PACKAGES / "node_modules").is_dir(), reason="tests/support/js is not installed")
PROGRAM = Path(__file__).parents[1] / "support" / "js" / "peers.mjs"
KEY = f"/flockstep/{'a' * 52}"


async def peers_at(address: str, root: Path) -> dict[str, Any]:
    """Run the program against a bootstrap whose TLS this authority vouches for; returns what it found."""
    command = [str(Path(sys.prefix) / "bin" / "node"), "--input-type=module", "-", address, KEY]
    done = await trio.run_process(
        command,
        stdin=PROGRAM.read_bytes(),
        cwd=PACKAGES,
        env={**os.environ, "NODE_EXTRA_CA_CERTS": str(root)},
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", ["", "/ws", "/tls/ws"])
async def test_js_takes_a_bootstrap_into_its_table_finds_a_value_there_and_relays_through_it(
    way: str, tmp_path: Path
) -> None:
    events: list[Event] = []
    telemetry = Telemetry()
    telemetry.subscribe(lambda event: events.append(event) if event["event"] == "bootstrap.refused" else None)
    authority = Authority(tmp_path)
    place = WebPlace("127.0.0.1", 0, TlsCertificate(*authority.issue("127.0.0.1")) if "tls" in way else None)
    config = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
    with trio.fail_after(120):  # A safety net against a hang.
        async with (
            open_host(Identity.generate(), config, telemetry, bootstrap=BootstrapLimits(), web=(place,)) as host,
            open_directory(host, server=True, telemetry=telemetry, validate=lambda key, value: 1) as directory,
        ):
            await directory.put(KEY, b"a manifest")
            port = host._web[0].port if way else host.port
            found = await peers_at(f"/ip4/127.0.0.1/tcp/{port}{way}/p2p/{host.peer_id}", authority.root)
    assert found == {
        "agent": f"flockstep/{flockstep.__version__}",
        "table": [host.peer_id],
        "value": "a manifest",
        "relayed": True,
        "echoed": 4 << 20,
        "RSA": found["RSA"],
        "secp256k1": found["secp256k1"],
    }
    assert "connected" not in (found["RSA"], found["secp256k1"])
    assert (events[0]["reason"], events[0]["count"]) == (OTHER_KEY, 1)
