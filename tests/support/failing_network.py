"""A network process that a run's other members keep from carrying out anything once it has joined."""

from flockstep.dht.run.manifest import Data, Manifest, SignedManifest
from flockstep.optim.data.leases import View
from flockstep.optim.member.border import (
    BLANK,
    AttachVectors,
    AverageDelta,
    JoinRun,
    LeaveRun,
    OpenRun,
    PublishLeases,
    RoundEnded,
    RunOpened,
    StateSynced,
    SyncState,
)
from flockstep.peer.base.errors import LocalError, NetworkError, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.process.bridge import Channel


async def fail_later(channel: Channel) -> None:
    """The child's entry point, where the state is taken once."""
    await fail(channel, good_syncs=1)


async def refuse(channel: Channel) -> None:
    """The child's entry point, where the members refuse a newcomer."""
    await fail(channel, good_syncs=0)


async def fail(channel: Channel, good_syncs: int) -> None:
    num_syncs = 0
    owner = Identity.from_seed(bytes(32))
    signed = SignedManifest.sign(Manifest(owner=owner.peer_id, name="failing", data=Data(source="own")), owner)

    async def open_run(command: OpenRun) -> RunOpened:
        return RunOpened(signed.publishable, "me")

    async def done(command: AttachVectors | JoinRun | LeaveRun) -> None:
        return None

    async def sync(command: SyncState) -> StateSynced:
        nonlocal num_syncs
        num_syncs += 1
        if num_syncs > good_syncs:
            raise UsageError("this model is not that of the run's members")
        return StateSynced(BLANK, changed=False)

    async def average(command: AverageDelta) -> RoundEnded:
        raise LocalError("refusing to send a message that no peer could accept")

    async def publish(command: PublishLeases) -> View | None:
        raise NetworkError("nobody is here")

    channel.handle(
        OpenRun.handled_by(open_run),
        AttachVectors.handled_by(done),
        JoinRun.handled_by(done),
        LeaveRun.handled_by(done),
        SyncState.handled_by(sync),
        AverageDelta.handled_by(average),
        PublishLeases.handled_by(publish),
    )
    await channel.serve()
