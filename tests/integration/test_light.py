"""Bootstraps that follow the heads of their runs on real hosts, some of which lie, and newcomers that ask them."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.collectives.chain.chain import Head
from flockstep.collectives.chain.head import RunValues, validate_run_value
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.chain.losses import Losses
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.chain.replay import serve_ledger
from flockstep.collectives.light import follower
from flockstep.collectives.light.anchor import ask_named
from flockstep.collectives.light.marks import Mark, Marks
from flockstep.collectives.spec import charter_of
from flockstep.dht.directory.interface import Directory
from flockstep.dht.keys import head_key, named_key, run_key
from flockstep.dht.rendezvous import open_bootstrap_host, open_bootstraps
from flockstep.dht.run.link import JoinLink
from flockstep.optim.member.reach import reach_run
from flockstep.peer.address import split_p2p
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError, NetworkError, UsageError, sole_error
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.node.node import Node
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from flockstep.scripts.peers.bootstrap import BootstrapOptions, keep_bootstrap
from support.bootstraps import TINY_RUN, Bootstrap
from support.certificates import certify
from support.commands import Command, flockstep
from support.light import KEEPERS, SIGNED, chain_of, mark_of
from support.recorded import recorded

RUN = SIGNED.run_id
CHAIN = chain_of(30)
HEAD = mark_of(CHAIN[-1])
FORK = Marks(RUN, (Mark(30, bytes(range(32))),))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "TURN_PERIOD", 0.1)
    monkeypatch.setattr(follower, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(follower, "LONGEST_FOLLOW_PAUSE", 0.1)


def settings(home: Path) -> PeerConfig:
    return PeerConfig(home=home, host="127.0.0.1", port=0)


@asynccontextmanager
async def honest(homes: Sequence[Path]) -> AsyncIterator[list[str]]:
    """Bootstraps with these home folders; yields their addresses."""
    found: dict[Path, str] = {}
    async with trio.open_nursery() as nursery:
        for home in homes:
            ready = trio.Event()

            def take(addresses: Sequence[str], home: Path = home, ready: trio.Event = ready) -> None:
                found[home] = addresses[0]
                ready.set()

            async def serve(home: Path = home, take: object = take) -> None:
                await keep_bootstrap(settings(home), BootstrapOptions(), telemetry=Telemetry(), ready=take)  # type: ignore[arg-type]

            nursery.start_soon(serve)
            await ready.wait()
        yield [found[home] for home in homes]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def liar(home: Path, value: bytes) -> AsyncIterator[str]:
    """A bootstrap that names these bytes; yields its address."""
    identity = Identity.load_or_create(home / "identity.key")
    opened = open_bootstrap_host(identity, settings(home), Telemetry(), BootstrapLimits(), validate_run_value)
    async with opened as (host, directory):
        assert directory.server is not None
        directory.server.answer_for = {named_key(RUN): value}.get
        yield f"{host.addresses()[0]}/p2p/{identity.peer_id}"


@asynccontextmanager
async def member(link: JoinLink, home: Path) -> AsyncIterator[Directory]:
    """A keeper of the run with its whole chain, which it has published through the bootstraps of a link."""
    config, telemetry = settings(home), Telemetry()
    async with (
        open_bootstraps(KEEPERS[0], link, config, telemetry, validate_run_value) as (host, directory),
        Node(host, KEEPERS[0], config, telemetry) as node,
    ):
        charter = charter_of(SIGNED)
        ledger = Ledger.open(home / "ledger", RUN, verify=verify_signed, telemetry=telemetry, charter=charter)
        ledger.follow(CHAIN)
        serve_ledger(node, RUN, ledger, Losses(home / "losses", telemetry))
        await directory.put(run_key(RUN), SIGNED.publishable)
        await directory.put(head_key(RUN), pack_certificate(CHAIN[-1]))
        await directory.provide(RUN)
        yield directory


async def until_named(directory: Directory, link: JoinLink, peers: set[str]) -> None:
    """Wait until these bootstraps name the head."""
    while True:
        named = await ask_named(directory, link, Telemetry())
        if {peer for peer, marks in named.items() if marks is not None and marks.head == HEAD} >= peers:
            return
        await trio.sleep(0.1)


async def start_of(link: JoinLink, home: Path) -> tuple[Head | None, list[Event]]:
    """Where a newcomer with a new home folder starts, and its events."""
    telemetry, events = recorded()
    try:
        async with reach_run(link, settings(home), telemetry) as reached:
            return reached.anchor, events
    except BaseExceptionGroup as group:
        raise sole_error(group) from None


def with_a_chain(home: Path) -> Path:
    """A home folder with the ledger of a peer that has been in the run."""
    ledger = home / "runs" / RUN / "ledger"
    ledger.parent.mkdir(parents=True)
    ledger.write_bytes(b"certificates")
    return home


def peers_of(addresses: Sequence[str]) -> set[str]:
    return {split_p2p(address)[1] for address in addresses}


async def test_two_that_follow_the_run_outvote_one_that_names_a_fork(tmp_path: Path) -> None:
    async with honest([tmp_path / "a", tmp_path / "b"]) as true, liar(tmp_path / "c", encode(FORK)) as false:
        link = JoinLink(RUN, (*true, false))
        async with member(link, tmp_path / "member") as directory:
            await until_named(directory, link, peers_of(true))
            anchor, events = await start_of(link, tmp_path / "newcomer")
            assert anchor == Head(HEAD.round, HEAD.hash, 0)
            (event,) = [event for event in events if event["event"] == "anchor.outvoted"]
            assert event["peer"] == split_p2p(false)[1]
            (chosen,) = [event for event in events if event["event"] == "anchor.chosen"]
            assert chosen["round"] == 30


async def test_a_newcomer_stops_where_two_bootstraps_disagree_unless_its_link_names_a_certificate(tmp_path: Path) -> None:
    async with honest([tmp_path / "a"]) as true, liar(tmp_path / "c", encode(FORK)) as false:
        link = JoinLink(RUN, (*true, false))
        async with member(link, tmp_path / "member") as directory:
            await until_named(directory, link, peers_of(true))
            with pytest.raises(UsageError, match="disagree") as caught:
                await start_of(link, tmp_path / "newcomer")
            for head, peer in ((HEAD, split_p2p(true[0])[1]), (FORK.head, split_p2p(false)[1])):
                assert f"{head} by {peer}" in str(caught.value)
            assert "&at=" in caught.value.remedy
            home = ("--home", str(tmp_path / "process"), "--host", "127.0.0.1", "--port", "0", "--yes")
            ended = await trio.to_thread.run_sync(flockstep, "keep", str(link), *home)
            assert ended.returncode == 2
            (line,) = ended.stderr.splitlines()
            assert "disagree" in line
            assert (await start_of(link, with_a_chain(tmp_path / "known")))[0] is None  # It has a chain of its own.
            at = JoinLink(RUN, link.via, (HEAD.round, HEAD.hash))
            assert (await start_of(at, tmp_path / "other"))[0] == Head(HEAD.round, HEAD.hash, 0)


@pytest.mark.parametrize("junk", [bytes(70_000), encode(Marks("b" * 52, FORK.marks))], ids=len)
async def test_a_bootstrap_that_names_junk_does_not_count(tmp_path: Path, junk: bytes) -> None:
    async with honest([tmp_path / "a"]) as true, liar(tmp_path / "c", junk) as false:
        link = JoinLink(RUN, (*true, false))
        async with member(link, tmp_path / "member") as directory:
            await until_named(directory, link, peers_of(true))
            anchor, events = await start_of(link, tmp_path / "newcomer")
            assert anchor == Head(HEAD.round, HEAD.hash, 0)
            charged = [event["peer"] for event in events if event["event"] == "peer.charged"]
            assert charged == [split_p2p(false)[1]]


async def test_nobody_can_publish_what_a_bootstrap_names(tmp_path: Path) -> None:
    async with honest([tmp_path / "a"]) as true:
        link = JoinLink(RUN, tuple(true))
        telemetry = Telemetry()
        opened = open_bootstraps(Identity.generate(), link, settings(tmp_path), telemetry, lambda key, value: 1)
        async with opened as (_host, directory):
            with pytest.raises((LocalError, NetworkError)):
                await directory.put(named_key(RUN), encode(FORK))
            assert await ask_named(directory, link, telemetry) == {split_p2p(true[0])[1]: None}


def test_a_bootstrap_process_follows_a_run_over_a_kill_and_newcomers_start_from_it(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TINY_RUN)
    here = ("--host", "127.0.0.1", "--port", "0")

    def join(name: str) -> Command:
        return Command("join", link, "--home", str(tmp_path / name), *here, "--threads", "1", "--json", "--yes")

    def event(process: Command, name: str, least: int = 0) -> dict[str, Any]:
        for line in process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found["event"] == name and found.get("round", 0) >= least:
                return found
        raise AssertionError(f"it ended without {name}")

    bootstrap = Bootstrap(tmp_path / "bootstrap")
    address = bootstrap.address()
    started = [Command("run", "create", str(toml), "--via", address, "--home", str(tmp_path / "owner"), *here)]
    try:
        link = next(line.split("'")[1] for line in started[0].stdout if "flockstep://" in line)
        started.append(join("anna"))
        event(started[-1], "round.done", 3)
        bootstrap.kill()
        port = int(split_p2p(address)[0].rsplit("/", 1)[1])
        bootstrap = Bootstrap(tmp_path / "bootstrap", port=port)
        assert bootstrap.address() == address
        shown = ""
        while not shown:
            visit = ("run", "info", link, "--home", str(tmp_path / "visitor"), "--json")
            shown = json.loads(flockstep(*visit, check=True).stdout)["bootstraps"][split_p2p(address)[1]]
        round_ = int(shown.partition(":")[0])
        started.append(join("bert"))
        assert event(started[-1], "anchor.chosen")["round"] >= round_ > 0
        assert event(started[-1], "state.synced")["round"] >= round_
    finally:
        bootstrap.kill()
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_head_that_free_keys_have_signed_displaces_none_of_a_run_whose_manifest_is_known(tmp_path: Path) -> None:
    free_key = (Identity.generate(),)
    last = certify(None, 1, run=RUN, roster=free_key)
    for _ in CHAIN:  # A later round than the real one.
        last = certify(last, 1, run=RUN, roster=free_key)
    made_up = pack_certificate(last)
    real = pack_certificate(CHAIN[-1])

    async def main() -> None:
        with trio.fail_after(120):
            async with honest([tmp_path / "bootstrap"]) as (address,):
                link, server = JoinLink(RUN, (address,)), split_p2p(address)[1]
                values = RunValues()

                def client(validate: Any, name: str) -> Any:
                    return open_bootstraps(Identity.generate(), link, settings(tmp_path / name), Telemetry(), validate)

                async with client(validate_run_value, "stranger") as (_, stranger), client(values, "member") as (_, mine):
                    await stranger.put(head_key(RUN), made_up)
                    assert await mine.held(server, head_key(RUN)) == made_up
                    await mine.put(run_key(RUN), SIGNED.publishable)
                    values.charter_of = {RUN: charter_of(SIGNED)}.get
                    await mine.put(head_key(RUN), real)
                    assert await mine.held(server, head_key(RUN)) == real
                    with suppress(NetworkError):
                        await stranger.put(head_key(RUN), made_up)
                    assert await mine.held(server, head_key(RUN)) == real
                    assert await mine.get(head_key(RUN)) == real

    trio.run(main)
