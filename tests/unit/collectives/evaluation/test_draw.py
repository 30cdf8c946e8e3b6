"""Who is drawn to evaluate, which records count, and what their losses come to."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.chain.certificate import certificate_hash
from flockstep.collectives.evaluation.draw import EVALUATORS, DueEvaluation
from flockstep.collectives.evaluation.result import result_of
from flockstep.dht.keys import evaluation_key
from flockstep.dht.members.evaluation import MAX_SAMPLE_BYTES, EvaluationBody, open_evaluation
from flockstep.dht.published import validate_published
from flockstep.dht.records import Record
from flockstep.dht.run.manifest import MAX_PROMPTS, EvalSettings
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import BadSignature, RemoteError
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from support.certificates import RUN, certify

EIGHT = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 9)]
IDS = sorted(identity.peer_id for identity in EIGHT)


def chain(rounds: int, **fields: Any) -> wire.Certificate:
    certificate = None
    for number in range(rounds):
        certificate = certify(certificate, 800, roster=EIGHT, **{"cut": digest(bytes([number])), **fields})
    assert certificate is not None
    return certificate


CERTIFICATE = chain(5, credit=(100,) * 8)
DUE = DueEvaluation.after(CERTIFICATE, EvalSettings(5))
assert DUE is not None
DRAWN = next(identity for identity in EIGHT if identity.peer_id == DUE.evaluators[0])
OTHER = next(identity for identity in EIGHT if identity.peer_id not in DUE.evaluators)
BODY = EvaluationBody(5, certificate_hash(CERTIFICATE), 2.5, 4096, ("and so on",))


def signed(identity: Identity, body: EvaluationBody = BODY, **fields: Any) -> Record:
    about = {"run": RUN, "kind": "eval", "sequence": body.round, "lifetime": 60.0, **fields}
    return Record.sign(identity, body=encode(body), **about)


def test_it_is_due_every_so_many_rounds_and_draws_three_of_those_whose_tokens_counted() -> None:
    is_due = [DueEvaluation.after(chain(number), EvalSettings(2)) is not None for number in range(1, 5)]
    assert is_due == [False, True, False, True]
    assert DueEvaluation.after(CERTIFICATE, EvalSettings(0)) is None
    assert DueEvaluation.after(None, EvalSettings(5)) is None
    assert DUE is not None
    assert len(set(DUE.evaluators)) == EVALUATORS
    two = DueEvaluation.after(chain(2, credit=(400, 0, 0, 0, 400, 0, 0, 0)), EvalSettings(1))
    assert two is not None
    assert set(two.evaluators) == {IDS[0], IDS[4]}
    by_round = [DueEvaluation.after(chain(number), EvalSettings(1)) for number in range(1, 40)]
    counts = Counter(peer for due in by_round if due is not None for peer in due.evaluators)
    assert set(counts) == set(IDS)
    assert max(counts.values()) < 2 * 39 * EVALUATORS / len(IDS)


def test_no_output_decides_who_is_drawn() -> None:
    """The owner whose output comes last knows everything else, and could try small lies until its own keys are drawn."""
    certificates = [chain(5, credit=(100,) * 8, mark=bytes([lie])) for lie in range(20)]
    dues = [DueEvaluation.after(certificate, EvalSettings(5)) for certificate in certificates]
    assert len({due.certificate for due in dues if due is not None}) == 20
    assert {due.evaluators for due in dues if due is not None} == {DUE.evaluators if DUE is not None else ()}


def test_a_record_counts_only_by_a_drawn_peer_and_about_that_state() -> None:
    assert DUE is not None
    assert DUE.open(signed(DRAWN)) == BODY
    refused = {
        "not drawn": signed(OTHER),
        "another run": signed(DRAWN, run="b" * 52),
        "another certificate": signed(DRAWN, replace(BODY, certificate=b"c" * 32)),
        "another round": signed(DRAWN, replace(BODY, round=10)),
        "another sequence": signed(DRAWN, sequence=6),
        "another kind": signed(DRAWN, kind="member"),
    }
    for record in refused.values():
        with pytest.raises(RemoteError):
            DUE.open(record)
    with pytest.raises(BadSignature):
        DUE.open(replace(signed(DRAWN), signature=bytes(64)))


def test_the_directory_takes_a_members_own_record_alone_by_its_round() -> None:
    key = evaluation_key(RUN, DRAWN.peer_id)
    assert validate_published(key, signed(DRAWN).encode()) == 5
    for record in (signed(OTHER), signed(DRAWN, run="b" * 52), signed(DRAWN, kind="member")):
        with pytest.raises(RemoteError):
            validate_published(key, record.encode())


def test_the_longest_record_fits() -> None:
    longest = replace(BODY, samples=("x" * MAX_SAMPLE_BYTES,) * MAX_PROMPTS)
    assert open_evaluation(signed(DRAWN, longest)) == longest


def test_one_liar_of_three_moves_the_loss_to_no_more_than_an_honest_one() -> None:
    honest = {"a": replace(BODY, loss=2.0), "b": replace(BODY, loss=2.2)}
    for lie in (0.0, 1e6):
        found = result_of(honest | {"liar": replace(BODY, loss=lie, samples=("buy!\x1b[2J",))}, ("Once",), 3)
        assert 2.0 <= found.loss <= 2.2
        assert found.by == ("a", "b", "liar")
        assert found.samples == (("Once", "and so on"),)
    alone = result_of({"a": replace(BODY, samples=("x\x1b[2J\n", "unasked"))}, ("Once\n",), 1)
    assert alone.figures() == {
        "round": 5,
        "loss": 2.5,
        "by": ["a"],
        "samples": [{"prompt": r"Once\n", "text": "x\\x1b[2J\n"}],
    }


def test_a_text_is_shown_as_far_as_two_have_come_with_it() -> None:
    short, long_ = replace(BODY, samples=("and so on",)), replace(BODY, samples=("and so on, and on",))
    liar = replace(BODY, samples=("and buy!",))
    assert result_of({"a": short, "b": long_, "liar": liar}, ("Once",), 3).samples == (("Once", "and so on"),)


def test_one_liar_of_three_does_not_choose_what_the_model_writes() -> None:
    one, other = replace(BODY, loss=2.0, samples=("and so on", "x")), replace(BODY, loss=2.2, samples=("and so on", "y"))
    liar = replace(BODY, loss=2.1, samples=("buy!", "buy!", "unasked"))
    found = result_of({"a": one, "b": other, "liar": liar}, ("Once", "Then"), 3)
    assert found.samples == (("Once", "and so on"),)
    assert result_of({"a": one, "liar": liar}, ("Once", "Then"), 3).samples == ()
    assert result_of({"a": one, "b": replace(BODY, samples=())}, ("Once",), 3).samples == ()
    assert result_of({"liar": liar}, ("Once", "Then"), 3).samples == ()  # It is the first of three, or the only one.
