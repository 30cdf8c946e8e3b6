"""The limits of a bootstrap's answers: those of an address are those of its /64."""

from typing import Any

import pytest
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.nat import dialback
from flockstep.peer.nat.dialback import Dialback


class _From:
    """A stream of a peer at an address of one /64."""

    remote = "a peer"

    def __init__(self, number: int) -> None:
        self._ip = f"2a0f:44:1:2::{number:x}"
        self.sent = b""

    def remote_socket(self) -> tuple[str, int]:
        return self._ip, 4001

    async def send_all(self, data: bytes) -> None:
        self.sent += data


async def _fails(peer: str, address: str, seconds: float) -> str:
    return "nobody is there"


async def test_the_addresses_of_one_64_share_questions_and_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new connection of a home could come from a new address, with questions and dials of its own."""
    monkeypatch.setattr(dialback, "QUESTIONS_PER_PERIOD", 3)
    monkeypatch.setattr(dialback, "DIALS_PER_PERIOD", 2)

    server = Dialback(_fails)
    streams: list[Any] = [_From(number) for number in range(4)]
    answers = [await server._answer(stream, 4001) for stream in streams[:3]]
    assert [answer.dialled for answer in answers] == [True, True, False]
    with pytest.raises(NetworkError, match="too many questions from one address"):
        await server._answer(streams[3], 0)
