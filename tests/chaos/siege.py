"""A million fresh keys of one host against real peers: what they cost each of these, and whether the run goes on.

    cd tests && python -m chaos.siege --keys 1000000        # as root on Linux: network namespaces

A bootstrap, ten honest peers that train a line slowly (`slow_trainer`) and vote, a newcomer, and the attacker
(`besieger`) have an address each that counts as public, so that nothing is exempt from limits. The programs are those of
volunteers, with their defaults. The records of all keys are signed before anything is measured, and kept in `--folder` for
the next time. Of each attack the table shows what the network process of a peer took of a core, less what it took
undisturbed, and by how much its memory grew: of the peer that paid most, and of the mean. `--on 1` aims all at one peer.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import IO, Any

import psutil
from chaos.besieger import PAGE, Plan, page
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.chain.voters import electorate_after
from flockstep.collectives.spec import charter_of
from flockstep.collectives.state.archive import LEDGER_FILE
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.peer.identity import Identity
from flockstep.peer.telemetry import Telemetry
from flockstep.peer.wire.signed import verify_signed
from natlab.lab import Home, Lab, environment, why_not
from natlab.people import start_bootstrap
from support.trainers import TOML, network_of

RUN = f"""
name = "siege"{TOML}[admission]
keepers = "{{keepers}}"
min_peers = 4
"""
STEP_SECONDS = 2.0
"""A round takes ten steps: its network processes are idle in between."""
KINDS = ("connects", "handshakes", "streams", "records", "readys", "questions", "fetches", "directory")
TOGETHER = ("records", "readys", "questions", "fetches", "streams")
"""Those that one host makes at the same time: connections beyond the rate would keep its own sessions out."""
SETTLED_ROUNDS = 3


def identity_of(number: int) -> Identity:
    """Return the key of an honest peer."""
    return Identity.from_seed(bytes([number + 1]) * 32)


def signed_run(peers: int) -> SignedManifest:
    """Return the manifest, the same each time: the keys' records are of this run."""
    keepers = " ".join(identity_of(number).peer_id for number in range(1, peers))
    text = RUN.format(rounds=100_000, keepers=keepers)
    return SignedManifest.sign(Manifest.from_toml(text, where="run.toml", owner=identity_of(0).peer_id), identity_of(0))


