"""Questions about outputs (CHECK) as a weapon: keys without a vote use up the answers, an owner lies to each member."""

from typing import Any

import pytest
from flockstep.collectives.robust.checks import CHECK_COLUMNS, num_bytes
from flockstep.collectives.round.actions import OutcomeKind
from flockstep.collectives.round.judge import MAX_SEEDS, SEEDS_OF_ONE
from flockstep.peer import wire
from flockstep.peer.digest import keyed
from support.rounds import PEERS, Mail, Rounds, order_of, signed

VOTERS, STRANGERS = PEERS[:4], PEERS[4:8]
assert len(STRANGERS) * SEEDS_OF_ONE >= MAX_SEEDS
ORDER = order_of(VOTERS)


@pytest.mark.parametrize("lied_to", [ORDER[:1], ORDER[1:3], ORDER[:3]])
@pytest.mark.parametrize("seed", range(4))
def test_keys_without_a_vote_that_ask_about_invented_outputs_hide_no_false_one(lied_to: tuple[str, ...], seed: int) -> None:
    """One owner gives some voters an output of its own each, and four free keys have asked twice each before."""
    liar = ORDER[3]
    everybody = [*VOTERS, *STRANGERS]

    def lost(to: str, mail: Mail) -> bool:
        return isinstance(mail, wire.Signed) and mail.sender == liar and to in lied_to and is_true_result(mail)

    def is_true_result(mail: wire.Signed) -> bool:
        message = wire.opened(mail)
        return isinstance(message, wire.Result) and message.output not in rounds.false

    def tampered(peer: str, message: Any) -> Any:
        if peer == liar and isinstance(message, wire.Result):
            for other in lied_to:
                lie = keyed("a false output", message.output, other.encode())
                rounds.false.add(lie)
                told = wire.Result(message.slot, message.cut, message.part, message.weights, lie)
                rounds.mail.append((other, signed(liar, told), liar))
        if peer in STRANGERS and isinstance(message, wire.Sketch) and not message.outputs:
            for number in range(SEEDS_OF_ONE):
                outputs = (keyed("invented", peer.encode(), bytes([number])),) * len(everybody)
                tables = bytes(num_bytes(len(everybody), CHECK_COLUMNS))
                asked = signed(peer, wire.Sketch(message.slot, message.cut, outputs, tables))
                rounds.mail[:0] = [(other, asked, liar) for other in VOTERS]
        return message

    rounds = Rounds(everybody, seed, voters=VOTERS, tampered=tampered, lost=lost, attempts=3)
    rounds.start()
    rounds.settle()
    honest = [rounds.machines[peer].outcome for peer in VOTERS if peer != liar]
    assert {it and it.kind for it in honest} == {OutcomeKind.DONE}
    assert {it and it.slot.attempt for it in honest} == {0}
    assert not rounds.noted("round.left_out") & {*VOTERS}
