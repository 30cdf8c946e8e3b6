"""A run is watched: members in memory that serve, lie, are slow, leave, or go on while somebody looks."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.collectives.chain.certificate import certificate_hash, value_of
from flockstep.collectives.chain.head import validate_run_value
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.evaluation.draw import DueEvaluation
from flockstep.collectives.light.own_ledger import OwnLedger
from flockstep.collectives.picture.picture import Picture, RunState, TroubleKind
from flockstep.collectives.spec import charter_of
from flockstep.collectives.state.archive import LEDGER_FILE
from flockstep.collectives.visit.watcher import RunWatcher
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.keys import evaluation_key, member_key
from flockstep.dht.members.body import MemberBody
from flockstep.dht.members.evaluation import EvaluationBody
from flockstep.dht.members.table import MemberTable
from flockstep.dht.records import Record
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Admission, Data, EvalSettings, SignedManifest
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.base.troubles import NEEDS_PROGRAM
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork
from flockstep.peer.node.node import Node
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from flockstep.scripts.watch.words import member_story, state_words
from support.keepers import key
from support.light import KEEPERS, SIGNED, chain_of
from support.memory_peers import virtually

CHAIN = chain_of(60)
LIARS = [key(50 + number) for number in range(4)]
FORGED = chain_of(30, keepers=LIARS, mark=b"forged")
HOSTILE = "\x1b]0;owned\x07[/nope]\u202e<script>"


@dataclass
class FakeMember:
    """A member that states a head, and serves a chain which may be another one."""

    identity: Identity
    scene: "Scene"
    chain: list[wire.Certificate]
    table: MemberTable
    answers: bool = True
    is_closed: bool = False
    device: str = "cpu"
    loss: float | None = 2.5
    asked: list[int] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    """The losses of rounds that it says it has seen."""

    def state(self, stated: wire.Certificate | None = None) -> None:
        """Publish my record, which states the end of my chain, or this certificate."""
        head = stated or (self.chain[-1] if self.chain else None)
        figures: dict[str, Any] = {}
        if head is not None:
            tokens = value_of(head).tokens
            figures = {"round": head.slot.round, "head": certificate_hash(head), "chain_tokens": tokens}
        where = (f"/memory/{self.identity.peer_id}",)
        texts: dict[str, Any] = {"device": self.device, "name": self.device}
        layout = bytes(31) + b"1"
        figures |= {"loss": self.loss, "tokens_per_s": 100.0}
        body = MemberBody(state="training", addresses=where, layout=layout, **texts, **figures)
        record = self.table.update_own(self.identity, body, trio.current_time())
        self.scene.records[self.identity.peer_id] = record.encode()
        self.scene.board.values[member_key(self.scene.signed.run_id, self.identity.peer_id)] = record.encode()

    async def serve(self, started: trio.Event) -> None:
        transport = self.scene.network.transport(self.identity.peer_id)
        async with Node(transport, self.identity, PeerConfig(), Telemetry(), inline=True) as node:

            async def page(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
                self.asked.append(question.from_round)
                if not self.answers:
                    await trio.sleep_forever()
                rounds = range(question.from_round, question.from_round + question.limit)
                held = [it for it in self.chain if it.slot.round in rounds]
                held = held if held and held[0].slot.round == question.from_round else []  # As a ledger answers.
                losses = tuple(self.seen.get(it.slot.round, 0.0) for it in held)
                return wire.LedgerPage(tuple(map(pack_certificate, held)), losses)

            async def records(peer: str, question: wire.MembersAsk) -> wire.Members:
                if not self.answers:
                    await trio.sleep_forever()
                if self.is_closed:
                    raise NetworkError("this run is for its members only")
                return wire.Members(tuple(self.scene.records.values()))

            async def vote(peer: str, question: wire.VoteAsk) -> wire.VoteShown:
                head = self.chain[-1] if self.chain else None
                return wire.VoteShown(1 if head is None else head.slot.round + 1)

            node.on_ask(wire.LedgerAsk, page)
            node.on_ask(wire.MembersAsk, records)
            node.on_ask(wire.VoteAsk, vote)
            directory = MemoryDirectory(self.scene.board, node.peer_id, transport.addresses(), validate_run_value)
            await directory.provide(self.scene.signed.run_id)
            self.state()
            started.set()
            await trio.sleep_forever()


@dataclass
class Scene:
    """A run's members and directory, and one who watches."""

    network: MemoryNetwork
    nursery: trio.Nursery
    signed: SignedManifest = SIGNED
    board: MemoryBoard = field(default_factory=MemoryBoard)
    records: dict[str, bytes] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    async def member(self, number: int, chain: Sequence[wire.Certificate], **options: object) -> FakeMember:
        identity = key(number)
        member = FakeMember(identity, self, list(chain), MemberTable(self.signed.run_id, identity.peer_id), **options)  # type: ignore[arg-type]
        started = trio.Event()
        self.nursery.start_soon(member.serve, started)
        await started.wait()
        return member

    async def watcher(
        self, at: wire.Certificate | None = None, own: OwnLedger | None = None, number: int = 200
    ) -> RunWatcher:
        identity, telemetry = key(number), Telemetry(clock=trio.current_time)
        telemetry.subscribe(self.events.append)
        transport = self.network.transport(identity.peer_id, telemetry=telemetry)
        node = Node(transport, identity, PeerConfig(), telemetry, inline=True)
        ready = trio.Event()

        async def live() -> None:
            async with node:
                ready.set()
                await trio.sleep_forever()

        self.nursery.start_soon(live)
        await ready.wait()
        directory = MemoryDirectory(self.board, identity.peer_id, transport.addresses(), validate_run_value)
        mark = None if at is None else (at.slot.round, certificate_hash(at))
        link = JoinLink(self.signed.run_id, (), mark)
        return RunWatcher(node, directory, self.signed, link, decides="its keepers decide", own=own)

    async def look(self, at: wire.Certificate | None = None, history: int = 200) -> Picture:
        watcher = await self.watcher(at)
        await watcher.look(history)
        return watcher.picture()

    def named(self, event: str) -> list[Event]:
        return [one for one in self.events if one["event"] == event]


