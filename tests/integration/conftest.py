"""Fixtures: a bootstrap as a process, and runs that are published through it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flockstep.peer import address
from support.bootstraps import Bootstrap, publish_run

Publish = Callable[..., str]


@pytest.fixture(scope="module")
def bootstrap_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The multiaddr of a bootstrap."""
    bootstrap = Bootstrap(tmp_path_factory.mktemp("bootstrap"))
    yield bootstrap.address()
    bootstrap.kill()


@pytest.fixture
def open_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of loopback count as public, so that bootstraps dial them back."""
    monkeypatch.setattr(address, "is_public_ip", lambda ip: True)


@pytest.fixture
def publish(bootstrap_address: str, tmp_path: Path) -> Publish:
    """Publishes the run that a `run.toml` describes for the peer with the home folder `owner`; returns its link."""

    def published(toml: str, owner: str = "") -> str:
        return publish_run(toml, (bootstrap_address,), tmp_path / owner)

    return published
