"""A bootstrap and a keeper as real processes export their events."""

from pathlib import Path

import pytest
from support.bootstraps import TINY_RUN, Bootstrap
from support.collector import collector
from support.commands import Command


def test_a_bootstrap_and_a_keeper_export_their_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(TINY_RUN)
    here = ("--host", "127.0.0.1", "--port", "0")
    with collector() as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", there.address)
        bootstrap = Bootstrap(tmp_path / "bootstrap")
        home = ("--home", str(tmp_path / "owner"))
        owner = Command("run", "create", str(tmp_path / "run.toml"), "--via", bootstrap.address(), *home, *here)
        try:
            for name in (b'"bootstrap.ready"', b'"peer.start"'):
                there.wait_for_text(name)
        finally:
            owner.kill()
            owner.wait()
            owner.stdout.close()
            bootstrap.kill()
