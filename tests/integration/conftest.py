"""A bootstrap in a process of its own, and runs that are published through it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flockstep.dht.meeting import publish_manifest
from flockstep.dht.runs import JoinLink, Manifest, SignedManifest
from flockstep.peer.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.telemetry import Telemetry

Publish = Callable[[str], str]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The multiaddr of a bootstrap."""
    home = tmp_path_factory.mktemp("bootstrap")
    command = [sys.executable, "-u", "-m", "flockstep", "bootstrap", "--home", str(home), "--host", "127.0.0.1"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(word for line in process.stdout for word in line.split() if word.startswith("/ip4/"))
        yield address
        process.terminate()


@pytest.fixture
def publish(door: str, tmp_path: Path) -> Publish:
    """Publishes the run that a `run.toml` describes; returns its link."""

    def publish_run(toml: str) -> str:
        identity = Identity.generate()
        manifest = Manifest.from_toml(toml, where="run.toml", owner=identity.peer_id)
        signed = SignedManifest.sign(manifest, identity)
        link = JoinLink(signed.run_id, (door,))
        publish_manifest(signed, link, PeerConfig(home=tmp_path, host="127.0.0.1", port=0), Telemetry())
        return str(link)

    return publish_run
