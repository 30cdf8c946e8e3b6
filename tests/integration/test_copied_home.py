"""A copied home: the second process with its key ends before it signs anything, and the first goes on. Real processes."""

import json
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from flockstep.dht.rendezvous import check_alone
from flockstep.dht.run.link import JoinLink
from flockstep.peer.address import split_p2p
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError
from flockstep.peer.host import open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.node.node import Node
from support.bootstraps import TINY_RUN
from support.commands import Command, flockstep

HERE = ("--host", "127.0.0.1", "--port", "0", "--json", "--yes")


def test_a_copied_home_is_refused_while_its_peer_runs_and_taken_once_that_is_killed(
    publish: Callable[..., str], tmp_path: Path
) -> None:
    link = publish(TINY_RUN, "owner")
    home, copy = tmp_path / "owner", tmp_path / "copy"
    with Command("join", link, "--home", str(home), *HERE) as first:
        events = [json.loads(next(first.stdout))]
        while events[-1]["event"] != "round.done":
            events.append(json.loads(next(first.stdout)))
        shutil.copytree(home, copy)
        for verb in ("join", "keep"):
            ended = flockstep(verb, link, "--home", str(copy), *HERE)
            assert ended.returncode == 1
            (line,) = ended.stderr.splitlines()
            assert f"another process has the key of {copy} and answers at /ip4/127.0.0.1/tcp/" in line
            assert '"peer.start"' not in ended.stdout
        last = events[-1]["round"] + 1
        while events[-1].get("round", 0) <= last or events[-1]["event"] != "round.done":
            events.append(json.loads(next(first.stdout)))
        assert "member.refused" not in {event["event"] for event in events}  # The copy has signed no record, either.
        first.kill()
    with Command("join", link, "--home", str(copy), *HERE) as second:  # The directory still has the record of the first.
        assert any(json.loads(line)["event"] == "state.synced" for line in second.stdout)
        second.kill()


async def test_a_process_does_not_take_itself_for_another_one_with_its_key(bootstrap_address: str, tmp_path: Path) -> None:
    me, config = Identity.from_seed(bytes(32)), PeerConfig(home=tmp_path, host="127.0.0.1", port=0)
    link = JoinLink("a" * 52, (bootstrap_address,))
    async with AsyncExitStack() as nodes:
        hosts = [await nodes.enter_async_context(open_host(me, config, Telemetry())) for _ in range(2)]
        for host in hosts:
            await nodes.enter_async_context(Node(host, me, config, Telemetry()))
        await check_alone(me, link, config, hosts[0], hosts[0].addresses())
        with pytest.raises(LocalError, match=f"answers at {hosts[1].addresses()[0]}"):
            await check_alone(me, link, config, hosts[0], hosts[1].addresses())
        address, bootstrap = split_p2p(bootstrap_address)
        await hosts[1].bootstraps.enter(bootstrap, address)
        await hosts[1].bootstraps.first_check(bootstrap)
        with pytest.raises(LocalError, match="p2p-circuit"):
            await check_alone(me, link, config, None, hosts[1].bootstraps.circuits())
