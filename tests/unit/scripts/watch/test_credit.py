"""Credit as it is shown, the names that peers give themselves, and their sums over real certificates."""

import io
from pathlib import Path

import pytest
from flockstep.collectives.accountability.credit import Credits, PeerCredit
from flockstep.collectives.chain.certificate import value_of
from flockstep.dht.members.body import MemberBody, open_member
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.members.table import Member, MemberTable
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.scripts.watch.credit import CreditTable, table_of
from rich.console import Console
from support.certificates import RUN, certify

ANNA, BERT, CARL = sorted((Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3)), key=lambda it: it.peer_id)
A, B, C = (identity.peer_id for identity in (ANNA, BERT, CARL))
NASTY = "=HYPERLINK(1)\x1b[2J[red],\n\u202e"


def test_credit_is_summed_over_the_certificates_that_list_it() -> None:
    first = certify(None, 250, roster=(ANNA, BERT, CARL), credit=(100, 0, 150), flagged=(1,))
    second = certify(first, 120, roster=(ANNA, BERT), credit=(80, 40))
    found = Credits()
    for certificate in (first, second):
        found.take(value_of(certificate))
    assert found.all() == (PeerCredit(A, 180, 2), PeerCredit(C, 150, 1), PeerCredit(B, 40, 2))


TABLE = CreditTable(1, 2, (PeerCredit(A, 3000, 2), PeerCredit(B, 20, 1)), {A: NASTY, B: NASTY})


def test_a_name_does_not_break_the_table_which_shows_each_id() -> None:
    file = io.StringIO()
    Console(file=file, width=200).print(table_of(TABLE.rows()))
    _, first, second = file.getvalue().splitlines()
    shown = r"=HYPERLINK(1)\x1b[2J[red],\n\u202e"
    assert first.split() == [A[-8:], shown, "3,000", "2"]
    assert second.split() == [B[-8:], shown, "20", "1"]


@pytest.mark.parametrize("name", ["x" * 65, "é" * 33, "a\nb", "a\x1b[2J", "\u202eanna", " anna", "\ud800"])
def test_what_cannot_be_a_name_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]*name[^\n]*$") as raised:
        PeerConfig(home=tmp_path, name=name)
    assert raised.value.remedy


def test_a_name_is_in_the_members_record_and_stays_on_the_disk_of_others(tmp_path: Path) -> None:
    body = MemberBody(state="training", addresses=("/ip4/192.0.2.1/tcp/4001",), name=NASTY)
    record = MemberTable(RUN, A).update_own(ANNA, body, 0.0)
    assert open_member(record).name == NASTY
    remembered = Remembered(tmp_path, RUN, Telemetry())
    remembered.keep([Member(record, body, 0.0)])
    assert remembered.bodies()[A].name == NASTY
