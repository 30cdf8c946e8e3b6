"""Runs that a light client follows: a signed manifest, and chains of certificates by its keepers."""

from collections.abc import Sequence

from flockstep.collectives.chain.certificate import certificate_hash, open_value
from flockstep.collectives.light.marks import Mark
from flockstep.dht.run.manifest import SignedManifest
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from support.certificates import certify, decided
from support.keepers import kept_run, key

KEEPERS = [key(number) for number in range(4)]
SIGNED = kept_run(4)


def chain_of(
    rounds: int,
    before: wire.Certificate | None = None,
    *,
    signed: SignedManifest = SIGNED,
    keepers: Sequence[Identity] = KEEPERS,
    signers: Sequence[Identity] | None = None,
    mark: bytes = b"",
) -> list[wire.Certificate]:
    """Return the certificates of so many rounds after `before`, by all keepers of the run or by these `signers`."""
    chain: list[wire.Certificate] = []
    for _ in range(rounds):
        before = certify(before, 100, roster=keepers, signers=signers, run=signed.run_id, mark=mark)
        if before.slot.round == 1:
            before = decided(open_value(before.value), before.slot.at(0), signers or keepers)
        chain.append(before)
    return chain


def mark_of(certificate: wire.Certificate) -> Mark:
    """Return the mark of a certificate."""
    return Mark(certificate.slot.round, certificate_hash(certificate))
