"""Bootstraps and peers of the laboratory as a test drives them."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import Queue
from typing import Any

from natlab.lab import PORT, Lab, environment

ANSWER_SECONDS = 60.0


def start_bootstrap(lab: Lab, number: int, home: Path, *options: str) -> str:
    """A `flockstep bootstrap` in public; its full address."""
    place = ["--home", str(home), "--port", str(PORT)]
    command = [sys.executable, "-u", "-m", "flockstep", "bootstrap", *place, *options]
    process = lab.start(f"boot{number}", command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    lines: Iterable[str] = process.stdout
    return next(word for line in lines for word in line.split() if word.startswith("/ip4/44."))


class Person:
    """One `peer.py` on a computer of the laboratory."""

    def __init__(self, lab: Lab, computer: str, bootstraps: list[str], extra: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, str(Path(__file__).parent / "peer.py"), *bootstraps]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.computer = computer
        self.id = ""
        self._process = lab.start(computer, command, env=environment(extra), **pipes)
        self._answers: dict[int, Queue[dict[str, Any]]] = {0: Queue()}
        self._number = 0
        threading.Thread(target=self._read, daemon=True).start()

    def await_entry(self) -> str:
        """Wait until it is in; its peer id."""
        self.id = str(self.answer(0)["peer"])
        return self.id

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one command."""
        return self.answer(self.send(do, **arguments))

    def send(self, do: str, **arguments: Any) -> int:
        """Send a command; its number, for `answer`."""
        self._number += 1
        self._answers[self._number] = Queue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"number": self._number, "do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._number

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a command."""
        answer = self._answers[number].get(timeout=ANSWER_SECONDS)
        assert "error" not in answer, f"{self.computer}: {answer['error']}"
        return answer

    def end(self) -> None:
        """Let it leave in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(ANSWER_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = json.loads(line)
            self._answers[words.pop("number", 0)].put(words)
        for waiting in list(self._answers.values()):
            waiting.put({"error": "its process has ended"})
