"""What a peer shows of itself, by the charter of its run."""

from flockstep.collectives.spec import credential
from flockstep.dht.run.admission import Charter, Invitation, Ticket
from flockstep.peer.identity import Identity

OWNER, PEER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
RUN = "a" * 52


def test_an_invitation_is_shown_where_the_run_demands_one() -> None:
    seed = b"i" * 32
    text = str(Ticket(Invitation.sign(OWNER, RUN, Identity.from_seed(seed).peer_id, count=2), seed))
    shown = [
        credential(Charter(run=RUN, owner=OWNER.peer_id, kind=kind), PEER.peer_id, text, 0.0) for kind in ("invite", "open")
    ]
    assert shown[0]
    assert not shown[1]
