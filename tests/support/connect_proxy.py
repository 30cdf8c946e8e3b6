"""An HTTP proxy that knows CONNECT alone, as a process: what an office has on port 3128.

    python -m support.connect_proxy [--host HOST] [--port PORT] [--login NAME:PASSWORD] [--only-port PORT] \\
        [--map HOST:PORT=HOST:PORT]

It prints its port, and then one line for each request: the status and the target.
"""

import argparse
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import trio

MAX_HEAD = 1 << 14


class ConnectProxy:
    """A running proxy."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.port = int(self.next_line())

    def next_line(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def connect_proxy(*options: str) -> Iterator[ConnectProxy]:
    """Run one on loopback, on a free port."""
    command = [sys.executable, "-m", "support.connect_proxy", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    try:
        yield ConnectProxy(process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def serve(arguments: argparse.Namespace, downstream: trio.SocketStream) -> None:
    """Answer one request, and pass bytes on until either side ends."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < MAX_HEAD:
        if not (data := await downstream.receive_some(MAX_HEAD)):
            return
        head += data
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    status = judge(arguments, method, target, lines[1:])
    upstream: trio.SocketStream | None = None
    if status.startswith("200"):
        mapped: str = dict(one.split("=") for one in arguments.map).get(target, target)
        host, _, port = mapped.rpartition(":")
        try:
            upstream = await trio.open_tcp_stream(host.strip("[]"), int(port))
        except OSError:
            status = "502 Bad Gateway"
    sys.stdout.write(f"{status[:3]} {target}\n")
    sys.stdout.flush()
    await downstream.send_all(f"HTTP/1.1 {status}\r\n\r\n".encode())
    if upstream is not None:
        async with upstream, trio.open_nursery() as nursery:
            nursery.start_soon(pump, downstream, upstream, nursery.cancel_scope)
            nursery.start_soon(pump, upstream, downstream, nursery.cancel_scope)


def judge(arguments: argparse.Namespace, method: str, target: str, headers: list[str]) -> str:
    """The status of a request."""
    login = f"proxy-authorization: basic {b64encode(arguments.login.encode()).decode()}".lower()
    if arguments.login and login not in map(str.lower, headers):
        return "407 Proxy Authentication Required"
    if method != "CONNECT":
        return "405 Method Not Allowed"
    is_allowed = not arguments.only_port or target.endswith(f":{arguments.only_port}")
    return "200 Connection established" if is_allowed else "403 Forbidden"


async def pump(source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Pass bytes on in one direction; its end is the end of both."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while data := await source.receive_some(1 << 16):
            await sink.send_all(data)
    scope.cancel()


async def main(arguments: argparse.Namespace) -> None:
    """Serve until killed."""
    listeners = await trio.open_tcp_listeners(arguments.port, host=arguments.host)
    sys.stdout.write(f"{listeners[0].socket.getsockname()[1]}\n")
    sys.stdout.flush()

    async def guarded(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await serve(arguments, stream)

    await trio.serve_listeners(guarded, listeners)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--login", default="")
    parser.add_argument("--only-port", default="")
    parser.add_argument("--map", action="append", default=[])
    trio.run(partial(main, parser.parse_args()))
