"""Contributors that commit to one thing here and another one there, or state much else before: they cost no attempt."""

from dataclasses import replace
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("victims", [1, 2])
@pytest.mark.parametrize("crowd", ["commits", "sketches"])
def test_what_a_free_key_says_first_keeps_out_nothing_that_counts(crowd: str, victims: int, seed: int) -> None:
    """It fills what some voters keep of it with other commits, or with sketches after cuts that nobody has made.

    These had no room for what the others named, and voided the attempt; and nothing convicts of such sketches.
    """
    liar, fooled = PEERS[6], ORDER[-victims:]

    def tampered(peer: str, message: Any) -> Any:
        if peer == liar and isinstance(message, wire.Commit):
            parts = ((bytes([number]) * 32,) * len(message.parts) for number in range(3))
            junk: list[wire.RoundMessage] = [replace(message, parts=part) for part in parts]
            if crowd == "sketches":
                junk = [wire.Sketch(message.slot, bytes([number]) * 32, (), b"") for number in range(wire.MAX_OUTPUTS + 1)]
            rounds.mail += [(to, signed(peer, other), peer) for to in fooled for other in junk]
        return message

    rounds = ConnectedRounds(PEERS[:7], seed, voters=VOTERS, tampered=tampered)
    began = rounds.now
    rounds.start()
    rounds.settle()
    honest = PEERS[:6]
    outcomes = [rounds.machines[peer].outcome for peer in honest]
    assert {it and (it.kind, it.slot.attempt) for it in outcomes} == {(OutcomeKind.DONE, 0)}
    assert {*rounds.outcomes()[0].cut} >= {*honest}
    # Half of the voters may count a commit of it that it does not sketch: then they wait for it, as for any silent one.
    assert rounds.now == began or (crowd == "commits" and victims == 2)
