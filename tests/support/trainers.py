"""Members that train a line in threads of the test, each with a real network process."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from flockstep import PeerConfig, Swarm
from flockstep.peer.log.telemetry import Event
from torch import nn
from torch.utils.data import TensorDataset

TOML = """
[data]
source = "own"
[inner]
optimizer = "adamw"
warmup_steps = 0
schedule = "constant"
steps = 10
[outer]
rounds = {rounds}
lr = 1.0
momentum = 0.0
[codec]
contribution = "int8"
result = "int8"
"""
"""What is trained, the same in all runs of these trainers."""
RUN = f"""
name = "regression"{TOML}[admission]
voters = "members"
min_peers = {{peers}}
[timing]
floor = 20.0
"""
PATIENCE = 120.0
"""Seconds without any event after which a test gives up: bounds only how long a broken build hangs."""
torch.set_num_threads(1)  # As `support.commands` sets it for processes.
STEP_SECONDS = 0.02
"""How long a step takes: that of a line costs nothing, and members that train on while a test waits for something else would
have a round, and its messages, several times a second."""
TRUTH = torch.tensor([[1.0, -2.0, 3.0]])


def dataset(seed: int) -> TensorDataset:
    x = torch.randn(256, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x @ TRUTH.T)


class Trainer(threading.Thread):
    """One member in a thread of this process; its network process is a real one."""

    def __init__(
        self,
        link: str,
        home: Path,
        seed: int,
        on_event: Callable[[Event], None] | None = None,
        *,
        invite: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(daemon=True)  # What fails must not wait for it.
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 1, bias=False).to(dtype)
        self.events: list[Event] = []
        self.roots: list[str] = []
        self.error: BaseException | None = None
        self.listen = on_event or (lambda event: None)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.2)
        config = PeerConfig(home=home, host="127.0.0.1", port=0, invite=invite)
        self.stop = threading.Event()
        self.rests = threading.Event()
        self.swarm = Swarm(link, self.model, inner, config=config, on_event=self._receive, stop=self.stop)
        self._seed = seed
        self._arrived = threading.Condition()

    def _receive(self, event: Event) -> None:
        self.listen(event)
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    def heard(self, name: str, matches: Callable[[Event], bool] = lambda event: True, *, since: int = 0) -> Event:
        """Wait for the first matching event of that name after the first `since` events."""

        def find() -> Event | None:
            found = (event for event in self.events[since:] if event["event"] == name and matches(event))
            return next(found, None)

        with self._arrived:
            while (event := find()) is None:
                assert self.error is None, self.error
                assert self._arrived.wait(PATIENCE), f"no {name}; the last events are {self.events[-8:]}"
        return event

    @property
    def peer_id(self) -> str:
        return str(self.heard("peer.start")["peer"])

    @property
    def network_pid(self) -> int:
        """The process id of this member's network process."""
        return network_pid(self.swarm)

    def signal_network(self, number: int) -> None:
        """Send a signal to this member's network process."""
        os.kill(self.network_pid, number)

    def run(self) -> None:
        try:
            self.train()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that joins this one
            with self._arrived:
                self.error = error
                self._arrived.notify_all()

    def train(self) -> None:
        with self.swarm as swarm:
            for x, y in swarm.share_of(dataset(self._seed), batch_size=16):
                loss = (self.model(x.to(self.model.weight.dtype)) - y).square().mean()
                loss.backward()
                if swarm.step(loss).averaged:
                    self.roots.append(swarm.root)
                if swarm.finished:
                    break
                self.stop.wait(STEP_SECONDS)
                while self.rests.is_set() and not self.stop.is_set():
                    self.stop.wait(STEP_SECONDS)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


def run_rounds(peers: list[Trainer]) -> None:
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(timeout=120)
        assert not peer.is_alive()
        if peer.error is not None:
            raise peer.error


def network_pid(swarm: Swarm) -> int:
    """The process id of a member's network process."""
    return swarm._first._process.pid