def played(body: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(network: MemoryNetwork) -> None:
        async with trio.open_nursery() as nursery:
            await body(Scene(network, nursery))
            nursery.cancel_scope.cancel()

    virtually(MemoryNetwork(), main)


run_test = played


async def test_a_look_shows_the_whole_chain_and_what_members_claim(scene: Scene, /) -> None:
    for number, loss in enumerate((2.0, 3.0, 7.0)):
        await scene.member(number, CHAIN, loss=loss, device=HOSTILE)
    picture = await scene.look()
    assert [row.round for row in picture.rounds] == list(range(1, 61))
    assert picture.verified == "every certificate from the first round on"
    assert (picture.progress.round, picture.progress.tokens) == (60, value_of(CHAIN[-1]).tokens)
    assert picture.recent[0].voters == CHAIN[-1].voters
    assert [member.peer for member in picture.members] == sorted(key(number).peer_id for number in range(3))
    assert all(member.trust is not None and member.votes == 1 and member.here for member in picture.members)
    assert all(member.device.isprintable() and member.name.isprintable() for member in picture.members)
    assert all(one.name.isprintable() for one in picture.credit)
    assert [bool(one.name) for one in picture.credit].count(True) == 3  # Who has left has no name.
    assert f"at=60:{certificate_hash(CHAIN[-1]).hex()}" in picture.link
    assert picture.progress.state is RunState.TRAINING
    assert (picture.model, picture.joining) == ("a model of its members", str(NEEDS_PROGRAM))


async def test_who_comes_late_sees_the_losses_that_members_have_seen(scene: Scene, /) -> None:
    seen = {1: 5.0, 3: -1.0, 4: 1e9} | dict.fromkeys(range(6, 31), 2.0)
    await scene.member(0, CHAIN[:30], seen=seen)
    picture = await scene.look()
    assert [row.loss for row in picture.rounds] == [5.0, None, None, None, None] + [2.0] * 25


async def test_a_killed_member_is_missing_and_trains_no_more(scene: Scene, /) -> None:
    killed = key(9)
    FakeMember(killed, scene, CHAIN[:10], MemberTable(SIGNED.run_id, killed.peer_id)).state()
    for number in range(3):
        await scene.member(number, CHAIN[:10])
    picture = await scene.look()
    (gone,) = [member for member in picture.members if member.here is not True]
    assert (gone.peer, gone.here, member_story(gone).state) == (killed.peer_id, False, "missing")
    assert (len(picture.members), state_words(picture)) == (4, "3 peers train.")
    assert picture.progress.tokens_per_s == 300.0


async def test_new_rounds_arrive_within_seconds_with_their_time_and_loss(scene: Scene, /) -> None:
    member = await scene.member(0, CHAIN[:10])
    watcher = await scene.watcher()
    scene.nursery.start_soon(watcher.run)
    await trio.sleep(10)
    assert watcher.picture().progress.round == 10
    for certificate in CHAIN[10:14]:
        member.chain.append(certificate)
        await trio.sleep(3)
        assert watcher.picture().progress.round == certificate.slot.round
    assert [row.time is None for row in watcher.picture().rounds] == [True] * 10 + [False] * 4
    assert watcher.picture().rounds[-1].loss == 2.5


@pytest.mark.parametrize("liar", ["another chain", "another page", "silence"])
async def test_one_honest_member_is_enough_to_go_on(scene: Scene, /, liar: str) -> None:
    honest = await scene.member(0, CHAIN[:30])
    false = await scene.member(60, FORGED if liar == "another chain" else CHAIN[:30])
    false.answers = liar != "silence"
    if liar == "another page":
        false.chain = CHAIN[:29] + FORGED[28:30]
    watcher = await scene.watcher(at=CHAIN[4])
    scene.nursery.start_soon(watcher.run)
    await trio.sleep(120)
    honest.chain = list(CHAIN[:40])
    honest.state()
    await trio.sleep(60)
    picture = watcher.picture()
    assert (picture.progress.round, picture.rounds[0].round) == (40, 1)
    assert picture.recent[0].hash == certificate_hash(CHAIN[39]).hex()
    if liar == "another chain":
        assert {trouble.peer for trouble in picture.troubles if trouble.kind is TroubleKind.LIAR} == {key(60).peer_id}


async def test_a_crowd_of_free_keys_that_states_one_head_does_not_move_whoever_has_an_anchor(scene: Scene, /) -> None:
    await scene.member(0, CHAIN[:30])
    for number in range(60, 70):
        await scene.member(number, FORGED)
    picture = await scene.look(at=CHAIN[20])
    assert picture.recent[0].hash == certificate_hash(CHAIN[29]).hex()
    assert {member.peer for member in picture.members if member.votes} == {key(0).peer_id}


async def test_many_free_keys_that_claim_to_be_ahead_delay_nothing(scene: Scene, /) -> None:
    honest = await scene.member(0, CHAIN[:10])
    watcher = await scene.watcher(at=CHAIN[4])
    scene.nursery.start_soon(watcher.run)
    await trio.sleep(5)
    for number in range(60, 100):
        (await scene.member(number, FORGED, answers=number % 2 == 0)).state(FORGED[-1])
    await trio.sleep(30)
    for certificate in CHAIN[10:14]:
        honest.chain.append(certificate)
        honest.state()
        await trio.sleep(15)
        assert watcher.picture().progress.round == certificate.slot.round


async def test_a_record_of_a_stranger_in_the_directory_of_a_closed_run_is_left_out(scene: Scene, /) -> None:
    listed, stranger = key(0).peer_id, key(5).peer_id
    admission = Admission(kind="allow", allow=listed, voters="members")
    closed = SignedManifest.sign(replace(SIGNED.manifest, admission=admission), key(0))

    scene.signed = closed
    await scene.member(0, [])
    await scene.member(5, [])
    assert stranger in scene.board.providers[closed.run_id]
    picture = await scene.look()
    assert [member.peer for member in picture.members] == [listed]
    assert picture.verified.startswith("nothing: this run is closed")
    assert scene.named("message.refused")[0]["peer"] == stranger


async def test_a_contributor_is_thanked_by_name_after_it_has_left(scene: Scene, /) -> None:
    ada, stays = key(0).peer_id, key(1).peer_id

    await scene.member(0, CHAIN, device="ada", answers=False)
    other = await scene.member(1, CHAIN)
    watcher = await scene.watcher()
    scene.nursery.start_soon(watcher.run)
    await trio.sleep(60)
    assert {one.peer: one.name for one in watcher.picture().credit}[ada] == "ada"
    scene.records.pop(ada)
    scene.board.values.pop(member_key(scene.signed.run_id, ada))
    for _ in range(5):
        other.state()
        await trio.sleep(60)
    picture = watcher.picture()
    assert [one.peer for one in picture.members] == [stays]
    assert {one.peer: one.name for one in picture.credit}[ada] == "ada"


def test_a_closed_run_shows_visitors_what_members_state_and_a_members_user_what_its_peer_holds(tmp_path: Path) -> None:
    peers = " ".join(sorted(keeper.peer_id for keeper in KEEPERS))
    admission = replace(SIGNED.manifest.admission, kind="allow", allow=peers)
    closed = SignedManifest.sign(replace(SIGNED.manifest, admission=admission), key(0))
    chain, charter = chain_of(12, signed=closed), charter_of(closed)
    ledger = Ledger.open(tmp_path / LEDGER_FILE, closed.run_id, verify=verify_signed, telemetry=Telemetry(), charter=charter)
    for certificate in chain[:8]:
        ledger.extend([certificate])

    async def body(scene: Scene) -> None:
        scene.signed = closed
        member = await scene.member(0, chain[:8], is_closed=True)
        stranger, own = await scene.watcher(), OwnLedger.of(tmp_path, charter, Telemetry())
        user = await scene.watcher(own=own, number=201)
        scene.nursery.start_soon(stranger.run)
        scene.nursery.start_soon(user.run)
        await trio.sleep(30)
        assert [row.round for row in user.picture().rounds] == list(range(1, 9))
        assert user.picture().verified == "every certificate from the first round on"
        for certificate in chain[8:]:
            ledger.extend([certificate])
            member.chain.append(certificate)
            member.state()
            await trio.sleep(100)  # A record holds for 180 s.
        assert user.picture().progress.round == stranger.picture().progress.round == 12
        assert [one.peer for one in stranger.picture().members] == [key(0).peer_id]
        assert stranger.picture().rounds == ()
        assert member.asked == []

    played(body)


async def test_the_branch_of_voters_who_sign_twice_is_shown_as_a_fork(scene: Scene, /) -> None:
    await scene.member(0, CHAIN[:30])
    await scene.member(1, CHAIN[:30])
    watcher = await scene.watcher()
    scene.nursery.start_soon(watcher.run)
    await trio.sleep(5)
    await scene.member(2, [*CHAIN[:25], *chain_of(5, CHAIN[24], mark=b"twice")])
    await trio.sleep(60)
    picture = watcher.picture()
    (fork,) = [trouble for trouble in picture.troubles if trouble.kind is TroubleKind.FORK]
    assert "have signed both" in fork.reason
    assert picture.recent[0].hash == certificate_hash(CHAIN[29]).hex()


async def test_evaluations_of_drawn_members_are_read_and_of_nobody_else(scene: Scene, /) -> None:
    settings = EvalSettings(every=20, prompts=("The ",))
    signed = SignedManifest.sign(replace(SIGNED.manifest, data=Data(source="text:corpus"), eval=settings), key(0))
    chain = chain_of(45, signed=signed)
    due = DueEvaluation.after(chain[39], settings)
    assert due is not None
    hash_ = due.certificate
    drawn = [identity for identity in KEEPERS if identity.peer_id in due.evaluators]
    (spared,) = [identity for identity in KEEPERS if identity not in drawn]

    scene.signed = signed
    await scene.member(0, chain)
    for identity, loss in zip((*drawn, spared), (2.0, 9.0, 3.0, 0.0), strict=True):
        stated = EvaluationBody(40, hash_, loss, 100, (HOSTILE,))
        record = Record.sign(
            identity, run=signed.run_id, kind="eval", sequence=40, lifetime=60.0, body=encode(stated)
        )
        scene.board.values[evaluation_key(signed.run_id, identity.peer_id)] = record.encode()
    picture = await scene.look()
    (evaluation,) = picture.evaluations
    assert (evaluation.round, evaluation.loss) == (40, 3.0)
    assert set(evaluation.by) == {identity.peer_id for identity in drawn}
    assert evaluation.samples[0].prompt == "The "
    assert evaluation.samples[0].text.isprintable()
    assert {one.peer: one.rounds for one in picture.credit} == dict.fromkeys((it.peer_id for it in KEEPERS), 45)


async def test_history_that_nobody_has_is_said_and_the_rest_is_shown(scene: Scene, /) -> None:
    await scene.member(0, CHAIN[40:])
    picture = await scene.look(at=CHAIN[50])
    assert picture.rounds[0].round == 41
    assert picture.verified == "every certificate from round 41 on, after that of round 51, which the link names"
    assert scene.named("watch.partial")[0]["round"] == 41


async def test_a_run_without_members_is_shown_as_that_and_fills_once_somebody_comes(scene: Scene, /) -> None:
    watcher = await scene.watcher()
    scene.nursery.start_soon(watcher.run)
    await trio.sleep(10)
    assert watcher.picture().progress.state is RunState.EMPTY
    await scene.member(0, CHAIN[:10])
    await trio.sleep(30)
    assert watcher.picture().progress.round == 10
    scene.network.kill(key(0).peer_id)
    await trio.sleep(300)
    picture = watcher.picture()
    assert (picture.progress.state, picture.progress.round) == (RunState.EMPTY, 10)


@pytest.mark.parametrize("rounds", [100, 260])
async def test_a_chain_without_the_certificate_that_the_link_names_is_not_shown_however_long_it_is(
    scene: Scene, /, rounds: int
) -> None:
    """Anybody can sign a chain of any length where every member votes."""
    admission = Admission(voters="members")
    signed = SignedManifest.sign(replace(SIGNED.manifest, admission=admission), key(0))
    founder, liars = [key(0)], [key(60 + number) for number in range(3)]
    chain = chain_of(5, signed=signed, keepers=founder)
    forged = chain_of(rounds, chain[0], signed=signed, keepers=liars, mark=b"forged")

    scene.signed = signed
    await scene.member(0, chain)
    for number in range(60, 63):
        await scene.member(number, [chain[0], *forged])
    picture = await scene.look(at=chain[3])
    assert picture.recent[0].hash == certificate_hash(chain[-1]).hex()
    assert {trouble.peer for trouble in picture.troubles if trouble.kind is TroubleKind.FORK} <= {
        key(60 + number).peer_id for number in range(3)
    }
