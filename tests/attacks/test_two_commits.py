"""Contributors that commit to one thing here and another one there: that costs them no attempt."""

from typing import Any

import pytest
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.peer import wire
from support.rounds import PEERS, ConnectedRounds, Mail, order_of, signed

VOTERS = PEERS[:4]
ORDER = order_of(VOTERS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_liars", "victims"), [(1, 1), (1, 2), (3, 2), (5, 3)])
def test_free_keys_that_send_two_commits_void_no_attempt(num_liars: int, victims: int, seed: int) -> None:
    """Each sends one commit to the proposer, and another one to other voters, which ask others for the one that counts."""
    liars = PEERS[4 : 4 + num_liars]
    fooled = ORDER[1 : 1 + victims]
    withheld: set[tuple[str, str]] = set()

    def lost(to: str, mail: Mail) -> bool:
        if not isinstance(mail, wire.Signed) or mail.sender not in liars or to not in fooled:
            return False
        message = wire.opened(mail)
        if not isinstance(message, wire.Commit) or message.steps == 77 or (to, mail.sender) in withheld:
            return False  # What others forward arrives.
        withheld.add((to, mail.sender))
        return True

    def tampered(peer: str, message: Any) -> Any:
        if peer in liars and isinstance(message, wire.Commit):
            other = wire.Commit(message.slot, message.roster, message.tokens, 77, message.loss, message.parts, message.ramp)
            rounds.mail += [(to, signed(peer, other), peer) for to in fooled]
        return message

    rounds = ConnectedRounds([*VOTERS, *liars], seed, voters=VOTERS, tampered=tampered, lost=lost, attempts=2)
    rounds.start()
    rounds.settle()
    outcomes = [rounds.machines[peer].outcome for peer in VOTERS]
    assert {it and it.kind for it in outcomes} == {OutcomeKind.DONE}
    assert {it and it.slot.attempt for it in outcomes} == {0}
    assert len({it.cut for it in outcomes if it}) == 1
    assert {*VOTERS} <= {*outcomes[0].cut}  # type: ignore[union-attr]
