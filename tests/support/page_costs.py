"""What the page costs: its bytes and seconds in a browser, an update there, and 200 viewers on the server.

    python tests/support/page_costs.py        # with tests/ on PYTHONPATH; docs/page.md has the figures
"""

import asyncio
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

from flockstep.peer.telemetry import Telemetry
from flockstep.scripts.page.feed import StablePeers
from flockstep.scripts.page.server import PageServer
from playwright.sync_api import Request, sync_playwright
from support.fake_runs import FakeRun

PEERS, ROUNDS = 64, 5000
VIEWERS = 200
UPDATES = 30


def serve(pipe: Connection) -> None:
    """Serve a large run in a process of its own: each message is a round; answers the CPU seconds of the server so far."""
    run, peers = FakeRun(peers=PEERS, planned=ROUNDS + 1000), StablePeers()
    run.advance(ROUNDS)
    with PageServer("127.0.0.1:0", Telemetry(), root=peers.placed(run.picture)) as server:
        pipe.send(server.url)
        while pipe.recv():
            run.advance()
            picture = peers.placed(run.picture)
            before = time.process_time()  # Making the picture up is no part of what a page costs.
            server.publish(picture)
            while pipe.recv():
                pipe.send(time.process_time() - before)


def browser_figures(url: str, pipe: Connection) -> Iterator[str]:
    """Yield the figures of one browser."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(3):
            page = browser.new_context().new_page()
            requests: list[Request] = []
            page.on("requestfinished", requests.append)
            start = time.monotonic()
            page.goto(url)
            page.wait_for_selector("#rounds tbody tr")
            seconds = time.monotonic() - start
            page.wait_for_selector("#live[data-state=live]")
            num_bytes = sum(request.sizes()["responseBodySize"] for request in requests)
            yield f"load: {seconds:.2f} s, {num_bytes / 1e3:.0f} kB"
        for _ in range(UPDATES):
            pipe.send(True)
            page.wait_for_timeout(250)
            pipe.send(False)
        times = page.evaluate("performance.getEntriesByName('update', 'measure').map((each) => each.duration)")
        yield f"update: median {statistics.median(times):.1f} ms, most {max(times):.1f} ms of {len(times)}"
        browser.close()


async def viewer(url: str, done: asyncio.Event) -> int:
    """Hold a stream open until all are done; returns its bytes."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /events?after= HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    count = 0
    while not done.is_set():
        try:
            count += len(await asyncio.wait_for(reader.read(1 << 16), 0.5))
        except TimeoutError:
            continue
    writer.close()
    return count


async def viewers_figures(url: str, pipe: Connection, count: int) -> str:
    """Return what so many viewers cost the server at one update a second."""
    done, spent = asyncio.Event(), 0.0
    tasks = [asyncio.create_task(viewer(url, done)) for _ in range(count)]
    await asyncio.sleep(2)
    for _ in range(UPDATES):
        pipe.send(True)
        await asyncio.sleep(1)
        pipe.send(True)
        spent += await asyncio.to_thread(pipe.recv)
        pipe.send(False)
    done.set()
    num_bytes = sum(await asyncio.gather(*tasks))
    share, each = 100 * spent / UPDATES, num_bytes / max(1, count) / UPDATES
    return f"{count} viewers: {share:.1f} % of a core, {each:.0f} bytes an update"


def main() -> None:
    """Print all figures."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    url = here.recv()
    out = sys.stdout.write
    for line in browser_figures(url, here):
        out(f"{line}\n")
    for count in (0, VIEWERS):
        out(asyncio.run(viewers_figures(url, here, count)) + "\n")
    out(f"load average {os.getloadavg()[0]:.1f}\n")
    here.send(False)
    process.join(10)


if __name__ == "__main__":
    main()
