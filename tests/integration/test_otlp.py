"""A bootstrap and a keeper as real processes export their events; one of them is that nothing can be published."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.bootstraps import TINY_RUN, Bootstrap
from support.collector import collector
from support.commands import Command
from support.shelves import shelf_at


def test_a_bootstrap_and_a_keeper_export_their_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    (tmp_path / "run.toml").write_text(TINY_RUN)
    owner = ("--home", str(tmp_path / "owner"), "--host", "127.0.0.1", "--port", "0")
    started: list[Command] = []
    with collector() as there, shelf_at("hf") as shelf:
        shelf.refuses = True
        for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": there.address, "HF_ENDPOINT": shelf.endpoint}.items():
            monkeypatch.setenv(name, value)
        bootstrap = Bootstrap(tmp_path / "bootstrap")
        try:
            started.append(
                Command("run", "create", str(tmp_path / "run.toml"), "--via", bootstrap.address(), *owner)
            )
            link = next(line.split("'")[1] for line in started[0].stdout if "flockstep join" in line)
            there.wait_for_text(b'"bootstrap.ready"')
            started[0].kill()
            started[0].wait()
            started.append(Command("keep", link, *owner, "--publish", "hf://org/name", "--yes"))
            there.wait_for_text(b'"peer.start"')
            there.wait_for_text(b'"checkpoint.unpublished"')
            assert any("nothing is published: cannot upload to hf://org/name" in line for line in started[1].stdout)
        finally:
            for process in started:
                process.kill()
                process.wait()
                process.stdout.close()
            bootstrap.kill()


def test_a_keeper_beside_a_bootstrap_exports_its_events(
    publish: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = publish(TINY_RUN, "owner")
    with collector() as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", there.address)
        bootstrap = Bootstrap(tmp_path / "bootstrap", "--keep", link)
        try:
            there.wait_for_text(b'"peer.start"')  # No event of a bootstrap.
        finally:
            bootstrap.kill()
