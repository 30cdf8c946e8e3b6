"""A node of a hivemind DHT in a process of its own: it stores and gets values, a JSON array a line.

    python -m flockstep.dht.hivemind.node <multiaddr>…

    [number, "store", key, subkey, hex, seconds]    answered by [number, true or false]
    [number, "get", key]                            answered by [number, {subkey: hex}]

It writes [0, true] once it has joined, an error as a text, and ends with its stdin. Only this part of the network
imports hivemind, which loads torch, forks, starts a daemon written in Go, and cannot share a process with libp2p (both
register a protobuf file `crypto.proto`, with different contents). The values are bytes of strangers: the asker
validates them.
"""

import json
import os
import sys
from typing import Any

MAX_SUBKEYS = 1000
MAX_SUBVALUE_BYTES = 65_000
MAX_HIVEMIND_ANSWER_BYTES = 1 << 22
"""The limit of the bytes of one key that are passed on, if it is flooded."""


_answers = sys.stdout


def main(peers: list[str]) -> None:
    """Serve until stdin ends."""
    global _answers
    # stdout is for answers only: the output of hivemind and its daemon goes to stderr.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        import hivemind

        # A client: it serves no other node, so that volunteers that leave make no holes in routing tables.
        dht = hivemind.DHT(initial_peers=peers, start=True, client_mode=True, use_auto_relay=False, use_relay=False)
    except Exception as error:  # noqa: BLE001  The network process reports it and goes on without.
        _answer(0, repr(error))
        return
    _answer(0, True)
    try:
        for line in sys.stdin:
            number, *question = json.loads(line)
            try:
                _answer(number, _act(dht, *question))
            except Exception as error:  # noqa: BLE001  Each question gets an answer.
                _answer(number, repr(error))
    finally:
        dht.shutdown()


def _act(dht: Any, do: str, key: str, *rest: Any) -> Any:
    if do == "get":
        return _get(dht, key)
    from hivemind.utils import get_dht_time

    subkey, value, seconds = rest
    return bool(dht.store(key, bytes.fromhex(value), get_dht_time() + seconds, subkey=subkey))


def _get(dht: Any, key: str) -> dict[str, str]:
    """Return all plausible values under a key, up to a limit."""
    found = dht.get(key, latest=True)
    entries = found.value if found is not None and isinstance(found.value, dict) else {}
    answer: dict[str, str] = {}
    room = MAX_HIVEMIND_ANSWER_BYTES
    for subkey, entry in list(entries.items())[:MAX_SUBKEYS]:
        value = getattr(entry, "value", None)
        if isinstance(subkey, str) and isinstance(value, bytes) and len(value) <= min(MAX_SUBVALUE_BYTES, room):
            answer[subkey[:64]] = value.hex()
            room -= len(value)
    return answer


def _answer(number: int, answer: Any) -> None:
    _answers.write(json.dumps([number, answer]) + "\n")
    _answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
