"""A stand-in for an OpenTelemetry collector on loopback, with the answers of one that is busy or refuses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.answers import Answers, serving


class CollectorStandIn:
    """A collector that answers with `codes` in turn, the last one for ever, and keeps what it takes."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.asked: list[tuple[str, Any, bytes]] = []
        self.accepted: list[int] = []
        """The number of records of each request that was taken."""
        self.news = threading.Condition()
        self.address = ""

    def taken(self) -> list[bytes]:
        return [data for _, _, data in self.asked]

    def wait(self, count: int) -> None:
        self.wait_for(lambda: len(self.asked) >= count)

    def wait_for_text(self, text: bytes) -> None:
        self.wait_for(lambda: any(text in data for data in self.taken()))

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(is_so, timeout=120)


@contextmanager
def collector(*codes: int) -> Iterator[CollectorStandIn]:
    stand_in = CollectorStandIn(*(codes or (200,)))

    class Handler(Answers):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            with stand_in.news:
                code = stand_in.codes[0] if len(stand_in.codes) == 1 else stand_in.codes.pop(0)
                stand_in.asked.append((self.path, self.headers, data))
                stand_in.accepted += [data.count(b'"eventName"')] if code == 200 else []
                stand_in.news.notify_all()
            self.answer(code)

    with serving(Handler) as port:
        stand_in.address = f"http://127.0.0.1:{port}"
        yield stand_in
