"""Giving and taking a whole state: only what differs, nothing that is not proved, nothing from a worse chain."""

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from flock import RUN, Bird, Flock, all_at_once, with_flock
from flockstep.collectives import merkle
from flockstep.collectives.chain import Head
from flockstep.collectives.transfer import Giver, Place, ask_state, take_leaves
from flockstep.peer.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from flockstep.peer.memory import run_virtual

Body = Callable[[Flock], Awaitable[None]]


def fly(count: int, body: Body, *, cells: int = 40) -> None:
    run_virtual(lambda: with_flock(count, body, cells=cells))


async def take_state(taker: Bird, giver: Bird) -> tuple[Place, int]:
    place, leaves = await ask_state(taker.node, giver.peer, RUN)
    return place, await take_leaves(taker.node, giver.peer, leaves, taker.theta, taker.momentum)


def test_a_newcomer_takes_the_state_and_only_what_differs() -> None:
    async def body(flock: Flock) -> None:
        giver, taker = flock.birds
        generator = np.random.default_rng(0)
        giver.theta[:] = generator.normal(size=giver.theta.size)
        giver.momentum[:] = generator.normal(size=giver.theta.size)
        serve = Giver(giver.node, RUN)
        leaves = merkle.leaves(giver.theta), merkle.leaves(giver.momentum)
        serve.offer(Place(0, giver.root, 5, None), giver.theta, giver.momentum, leaves)
        taker.theta[: merkle.LEAF_ELEMENTS] = giver.theta[: merkle.LEAF_ELEMENTS]
        place, fetched = await take_state(taker, giver)
        assert (place.round, place.root, place.tokens) == (0, giver.root, 0)
        assert taker.root == giver.root
        assert fetched == 4 * (2 * giver.theta.size - merkle.LEAF_ELEMENTS)

    fly(2, body, cells=merkle.LEAF_ELEMENTS // 256 + 100)


def test_a_state_that_does_not_match_its_root_or_certificate_is_refused() -> None:
    async def body(flock: Flock) -> None:
        giver, taker = flock.birds
        serve = Giver(giver.node, RUN)
        leaves = merkle.leaves(giver.theta), merkle.leaves(giver.momentum)
        serve.offer(Place(0, bytes(32), 0, None), giver.theta, giver.momentum, leaves)
        with pytest.raises(ProtocolViolation, match="root"):
            await take_state(taker, giver)
        serve.offer(Place(3, giver.root, 0, None), giver.theta, giver.momentum, leaves)
        with pytest.raises(RemoteError):
            await take_state(taker, giver)
        serve.offer(Place(0, giver.root, 0, None), giver.theta, giver.momentum, leaves)
        taker.theta[0] += 1
        giver.theta[1] += 1
        with pytest.raises(BaseExceptionGroup) as caught:
            await take_state(taker, giver)
        assert isinstance(sole_error(caught.value), ProtocolViolation)
        serve.withdraw()
        with pytest.raises(NetworkError, match="changing"):
            await take_state(taker, giver)

    fly(2, body)


def test_a_state_of_a_worse_chain_or_without_the_owners_word_is_not_taken() -> None:
    async def body(flock: Flock) -> None:
        await all_at_once(flock.birds)
        giver, taker = flock.birds[:2]
        certificate = giver.averager.certificate
        assert certificate is not None
        place = Place(1, giver.root, 300, certificate)
        leaves = merkle.leaves(giver.theta), merkle.leaves(giver.momentum)
        Giver(giver.node, RUN).offer(place, giver.theta, giver.momentum, leaves)
        offered, _ = await ask_state(taker.node, giver.peer, RUN, mine=place.head)
        assert offered == place
        with pytest.raises(ProtocolViolation, match="worse than the taker's"):
            await ask_state(taker.node, giver.peer, RUN, mine=Head(1, bytes(32), 301))
        with pytest.raises(ProtocolViolation, match="owner"):
            await ask_state(taker.node, giver.peer, RUN, owner="somebody else")

    fly(3, body)
