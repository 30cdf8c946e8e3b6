"""A bootstrap that follows the heads of its runs, with members in memory that serve, lie or have left."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.light import follower as limits
from flockstep.collectives.light.follower import FIRST_PAUSE, Follower
from flockstep.collectives.light.marks import Mark, decode_marks
from flockstep.dht.directory.store import Entry, Store
from flockstep.dht.keys import head_key, named_key, run_key
from flockstep.dht.run.manifest import SignedManifest
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.node.node import Node
from flockstep.peer.quota.limits import BootstrapLimits
from flockstep.scripts.peers.bootstrap import _known_charter
from support.certificates import certify
from support.keepers import kept_run, key
from support.light import KEEPERS, SIGNED, chain_of, mark_of
from support.memory_peers import virtually

RUN = SIGNED.run_id
STRANGER = key(20)
Certificates = Sequence[wire.Certificate]


@dataclass
class Scene:
    """A bootstrap's directory and its light client, in a network with members."""

    network: MemoryNetwork
    folder: Path
    starts: dict[str, Mark] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    asked: list[tuple[str, wire.LedgerAsk]] = field(default_factory=list)
    store: Store = field(default_factory=lambda: Store(BootstrapLimits()))

    def __post_init__(self) -> None:
        self.transport = self.network.transport("bootstrap")
        self.follower = self.restarted()

    def restarted(self) -> Follower:
        """The light client of another process with this folder."""
        telemetry = Telemetry(clock=lambda: 0.0)
        telemetry.subscribe(self.events.append)
        exempt = BootstrapLimits().exempt
        made = Follower(
            self.folder, self.transport, self.store, telemetry, exempt=exempt, starts=self.starts, inline=True
        )
        self.follower = made
        return made

    def publish(self, head: wire.Certificate, signed: SignedManifest = SIGNED, ip: str = "192.0.2.1") -> None:
        """The directory has a run's manifest, and this certificate for its head."""
        for name, value in ((run_key(signed.run_id), signed.publishable), (head_key(signed.run_id), pack_certificate(head))):
            self.store.put(Entry(name.encode(), "", value, (), ip, time.time() + 3600))

    async def member(
        self, nursery: trio.Nursery, identity: Identity, chain: Certificates, answer: wire.LedgerPage | None = None
    ) -> None:
        """Connect a member that serves a chain, or gives this answer to any question."""
        started = trio.Event()

        async def serve() -> None:
            transport = self.network.transport(identity.peer_id)
            async with Node(transport, identity, PeerConfig(), Telemetry(), inline=True) as node:

                async def page(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
                    self.asked.append((identity.peer_id, question))
                    rounds = range(question.from_round, question.from_round + question.limit)
                    found = [pack_certificate(one) for one in chain if one.slot.round in rounds]
                    return answer or wire.LedgerPage(tuple(found))

                node.on_ask(wire.LedgerAsk, page)
                await transport.connect("bootstrap", self.transport.addresses())
                started.set()
                await trio.sleep_forever()

        nursery.start_soon(serve)
        await started.wait()

    async def turn(self) -> None:
        """Let the longest pause pass, and follow all runs."""
        await trio.sleep(limits.LONGEST_FOLLOW_PAUSE)
        await self.follower.follow_all()

    def named(self, event: str) -> list[Event]:
        return [one for one in self.events if one["event"] == event]

    def head(self, run: str = RUN) -> Mark | None:
        value = self.follower.answer(named_key(run))
        return None if value is None else decode_marks(value, run).head


def sizes_in(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir()]


def played(
    body: Callable[[Scene, trio.Nursery], Awaitable[None]], folder: Path, starts: dict[str, Mark] | None = None
) -> None:
    async def main(network: MemoryNetwork) -> None:
        async with trio.open_nursery() as nursery:
            await body(Scene(network, folder, starts or {}), nursery)
            nursery.cancel_scope.cancel()

    virtually(MemoryNetwork(), main)


CHAIN = chain_of(40)


def test_published_heads_in_a_row_are_followed_without_a_question(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        for certificate in CHAIN[:3]:
            scene.publish(certificate)
            await scene.turn()
        assert scene.head() == mark_of(CHAIN[2])
        assert scene.asked == []
        assert [event["round"] for event in scene.named("head.followed")] == [1]

    played(body, tmp_path)


def test_a_clock_that_is_set_forward_ends_no_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        scene.publish(CHAIN[0])
        await scene.turn()
        scene.publish(CHAIN[1])
        later = time.time() + 30 * 86_400
        monkeypatch.setattr(time, "time", lambda: later)
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[1])
        assert _known_charter(scene.store, RUN) is not None

    played(body, tmp_path)


def test_provider_records_of_any_key_are_no_heads(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        for junk in (b"/head", b"\xff/head"):
            scene.store.put(Entry(junk, STRANGER.peer_id, b"", (b"address",), "192.0.2.1", time.time() + 3600))
        scene.publish(CHAIN[0])
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[0])

    played(body, tmp_path)


def test_missed_rounds_are_fetched_page_by_page_from_a_member_that_is_connected(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        await scene.member(nursery, KEEPERS[1], CHAIN)
        scene.publish(CHAIN[-1])
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[-1])
        assert [question.from_round for _, question in scene.asked] == [1, 17, 33]

    played(body, tmp_path)


def test_a_restarted_bootstrap_names_the_head_of_a_run_that_has_fallen_silent(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        scene.publish(CHAIN[0])
        await scene.turn()
        scene.store = Store(BootstrapLimits())  # Manifest and head have expired.
        await scene.restarted().load()
        assert scene.head() == mark_of(CHAIN[0])

    played(body, tmp_path)


def test_a_file_that_the_disk_does_not_give_now_stays(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        (tmp_path / f"{RUN}.head").mkdir()  # Its read fails, as on a disk with a passing fault.
        await scene.follower.load()
        assert scene.named("head.unwritten")
        assert not scene.named("head.forgotten")
        assert (tmp_path / f"{RUN}.head").exists()

    played(body, tmp_path)


def test_a_damaged_file_is_dropped_and_the_run_followed_anew(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        (tmp_path / f"{RUN}.head").write_bytes(b"junk")
        await scene.follower.load()
        assert "cannot be used" in str(scene.named("head.forgotten")[0]["reason"])
        scene.publish(CHAIN[0])
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[0])

    played(body, tmp_path)


def test_where_no_member_has_the_next_certificate_the_old_head_stays_and_it_says_so_once(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        scene.publish(CHAIN[0])
        await scene.turn()
        await scene.member(nursery, KEEPERS[1], CHAIN[20:])
        scene.publish(CHAIN[-1])
        for _ in range(3):
            await scene.turn()
        assert scene.head() == mark_of(CHAIN[0])
        (event,) = scene.named("head.kept")
        assert f"{KEEPERS[1].peer_id} has no certificate after round 1" in str(event["reason"])
        assert event["round"] == 1

    played(body, tmp_path)


def test_its_operator_says_from_where_to_follow_then(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        await scene.member(nursery, KEEPERS[1], CHAIN[20:])
        scene.publish(CHAIN[-1])
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[-1])
        assert [question.limit for _, question in scene.asked] == [1, 15]

    played(body, tmp_path, starts={RUN: mark_of(CHAIN[24])})


@pytest.mark.parametrize(
    "answer",
    [
        wire.LedgerPage((b"junk",)),
        wire.LedgerPage(tuple(map(pack_certificate, CHAIN[4:6]))),
        wire.LedgerPage(tuple(map(pack_certificate, chain_of(16, keepers=[STRANGER])))),
        wire.LedgerPage(tuple(map(pack_certificate, chain_of(16, signers=KEEPERS[:2])))),
    ],
    ids=["junk", "other rounds", "strangers", "no quorum"],
)
def test_members_that_lie_delay_a_turn_and_move_nothing(tmp_path: Path, answer: wire.LedgerPage) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        await scene.member(nursery, KEEPERS[0], (), answer)
        scene.publish(CHAIN[-1])
        await scene.turn()
        assert scene.head() is None  # It knows that the run is further than it has seen.
        assert scene.named("peer.charged")[0]["peer"] == KEEPERS[0].peer_id
        await scene.member(nursery, KEEPERS[2], CHAIN)
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[-1])

    played(body, tmp_path)


def test_a_stranger_that_publishes_a_head_of_a_later_round_keeps_it_from_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        await scene.member(nursery, KEEPERS[1], CHAIN)
        await scene.member(nursery, STRANGER, chain_of(3, keepers=[STRANGER]))
        far = chain_of(60, keepers=[STRANGER])[-1]
        scene.publish(far)
        scene.store.put(Entry(run_key(RUN).encode(), STRANGER.peer_id, b"", (), "192.0.2.9", time.time() + 3600))
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[-1])
        assert {peer for peer, _ in scene.asked} == {KEEPERS[1].peer_id, STRANGER.peer_id}
        assert scene.asked[0][0] == KEEPERS[1].peer_id  # A voter of the run first.
        num = len(scene.asked)
        await trio.sleep(FIRST_PAUSE / 2)
        for _ in range(5):  # Before the pause is over.
            await scene.follower.follow_all()
        assert len(scene.asked) - num <= limits.MEMBERS_ASKED

    played(body, tmp_path)


def test_runs_without_a_manifest_and_closed_runs_cost_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        await scene.member(nursery, KEEPERS[1], CHAIN)
        unknown = certify(None, 1, run="b" * 52)
        scene.store.put(
            Entry(head_key("b" * 52).encode(), "", pack_certificate(unknown), (), "192.0.2.1", time.time() + 3600)
        )
        closed = replace(SIGNED.manifest, admission=replace(SIGNED.manifest.admission, kind="invite"))
        signed = SignedManifest.sign(closed, KEEPERS[0])
        scene.publish(chain_of(1, signed=signed)[0], signed)
        await scene.turn()
        assert (len(scene.follower), scene.asked, scene.events) == (0, [], [])
        assert scene.head("b" * 52) is None

    played(body, tmp_path)


def test_a_run_of_which_no_head_was_published_has_its_beginning_for_one(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        assert scene.head() is None
        scene.store.put(Entry(run_key(RUN).encode(), "", SIGNED.publishable, (), "192.0.2.1", time.time() + 3600))
        head = scene.head()
        assert head is not None
        assert head.round == 0
        scene.publish(CHAIN[9])
        assert scene.head() is None

    played(body, tmp_path)


def test_a_flood_of_runs_from_one_network_evicts_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FOLLOWED_RUNS", 4)

    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        scene.publish(CHAIN[0])
        await scene.turn()
        for number in range(8):
            signed = kept_run(1, first=30 + number)
            (first,) = chain_of(1, signed=signed, keepers=[key(30 + number)])
            scene.publish(first, signed, ip=f"198.51.100.{number}")
            await scene.turn()
        assert scene.head() == mark_of(CHAIN[0])
        sizes = sizes_in(tmp_path)
        assert (len(scene.follower), scene.follower.num_bytes) == (len(sizes), sum(sizes)) == (4, sum(sizes))
        assert len(scene.named("head.forgotten")) == 5
        assert all(RUN not in str(event["reason"]) for event in scene.named("head.forgotten"))

    played(body, tmp_path)


def test_the_signatures_of_a_turn_are_limited_and_runs_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SIGNATURES_A_TURN", 30)
    monkeypatch.setattr(limits, "AT_ONCE_FOLLOWED", 1)

    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        owner = key(30)
        costly = kept_run(1, first=30)
        long = chain_of(200, signed=costly, keepers=[owner])
        await scene.member(nursery, owner, long)
        scene.publish(long[-1], costly, ip="198.51.100.1")
        scene.publish(CHAIN[0])
        await scene.turn()
        taken = scene.follower.head(costly.run_id)
        assert taken is not None
        assert taken.round < 60  # And a page more, at most.
        await scene.turn()
        assert scene.head() == mark_of(CHAIN[0])
        await scene.turn()
        later = scene.follower.head(costly.run_id)
        assert later is not None
        assert taken.round < later.round < 200

    played(body, tmp_path)


def test_the_run_and_the_network_that_waited_longest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SIGNATURES_A_TURN", 1)
    monkeypatch.setattr(limits, "AT_ONCE_FOLLOWED", 1)

    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        runs = [kept_run(1, first=30 + number) for number in range(4)]
        chains = [chain_of(70, signed=run, keepers=[key(30 + number)]) for number, run in enumerate(runs)]
        for number, (run, chain) in enumerate(zip(runs, chains, strict=True)):
            await scene.member(nursery, key(30 + number), chain)
            scene.publish(chain[-1], run, ip=f"192.0.{2 + number // 2}.1")
        for turn in range(1, 5):
            await scene.turn()
            assert sum(scene.follower.head(run.run_id) is not None for run in runs) == turn

    played(body, tmp_path)


def test_a_disk_that_refuses_is_said_once_and_the_head_moves_on(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        (tmp_path / "heads").write_bytes(b"in the way of the folder")
        scene.folder = tmp_path / "heads"
        scene.restarted()
        for certificate in CHAIN[:3]:
            scene.publish(certificate)
            await scene.turn()
        assert scene.head() == mark_of(CHAIN[2])
        assert len(scene.named("head.unwritten")) == 1

    played(body, tmp_path)


def test_only_the_name_of_a_head_is_answered_for(tmp_path: Path) -> None:
    async def body(scene: Scene, nursery: trio.Nursery) -> None:
        scene.publish(CHAIN[0])
        await scene.turn()
        for other in (run_key(RUN), head_key(RUN), named_key(RUN) + "/x", "/flockstep/", "", "�"):
            assert scene.follower.answer(other) is None

    played(body, tmp_path)
