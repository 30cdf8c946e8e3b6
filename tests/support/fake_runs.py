"""Runs that never were, as the JSON that the page shows: of any size, and round by round."""

import math
import random
from collections.abc import Sequence
from typing import Any

Json = Any

REASONS = ("it was not here", "its contribution came too late", "it was not ready", "its base was an older state")
TROUBLES = (
    ("flag", "its work points against that of the others"),
    ("void", "2 of 6 members were lost"),
    ("ban", "its owner banned it"),
)
KEPT_ROUNDS = 200
PROMPT = "def main("
TOKENS_OF_PEER = 20_480


def peer_id(number: int) -> str:
    """A text of the form of a peer's id."""
    chance = random.Random(number)
    return "12D3KooW" + "".join(chance.choices("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", k=44))


class FakeRun:
    """A run of so many peers that lasts so many rounds; `picture` is what stands after the rounds so far."""

    def __init__(self, *, peers: int = 6, planned: int = 40, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._peers = [peer_id(number) for number in range(peers)]
        self._planned = planned
        self._columns: dict[str, list[Any]] = {
            name: []
            for name in (
                *("round", "time", "tokens", "members", "contributors", "flagged"),
                *("voters", "attempt", "loss", "root"),
            )
        }
        self._recent: list[Json] = []
        self._evaluations: list[Json] = []
        self._troubles: list[Json] = []
        self._credit = dict.fromkeys(self._peers, 0)
        self._rounds = dict.fromkeys(self._peers, 0)
        self._time = 1_790_000_000.0

    def advance(self, rounds: int = 1) -> None:
        """Go on by so many rounds."""
        for _ in range(rounds):
            self._round(len(self._columns["round"]) + 1)

    def _round(self, number: int) -> None:
        chance, voters = self._chance, self._peers[: max(1, min(4, len(self._peers)))]
        roster = [peer for peer in self._peers if chance.random() < 0.97]
        out = [(peer, chance.choice(REASONS[1:])) for peer in roster if chance.random() < 0.04]
        cut = [peer for peer in roster if peer not in dict(out)] or roster[:1]
        flagged = int(chance.random() < 0.01)
        self._time += 11 + 4 * chance.random()
        for peer in cut:
            self._credit[peer] = self._credit.get(peer, 0) + TOKENS_OF_PEER
            self._rounds[peer] = self._rounds.get(peer, 0) + 1
        loss = 1.4 + 4.1 * math.exp(-9 * number / self._planned) + 0.03 * chance.gauss(0, 1)
        row = {
            "round": number,
            "time": round(self._time, 1),
            "tokens": (self._columns["tokens"] or [0])[-1] + TOKENS_OF_PEER * len(cut),
            "members": len(self._peers),
            "contributors": len(cut),
            "flagged": flagged,
            "voters": len(voters),
            "attempt": int(chance.random() < 0.03),
            "loss": round(loss, 4),
            "root": f"{chance.getrandbits(32):08x}",
        }
        for name, value in row.items():
            self._columns[name].append(value)
        away = [(peer, REASONS[0]) for peer in self._peers if peer not in roster]
        recent = {
            "round": number,
            "root": f"{chance.getrandbits(256):064x}",
            "hash": f"{chance.getrandbits(256):064x}",
            "tokens": TOKENS_OF_PEER * len(cut),
            "roster": roster,
            "cut": cut,
            "flagged": cut[:flagged],
            "out": (*out, *away),
            "voters": voters,
            "quorum": len(voters) * 2 // 3 + 1,
            "total": len(voters),
            "attempt": row["attempt"],
        }
        self._recent = [recent, *self._recent][:KEPT_ROUNDS]
        if chance.random() < 0.02 + 0.2 * (self._planned < 100):
            kind, reason = chance.choice(TROUBLES)
            trouble = {"round": number, "time": row["time"], "kind": kind, "peer": chance.choice(roster), "reason": reason}
            self._troubles = [trouble, *self._troubles][:KEPT_ROUNDS]
        if number % max(1, self._planned // 20) == 0:
            self._evaluate(number, loss + 0.05)

    def _evaluate(self, number: int, loss: float) -> None:
        noise = "".join(self._chance.choices("abcdefgh ():\n_=", k=int(120 * math.exp(-4 * number / self._planned))))
        text = f"arguments):\n    parser = Parser()\n    return parser.run(arguments)\n{noise}"
        evaluation = {"round": number, "loss": loss, "by": self._peers[:2], "samples": [{"prompt": PROMPT, "text": text}]}
        self._evaluations = [*self._evaluations, evaluation]

    def _member(self, number: int, peer: str) -> Json:
        last = (self._columns["round"] or [0])[-1]
        return {
            "peer": peer,
            "name": ("ada", "the lab in room 12", "")[number % 3],
            "state": "training" if number else "keeping",
            "device": "cuda" if number else "keeper",
            "version": "0.1.0",
            "round": last,
            "step": last * 20,
            "tokens": self._credit.get(peer, 0),
            "tokens_per_s": 1_500.0 + 100 * number,
            "loss": (self._columns["loss"] or [None])[-1],
            "rung": ("direct", "punched", "relayed")[number % 3],
            "up": 5e6,
            "down": 2e7,
            "sent": last * 700_000,
            "received": last * 650_000,
            "root": "ab" * 4,
            "votes": int(number < 4),
            "here": True if number < 4 else None,
            "trust": min(1.0, last / 20),
            "rounds": self._rounds.get(peer, 0),
            "credit": self._credit.get(peer, 0),
        }

    @property
    def picture(self) -> Json:
        """What stands now. As in `figures_of`, the last rounds name peers by their places in a table of its own."""
        places: dict[str, int] = {}

        def placed(peers: Sequence[str]) -> list[int]:
            return [places.setdefault(peer, len(places)) for peer in peers]

        recent = [
            {
                **row,
                **{name: placed(row[name]) for name in ("roster", "cut", "flagged", "voters")},
                "out": [{"peer": placed([peer])[0], "reason": reason} for peer, reason in row["out"]],
            }
            for row in self._recent
        ]
        done = len(self._columns["round"])
        voters = self._peers[:4]
        over = done >= self._planned
        return {
            "flockstep": "0.1.0",
            "format": 1,
            "run": "bafyrun" + "7" * 45,
            "name": "a small model of Python",
            "model": "gpt 1m",
            "params": 1_000_000,
            "link": "flockstep://bafyrun" + "7" * 45 + "?via=/ip4/192.0.2.7/tcp/4001/p2p/" + peer_id(99),
            "owner": self._peers[0],
            "taken_at": self._time,
            "taken_by": peer_id(98),
            "decides": "its owner and the peers that it vouches for decide the rounds",
            "verified": "every certificate from round 1 on",
            "progress": {
                "round": done,
                "rounds": self._planned,
                "tokens": (self._columns["tokens"] or [0])[-1],
                "tokens_per_s": 12_345.0,
                "seconds_left": 13.0 * (self._planned - done),
                "round_seconds": 13.0,
                "claimed": False,
                "state": "over" if over else "training",
                "reason": "all rounds are done" if over else "",
            },
            "rounds": {name: list(column) for name, column in self._columns.items()},
            "peers": list(places),
            "recent": recent,
            "members": [self._member(number, peer) for number, peer in enumerate(self._peers)],
            "votes": {
                "round": done,
                "voters": dict.fromkeys(voters, 1),
                "here": voters[:3],
                "missing": voters[3:],
                "votes": len(voters[:3]),
                "quorum": len(voters) * 2 // 3 + 1,
                "total": len(voters),
            },
            "evaluations": list(self._evaluations),
            "credit": [
                {"peer": peer, "name": "", "tokens": tokens, "rounds": self._rounds[peer]}
                for peer, tokens in sorted(self._credit.items(), key=lambda item: -item[1])
            ],
            "troubles": list(self._troubles),
        }
