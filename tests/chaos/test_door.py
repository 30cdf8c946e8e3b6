"""Bootstraps under attack, killed and restarted."""

from pathlib import Path
from time import sleep

import pytest
import trio
from chaos.door import NOT_EXEMPT, Door, come_in, free_port, newcomer_finds, one_member, stranger
from chaos.floods import FLOODS, LIMITED, persist
from flockstep.dht.rendezvous import fetch_manifest
from flockstep.dht.run.link import JoinLink
from flockstep.peer.base.errors import ConnectFailed
from flockstep.peer.log.telemetry import Telemetry
from support.bootstraps import publish_run
from support.loopback import LOOPBACK
from support.trainers import RUN

TOML = RUN.format(rounds=9, peers=2)


def test_a_newcomer_gets_in_beside_all_floods_at_once_and_each_meets_its_limit(tmp_path: Path) -> None:
    door = Door(tmp_path / "door", *NOT_EXEMPT)
    link = JoinLink.parse(publish_run(TOML, (door.address,), tmp_path / "owner"))

    async def main() -> None:
        async with one_member(door, link) as member, trio.open_nursery() as nursery:
            before = door.rss()
            for number, flood in enumerate(FLOODS.values()):
                nursery.start_soon(persist, door, f"127.92.0.{number + 1}", link, flood)
            for limited in LIMITED:
                while not await trio.to_thread.run_sync(door.refused, limited):
                    await newcomer_finds(door, link, member)
            assert door.rss() < before + 60
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        door.bootstrap.kill()


def test_one_bootstrap_stands_in_for_the_other_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    first_port = free_port()
    first = Door(tmp_path / "first", port=first_port)
    second = Door(tmp_path / "second", "--via", first.address)
    first.bootstrap.kill()
    first = Door(tmp_path / "first", "--via", second.address, port=first_port)  # No bootstrap dials a loopback address back.
    try:
        while min(door.figures()["flockstep_servers"] for door in (first, second)) < 1:
            sleep(0.05)
        link = JoinLink.parse(publish_run(TOML, (first.address,), tmp_path / "owner"))
        both = JoinLink(link.run_id, (first.address, second.address))

        async def be_there() -> None:
            async with one_member(first, link):
                pass

        trio.run(be_there)
        first.bootstrap.kill()
        assert fetch_manifest(both, LOOPBACK, Telemetry()).run_id == link.run_id
        second.bootstrap.kill()
        with pytest.raises(ConnectFailed, match=r"any bootstrap of the link.*connection refused") as caught:
            fetch_manifest(both, LOOPBACK, Telemetry())
        assert "ask for a new one" in caught.value.remedy
        first = Door(tmp_path / "first", port=first_port)
        assert first.address in both.via  # The same place and the same identity.
        assert fetch_manifest(both, LOOPBACK, Telemetry()).run_id == link.run_id

        async def ask() -> int:
            async with stranger("127.0.0.1") as (host, directory):
                await come_in(first, host, directory)
                return len(await directory.find(link.run_id))

        assert trio.run(ask) == 1
    finally:
        first.bootstrap.kill()
        second.bootstrap.kill()
