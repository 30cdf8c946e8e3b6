"""The page for Prometheus: its format, and its answers to any request."""

import pytest
import trio
from flockstep.peer.errors import LocalError, UsageError
from flockstep.scripts.metrics_page import MAX_REQUEST_BYTES, Figure, exposition, serve_figures, split_host_port

FIGURES = [
    Figure("swarm_peers", "Who is here.", 3),
    Figure("swarm_refusals_total", "Why not.", 1e15, {"reason": 'a "quoted"\nback\\slash'}),
    Figure("swarm_refusals_total", "Why not.", 0.5, {"reason": "b"}),
]
PAGE = r"""# HELP swarm_peers Who is here.
# TYPE swarm_peers gauge
swarm_peers 3
# HELP swarm_refusals_total Why not.
# TYPE swarm_refusals_total counter
swarm_refusals_total{reason="a \"quoted\"\nback\\slash"} 1e+15
swarm_refusals_total{reason="b"} 0.5
"""


def test_the_format_is_that_of_prometheus() -> None:
    assert exposition(FIGURES) == PAGE


@pytest.mark.parametrize("request_", [b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * MAX_REQUEST_BYTES, b""])
def test_whatever_is_asked_the_figures_are_the_answer(request_: bytes) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve_figures, "127.0.0.1:0", lambda: FIGURES)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(request_)
                if not request_:
                    await stream.send_eof()
                answer = b"".join([piece async for piece in stream]).decode()
            head, _, page = answer.partition("\r\n\r\n")
            assert head.startswith("HTTP/1.1 200 OK\r\n")
            assert page == PAGE
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve_figures, "127.0.0.1:0", lambda: FIGURES)
            with pytest.raises(LocalError, match=f"cannot show metrics at 127.0.0.1:{port}"):
                await nursery.start(serve_figures, f"127.0.0.1:{port}", lambda: FIGURES)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_place_is_a_host_and_a_port() -> None:
    assert split_host_port("[::1]:9401") == ("::1", 9401)
    for wrong in ("9401", ":9401", "host:", "host:http", "host:99999"):
        with pytest.raises(UsageError, match="is not HOST:PORT"):
            split_host_port(wrong)