def sign_pages(folder: Path, run: str, keys: int) -> Path:
    """Write the pages of so many keys' records to a file, unless it is there; returns it."""
    path, numbers = folder / f"{run[:16]}-{keys}.pages", range(-(-keys // PAGE))
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file, multiprocessing.get_context("spawn").Pool() as pool:
            for data in pool.imap(partial(page, run), numbers, chunksize=16):
                file.write(data)
        unfinished.rename(path)
    return path


class Peer:
    """An honest peer: its trainer and, once that has started it, its network process."""

    def __init__(self, lab: Lab, number: int, link: str, home: Path) -> None:
        self.home, self.number = home, number
        self.began = time.time()
        words = [sys.executable, "-m", "chaos.slow_trainer", link, str(home), str(number), str(STEP_SECONDS)]
        self._log = home.with_suffix(".jsonl")
        with self._log.open("w", encoding="utf-8") as log, home.with_suffix(".err").open("w", encoding="utf-8") as errors:
            self.process = lab.start(f"home{number}", words, stdout=log, stderr=errors, env=environment())
        self._network: psutil.Process | None = None

    def events(self, name: str, *, since: float = 0.0) -> list[dict[str, Any]]:
        """Return what it has told under this name since a time."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.home.name} has ended: {self.home.with_suffix('.err').read_text()[-600:]}")
        lines = [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return [event for event in lines if event["event"] == name and event["at"] >= since]

    def tell(self) -> None:
        """Print how long it took to take part, and end it."""
        names = ("peer.start", "run.joined", "round.done")
        started, joined, counted = (self.events(name)[0]["at"] - self.began for name in names)
        _say(f"a newcomer: started after {started:.1f} s, has joined after {joined:.1f}, and taken part after {counted:.1f}")
        for process in (self.network, self.process):
            process.kill()

    @property
    def network(self) -> psutil.Process:
        """Its network process."""
        if self._network is None:
            (self._network,) = network_of(self.process.pid)
        return self._network


class Bill:
    """What processes take from now on."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self._began = time.monotonic()
        self._cpu = [_cpu(process) for process in processes]
        self._peak = [_megabytes(process) for process in processes]
        self._first = list(self._peak)

    def look(self) -> None:
        """Note how much memory they have now."""
        self._peak = [max(peak, _megabytes(process)) for peak, process in zip(self._peak, self._processes, strict=True)]

    def shares(self) -> list[float]:
        """Return what each took, in per cent of a core."""
        seconds = time.monotonic() - self._began
        return [100 * (_cpu(process) - cpu) / seconds for process, cpu in zip(self._processes, self._cpu, strict=True)]

    def grown(self) -> list[float]:
        """Return by how many MB each grew at most."""
        return [peak - first for peak, first in zip(self._peak, self._first, strict=True)]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _megabytes(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6


class Siege:
    """The laboratory with the run."""

    def __init__(self, lab: Lab, options: argparse.Namespace, bootstrap: str, link: str, pages: Path) -> None:
        self.lab, self.options, self.bootstrap, self.link, self.pages = lab, options, bootstrap, link, pages
        self.signed = signed_run(options.peers)
        self.peers = [Peer(lab, number, link, options.folder / f"peer{number}") for number in range(options.peers)]
        self.undisturbed: list[float] = []
        self.next_page = 0

    def settle(self) -> None:
        """Wait until all have taken part in rounds."""
        while any(len(peer.events("round.done")) < SETTLED_ROUNDS for peer in self.peers):
            time.sleep(1)

    @property
    def processes(self) -> list[psutil.Process]:
        """The network processes of the honest peers, and the bootstrap."""
        return [peer.network for peer in self.peers] + [psutil.Process(self.lab._processes[0].pid)]

    def rest(self, seconds: float) -> None:
        """Measure without an attack."""
        bill, began = Bill(self.processes), time.time()
        for _ in range(int(seconds)):
            time.sleep(1)
            bill.look()
        self.undisturbed = bill.shares()
        self._show("nothing", bill, began, {}, absolute=True)
        joining = self.join("control")
        while _is_on_its_way(joining):
            time.sleep(1)
        joining.tell()

    def join(self, name: str) -> Peer:
        """Start a newcomer."""
        return Peer(self.lab, len(self.peers), self.link, self.options.folder / name)

    def attack(self, kinds: Sequence[str], seconds: float, *, keys: int = 0, newcomer: bool = False) -> None:
        """Attack in these ways at the same time, for so many seconds or until so many keys were shown."""
        on = self.peers[: self.options.on or len(self.peers)]
        victims = tuple(
            f"/ip4/{self.lab.public_ip(peer.number)}/tcp/4001/p2p/{identity_of(peer.number).peer_id}" for peer in on
        )
        if kinds == ("directory",):
            victims = (self.bootstrap,)
        plan = Plan(self.signed.run_id, victims, tuple(kinds), 1e6, self.options.workers, str(self.pages), self.next_page)
        words = [sys.executable, "-m", "chaos.besieger", json.dumps(asdict(plan))]
        host = self.lab.start(
            f"home{len(self.peers) + 1}", words, stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert host.stdout is not None
        host.stdout.readline()  # It attacks.
        bill, began = Bill(self.processes), time.time()
        figures: dict[str, float] = {}
        until, joining = time.time() + seconds, None
        while (time.time() < until if not keys else figures.get("next_page", 0) * PAGE < keys) or _is_on_its_way(joining):
            if not (line := host.stdout.readline()):
                raise RuntimeError("the host has ended")
            figures = json.loads(line)
            bill.look()
            if newcomer and joining is None and time.time() > began + 20:
                joining = self.join("newcomer")
        host.kill()
        self._show(" + ".join(kinds), bill, began, figures)
        if joining is not None:
            joining.tell()

    def _show(
        self, what: str, bill: Bill, began: float, figures: dict[str, float], *, absolute: bool = False
    ) -> None:
        grown, shares = bill.grown(), bill.shares()
        if not absolute:
            shares = [share - before for share, before in zip(shares, self.undisturbed, strict=True)]
        seconds = time.time() - began
        done = {
            name: f"{number:,.0f} ({number / seconds:,.0f}/s)"
            for name, number in sorted(figures.items())
            if name not in ("next_page", "cpu")
        }
        rounds = [len(peer.events("round.done", since=began)) for peer in self.peers]
        voids = sum(len(peer.events("round.void", since=began)) for peer in self.peers)
        _say(
            f"{what}, {seconds:.0f} s: a peer {max(shares[:-1]):.2f} % of a core at most, {mean(shares[:-1]):.2f} "
            f"in the mean, {max(grown[:-1]):.1f} MB at most, {mean(grown[:-1]):.1f} in the mean; "
            f"bootstrap {shares[-1]:.2f} %, {grown[-1]:.1f} MB; rounds {min(rounds)} to {max(rounds)}, {voids} void; "
            f"host {100 * figures.get('cpu', 0) / seconds:.0f} % of a core: "
            + ", ".join(f"{name} {number}" for name, number in done.items())
        )

    def voters(self) -> tuple[int, set[str]]:
        """Return the rounds of the chain, and who has had a vote on any of them."""
        charter = charter_of(self.signed)
        path = self.peers[0].home / "runs" / self.signed.run_id / LEDGER_FILE
        ledger = Ledger.beside(path, charter, verify_signed, Telemetry())
        found = [ledger.certificate(number) for number in range(ledger.first, ledger.head.round + 1)]
        certificates = [each for each in found if each is not None]
        return len(certificates), {
            voter for each in certificates for voter in electorate_after(value_of(each), charter).votes
        }

    def refusals(self) -> dict[str, int]:
        """Return what the peers refused, by event and reason."""
        counts: dict[str, int] = {}
        for peer in self.peers:
            for name in ("connection.refused", "message.refused", "peer.charged", "fetch.refused"):
                for event in peer.events(name):
                    reason = f"{name} {event.get('step')}: {event.get('reason')}"[:140]
                    counts[reason] = counts.get(reason, 0) + int(event.get("count", 1))
        return counts


def _is_on_its_way(joining: Peer | None) -> bool:
    return joining is not None and not joining.events("round.done")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def publish(lab: Lab, bootstrap: str, options: argparse.Namespace) -> str:
    """Publish the run from the computer of the bootstrap; returns its link."""
    for number in range(options.peers):
        home = options.folder / f"peer{number}"
        home.mkdir(parents=True)
        (home / "identity.key").write_bytes(identity_of(number)._to_pem())
        (home / "identity.key").chmod(0o600)
    toml = options.folder / "run.toml"
    keepers = " ".join(identity_of(number).peer_id for number in range(1, options.peers))
    toml.write_text(RUN.format(rounds=100_000, keepers=keepers), encoding="utf-8")
    words = ["-u", "-m", "flockstep", "run", "create", str(toml), "--via", bootstrap]
    command = [sys.executable, *words, "--home", str(options.folder / "peer0")]
    process = lab.start("boot0", command, stdout=subprocess.PIPE, text=True, env=environment())
    output: IO[Any] | None = process.stdout
    assert output is not None
    found = (word.strip("'") for line in output for word in line.split())
    link = str(next(word for word in found if word.startswith("flockstep://")))
    process.kill()  # It would go on as a keeper: here the owner trains.
    process.communicate()
    return link


def main() -> None:
    """Measure with the numbers of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--on", type=int, default=0, help="how many of the peers are attacked; 0: all")
    parser.add_argument("--workers", type=int, default=2, help="tasks of each kind of attack at each victim")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="those that are measured alone")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/siege"))
    parser.add_argument("--refusals", action="store_true", help="print what was refused, and why")
    options = parser.parse_args()
    if missing := why_not():
        sys.exit(missing)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # The namespaces are taken down.
    options.folder.mkdir(exist_ok=True)
    pages = sign_pages(options.folder, signed_run(options.peers).run_id, options.keys)
    options.folder = options.folder / f"{os.getpid()}"
    options.folder.mkdir()
    homes = [Home("open") for _ in range(options.peers + 2)]
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(homes, folder=options.folder))
        bootstrap = start_bootstrap(lab, 0, options.folder / "boot0")
        siege = Siege(lab, options, bootstrap, publish(lab, bootstrap, options), pages)
        siege.settle()
        siege.rest(2 * options.seconds)
        for kind in options.kinds:
            siege.attack((kind,), options.seconds)
        if options.keys:
            siege.attack(("records",), 0.0, keys=options.keys, newcomer=True)
            siege.attack(TOGETHER, 2 * options.seconds)
        rounds, voters = siege.voters()
        honest = {identity_of(number).peer_id for number in range(options.peers)}
        _say(f"{rounds} rounds certified; {len(voters)} keys have had votes, {len(voters - honest)} of them not honest")
        if options.refusals:
            for reason, count in sorted(siege.refusals().items(), key=lambda each: -each[1]):
                _say(f"{count:8} {reason}")


if __name__ == "__main__":
    main()
