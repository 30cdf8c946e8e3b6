"""The owner's peer renews the listing of its run, and publishes that it was withdrawn."""

from pathlib import Path

import trio
import trio.testing
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.keys import listing_key
from flockstep.dht.published import validate_published
from flockstep.dht.run.listing import LISTING_FILE, RENEWAL_SECONDS, open_listing
from flockstep.optim.member.reach import renew_listing
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry

OWNER, RUN = Identity.from_seed(bytes(32)), "a" * 52
KEY = listing_key(RUN, OWNER.peer_id)


def test_a_listing_is_renewed_every_day_until_it_is_withdrawn(tmp_path: Path) -> None:
    board, telemetry = MemoryBoard(), Telemetry()
    directory = MemoryDirectory(board, OWNER.peer_id, (), validate_published)
    (tmp_path / LISTING_FILE).touch()

    def ends() -> float:
        return open_listing(RUN, OWNER.peer_id, board.values[KEY])[1].ends

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(renew_listing, directory, OWNER, RUN, tmp_path, telemetry)
            await trio.sleep(1)
            assert ends() > 0
            board.values.clear()  # The bootstraps have forgotten it.
            board.up = False
            await trio.sleep(RENEWAL_SECONDS)
            assert telemetry.counts["directory.failed"] == 1
            board.up = True
            await trio.sleep(RENEWAL_SECONDS)
            assert ends() > 0
            (tmp_path / LISTING_FILE).unlink()
            await trio.sleep(RENEWAL_SECONDS)
            assert ends() == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
