"""`flockstep bootstrap`, as an async function and as a real process."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from flockstep.dht.run.link import JoinLink
from flockstep.peer.address import split_p2p
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.home_lock import home_lock
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry, log_path, read_events
from flockstep.scripts.peers.bootstrap import BootstrapOptions, keep_bootstrap
from support.bootstraps import TINY_RUN, Bootstrap, publish_run
from support.commands import Command, flockstep
from support.tls import Authority

RUN = "a" * 52
LINK = f"flockstep://{RUN}?via=/ip4/127.0.0.1/tcp/9/p2p/{Identity.from_seed(bytes(32)).peer_id}"


@pytest.mark.parametrize("command", [["bootstrap"], ["join", LINK]])
def test_a_second_process_with_one_home_ends_with_one_line(tmp_path: Path, command: list[str]) -> None:
    with home_lock(tmp_path, pid=os.getpid()):
        ended = flockstep(*command, "--home", str(tmp_path), "--port", "0")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"another process (pid {os.getpid()}) uses the home folder {tmp_path}" in line


def test_a_bootstrap_and_a_run_are_made_on_one_computer_without_a_word_about_their_homes(tmp_path: Path) -> None:
    environment = {**os.environ, "FLOCKSTEP_HOME": str(tmp_path / "home")}
    (tmp_path / "run.toml").write_text(TINY_RUN)
    with Command("bootstrap", "--host", "127.0.0.1", "--port", "0", env=environment) as bootstrap:
        address = next(word for line in bootstrap.stdout for word in line.split() if word.startswith("/ip4/"))
        arguments = ["run", "create", str(tmp_path / "run.toml"), "--via", address]
        with Command(*arguments, env=environment) as keeper:
            assert any(line.startswith("keeps the run as") for line in keeper.stdout)
            keeper.send_signal(signal.SIGTERM)
        bootstrap.send_signal(signal.SIGTERM)


def test_a_bootstrap_whose_port_is_taken_ends_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ended = flockstep("bootstrap", "--home", str(tmp_path), "--host", "127.0.0.1", "--port", port)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"port {port} is taken on 127.0.0.1" in line
    assert "--port" in line.partition(" — ")[2]


def test_a_link_to_follow_needs_a_certificate(tmp_path: Path) -> None:
    ended = flockstep("bootstrap", "--follow", LINK, "--home", str(tmp_path), "--port", "0")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "names no certificate" in line
    assert "&at=" in line


def test_a_bootstrap_with_a_new_key_knows_the_runs_whose_records_it_was_given(tmp_path: Path) -> None:
    old, homes = Bootstrap(tmp_path / "old"), [tmp_path / "old", tmp_path / "new"]
    try:
        link = JoinLink.parse(publish_run(TINY_RUN, (old.address(),), tmp_path / "owner"))
    finally:
        old.kill()
    homes[1].mkdir()
    shutil.copy(homes[0] / "directory", homes[1])
    new = Bootstrap(homes[1])
    try:
        there = replace(link, via=(new.address(),))
        shown = flockstep("run", "info", str(there), "--home", str(tmp_path / "visitor"), check=True)
    finally:
        new.kill()
    assert f"run {link.run_id}" in shown.stdout
    assert 'name = "tiny"' in shown.stdout


@pytest.mark.skipif(os.name != "posix", reason="a process of Windows cannot be sent these")
def test_the_process_says_where_it_is_and_leaves_when_told(tmp_path: Path) -> None:
    command = (
        "from pathlib import Path; from flockstep.peer.base.config import PeerConfig; "
        "from flockstep.scripts.peers.bootstrap import BootstrapOptions, run_bootstrap; "
        f"run_bootstrap(PeerConfig(home=Path({str(tmp_path)!r}), host='127.0.0.1', port=0), BootstrapOptions(),"
        " lambda line: print(line, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    _, peer = split_p2p(process.stdout.readline().strip())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")
    assert peer == Identity.load_or_create(tmp_path / "identity.key").peer_id
    events = [event["event"] for _, event in read_events(log_path(tmp_path))]
    assert events == ["bootstrap.ready", "bootstrap.left"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--wss", "127.0.0.1:0"], "--wss, --tls-certificate and --tls-key need one another"),
        (["--ws", "nowhere"], "--ws 'nowhere' is not HOST:PORT"),
        (["--wss", "127.0.0.1:0", "--tls-certificate", "no.pem", "--tls-key", "no.pem"], "are no certificate: No such file"),
    ],
)
def test_websockets_that_cannot_be_are_refused_in_one_line(tmp_path: Path, options: list[str], says: str) -> None:
    ended = flockstep("bootstrap", *options, "--home", str(tmp_path), "--port", "0")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert says in line


async def test_a_bootstrap_says_where_it_accepts_websockets(tmp_path: Path) -> None:
    chain, key = Authority(tmp_path / "tls").issue("localhost")
    options = BootstrapOptions(ws="127.0.0.1:0", wss="127.0.0.1:0", tls_certificate=chain, tls_key=key)
    told: list[Sequence[str]] = []
    events: list[Event] = []
    telemetry = Telemetry()
    telemetry.subscribe(lambda event: events.append(event) if event["event"] == "websocket.ready" else None)

    announce = ("/dns/boot.example.org/tcp/443/tls/ws",)
    config = PeerConfig(home=tmp_path, host="127.0.0.1", port=0, announce=announce)
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:

            def ready(addresses: Sequence[str]) -> None:
                told.append(addresses)
                nursery.cancel_scope.cancel()

            await keep_bootstrap(config, options, telemetry=telemetry, ready=ready)
    assert [event["step"] for event in events] == ["ws", "wss"]
    plain, announced, secure = (address.partition("/p2p/")[0] for address in told[0])
    assert plain.startswith("/ip4/127.0.0.1/tcp/")
    assert (announced, secure) == ("/dns/boot.example.org/tcp/443/tls/ws", f"/dns/localhost/tcp/{events[1]['port']}/tls/ws")
