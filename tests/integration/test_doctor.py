"""`flockstep doctor` and `join` as commands, on a computer that cannot hold the run's model."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flockstep.scripts.cli import main
from flockstep.scripts.demo.processes import descendants, running
from support.bootstraps import TINY_RUN, Bootstrap, publish_run
from support.connect_proxy import connect_proxy
from support.tls import Authority

HUGE = """
name = "huge"
[model]
layers = 1000
width = 65536
heads = 64
[data]
source = "text:{stdlib}"
"""
"""52 T parameters: more memory than any computer has, and more disk."""


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["flockstep", *words, "--host", "127.0.0.1", "--port", "0", "--no-upnp"])
        with pytest.raises(SystemExit) as ended:
            main.main()
    return ended.value.code, *capsys.readouterr()


def test_too_little_memory_and_disk(
    publish: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, home = publish(HUGE), tmp_path / "never made"
    code, out, err = said(capsys, "doctor", link, "--home", str(home), "--json")
    assert (code, err) == (1, "")
    assert not home.exists()
    checks = [json.loads(line) for line in out.splitlines()]
    assert all(set(check) == {"name", "ok", "cause", "remedy"} for check in checks)
    (router,) = [check for check in checks if check["name"] == "UPnP"]
    assert (router["ok"], router["cause"]) == (None, "switched off by --no-upnp")
    failed = {check["name"]: check for check in checks if check["ok"] is False}
    assert set(failed) == {"memory", "disk"}

    code, told, error = said(capsys, "join", link, "--home", str(tmp_path / "home"), "--yes")
    assert code == 1
    for name, words, output in (
        ("memory", "too little memory: the run's model of 51.5 T parameters needs 1.3 PB", error),
        ("disk", "free, the checkpoint and results of the run need 1.1 PB", told),
    ):
        (line,) = [line for line in output.splitlines() if words in line]
        assert words in failed[name]["cause"]
        assert failed[name]["remedy"] in line


@pytest.mark.skipif(os.name == "nt", reason="Windows has no sched_yield")
def test_a_doctor_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flockstep", "doctor", "--home", str(tmp_path / "home"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as doctor:
        while not (children := descendants(doctor.pid)):
            assert doctor.poll() is None
        doctor.kill()
    while children & running():
        os.sched_yield()
    assert not list(tmp_path.iterdir())


def test_only_https_leaves_this_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "tls")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    chain, key = map(str, authority.issue("127.0.0.1"))
    options = ("--wss", "127.0.0.1:0", "--tls-certificate", chain, "--tls-key", key)
    bootstrap = Bootstrap(tmp_path / "bootstrap", *options)
    with socket.socket() as dead, socket.socket() as outside:
        for one in (dead, outside):
            one.bind(("127.0.0.1", 0))  # Nobody listens there.
        ports = [one.getsockname()[1] for one in (dead, outside)]
        plain, secure = bootstrap.address(), bootstrap.address()
        peer, port = plain.rpartition("/p2p/")[2], secure.split("/")[4]
        try:
            signed = publish_run(TINY_RUN, (plain,), tmp_path / "owner")
            addresses = f"/ip4/127.0.0.1/tcp/{ports[0]}", f"/ip4/127.0.0.1/tcp/{ports[1]}/tls/ws"
            link = signed.partition("?")[0] + "?" + "&".join(f"via={one}/p2p/{peer}" for one in addresses)
            with connect_proxy("--map", f"127.0.0.1:{ports[1]}=127.0.0.1:{port}") as proxy:
                where = f"127.0.0.1:{proxy.port}"
                monkeypatch.setenv("HTTPS_PROXY", f"http://{where}")
                _, out, _ = said(capsys, "doctor", link, "--home", str(tmp_path / "home"), "--json")
                checks = {check["name"]: check for check in map(json.loads, out.splitlines())}
                assert checks["bootstrap 1: TCP"]["ok"] is None
                assert checks["bootstrap 1: TCP"]["cause"].endswith("; it is reached over HTTPS")
                assert checks["bootstrap 2: TCP"]["cause"] == f"{addresses[1]} answers, through the proxy {where}"
                assert checks["bootstrap 2: DHT"]["ok"] is True
                assert f": only HTTPS leaves this network, through the proxy {where}" in checks["reachability"]["cause"]
            with connect_proxy("--only-port", "443") as proxy:
                where = f"127.0.0.1:{proxy.port}"
                monkeypatch.setenv("HTTPS_PROXY", f"http://{where}")
                code, out, _ = said(capsys, "doctor", link, "--home", str(tmp_path / "home"), "--json")
                failed = {check["name"]: check for check in map(json.loads, out.splitlines()) if check["ok"] is False}
                assert code == 1
                assert failed["bootstrap 1: TCP"]["cause"].startswith(f"{addresses[0]}: the bootstrap is down: connection")
                answer = f"{where} answered 403 Forbidden to CONNECT 127.0.0.1:{ports[1]}"
                words = f"{addresses[1]}: the HTTPS proxy refuses the connection: {answer}"
                assert failed["bootstrap 2: TCP"]["cause"] == words
                assert "ask its operator to allow CONNECT" in failed["bootstrap 2: TCP"]["remedy"]
        finally:
            bootstrap.kill()
