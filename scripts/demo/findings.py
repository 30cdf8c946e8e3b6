"""What a demo has found: the lines that it prints at the end, and `summary.json`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..watch.story import PeerStory, RoundFacts, bits_per_parameter, rounds_of
from .processes import Killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of a demo."""

    run_id: str
    model: str
    parameters: int
    fragments: int
    """A round averages one of so many fragments of the parameters."""
    data: str
    peers: Sequence[PeerStory]
    """Those that trained."""
    keeper: PeerStory
    """The process of the run's owner."""
    seconds: float
    heldout_loss_start: float
    heldout_loss_end: float
    prompt: str
    sample_start: str
    """What the model continues it with before and after the training."""
    sample: str
    killed: Killed | None
    """The fate of the killed peer's child processes, if a peer was killed."""

    @property
    def rounds(self) -> list[RoundFacts]:
        """All rounds, in order."""
        return rounds_of([*self.peers, self.keeper])

    @property
    def fall(self) -> float:
        """The relative reduction of the held-out loss."""
        return 1 - self.heldout_loss_end / self.heldout_loss_start

    @property
    def bits(self) -> tuple[float, float] | None:
        """Bits sent and received per parameter and round, for an infinite roster."""
        return bits_per_parameter(self.peers, self.parameters / self.fragments)

    @property
    def tokens(self) -> int:
        """The tokens of all peers."""
        return sum(peer.tokens for peer in self.peers)

    def faults(self) -> list[str]:
        """Return one line for each fault of the demo."""
        split = [str(facts.round) for facts in self.rounds if not facts.agreed]
        return [
            *([f"state roots differ in round {', '.join(split)}"] if split else []),
            *(["no round was finished"] if all(facts.outcome == "void" for facts in self.rounds) else []),
            *([str(self.killed)] if self.killed and self.killed.left else []),
            *([] if self.fall > 0 else [f"held-out loss did not fall ({self.loss_text()})"]),
        ]

    def lines(self) -> list[str]:
        """Return what happened, for a person."""
        done = [facts for facts in self.rounds if facts.outcome == "done"]
        count = sum(facts.agreed for facts in done)
        bits = self.bits[0] if self.bits else 0.0
        size = self.parameters / self.fragments / 8e6
        lost = ", one of which was killed and one came later," if self.killed else ""
        model = f"one model of {self.parameters / 1e6:.1f} M parameters"
        return [
            f"{len(self.peers)} peers{lost} trained {model} on {self.data} for {self.seconds:.0f} s.",
            f"Its loss on text that nobody trained on fell: {self.loss_text()}.",
            f"The model was equal on all peers, bit for bit, after {count} of {len(done)} rounds.",
            f"A peer sent about {bits * size:.1f} MB a round, {bits:.1f} bits for each parameter.",
        ]

    def loss_text(self) -> str:
        """Return the held-out loss before and after as text."""
        return f"{self.heldout_loss_start:.3f} → {self.heldout_loss_end:.3f}, {-100 * self.fall:+.1f} %"


def summary_of(findings: Findings) -> dict[str, object]:
    """Return all figures for JSON."""
    sent, received = findings.bits or (None, None)
    return {
        "run_id": findings.run_id,
        "model": findings.model,
        "parameters": findings.parameters,
        "data": findings.data,
        "seconds": round(findings.seconds, 1),
        "tokens": findings.tokens,
        "heldout_loss_start": findings.heldout_loss_start,
        "heldout_loss_end": findings.heldout_loss_end,
        "bits_per_param_per_direction": max(findings.bits) if findings.bits else None,
        "bits_per_param_sent": sent,
        "bits_per_param_received": received,
        "sample_start": findings.sample_start,
        "sample": findings.sample,
        "killed": asdict(findings.killed) if findings.killed else None,
        "peers": {
            peer.name: {"id": peer.peer_id, "state": peer.state, "device": peer.device, "tokens": peer.tokens}
            for peer in (*findings.peers, findings.keeper)
        },
        "rounds": [
            {
                "round": facts.round,
                "roster": list(facts.roster),
                "cut": list(facts.cut),
                "outcome": facts.outcome,
                "state_roots": dict(facts.state_roots),
                "loss": facts.loss,
                "seconds": facts.seconds,
                "voids": list(facts.voids),
            }
            for facts in findings.rounds
        ],
        "faults": findings.faults(),
    }
