"""The message log of an attempt: deduplicates signed messages and detects equivocation. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ...peer import wire
from ...peer.base.transport import PeerId
from ..accountability.statements import STATEMENTS

_M = TypeVar("_M", bound=wire.RoundMessage)


class MessageLog:
    """Signed messages of one attempt by kind, sender and subject. Only `add`, `drop` and `restrict` change it.

    Views that are read after every message are cached: a round of 64 reads them some thirty thousand times.
    """

    def __init__(self) -> None:
        self._messages: dict[type, dict[tuple[PeerId, object], tuple[wire.Signed, Any]]] = defaultdict(dict)
        self._by_sender: dict[tuple[type, PeerId], list[tuple[wire.Signed, Any]]] = defaultdict(list)
        self._journal: dict[type, list[tuple[wire.Signed, Any]]] = defaultdict(list)
        """In the order of arrival."""
        self._contradictions: dict[tuple[type, PeerId], tuple[wire.Signed, Any]] = {}
        """The first statement of each kind by each sender that contradicts an earlier one, or the one that others name."""
        self._views: dict[type, dict[wire.Slot | None, dict[PeerId, Any]]] = {}

    def add(self, signed: wire.Signed, message: wire.RoundMessage, *, is_named: bool = False) -> str:
        """Log a message; returns `new`, `known`, or `conflict` (equivocation: a different one on the same subject).

        What a cut has named is logged beyond the limits of its author.
        """
        kind, sender, entry = type(message), signed.sender, (signed, message)
        messages, rules = self._messages[kind], STATEMENTS[kind]
        subject = sender, rules.subject(message)
        earlier = messages.get(subject)
        if earlier is not None and earlier[0].payload == signed.payload:
            return "known"
        if earlier is not None:
            if is_named or (kind, sender) not in self._contradictions:
                self._contradictions[kind, sender] = entry
            return "conflict"
        if self.num_by(kind, sender) >= rules.most and not is_named:
            return "conflict"
        self._by_sender[kind, sender].append(entry)
        messages[subject] = entry
        self._journal[kind].append(entry)
        self._views.pop(kind, None)
        return "new"

    def drop(self, kind: type[wire.RoundMessage], peer: PeerId) -> None:
        """Remove a message that was refused."""
        if (dropped := self._messages[kind].pop((peer, None), None)) is not None:
            self._journal[kind].remove(dropped)
            self._by_sender[kind, peer].remove(dropped)
            self._views.pop(kind, None)

    def restrict(self, members: Collection[PeerId]) -> None:
        """Remove the messages of all peers outside the roster: they take no part in its round."""
        members = frozenset(members)
        for kind, messages in self._messages.items():
            for key in [key for key in messages if key[0] not in members]:
                del messages[key]
            self._journal[kind] = [entry for entry in self._journal[kind] if entry[0].sender in members]
        self._views.clear()

    def num_ever(self, kind: type) -> int:
        """Return how many messages of a kind were logged."""
        return len(self._journal[kind])

    def num_by(self, kind: type[wire.RoundMessage], peer: PeerId) -> int:
        """Return how many messages of a kind by a peer were logged."""
        return len(self._by_sender.get((kind, peer), ()))

    def of(self, kind: type[_M], slot: wire.Slot | None = None) -> Mapping[PeerId, _M]:
        """Return the messages of a kind that a peer sends once, by sender, sorted; only those of `slot` if given."""
        messages = self._messages[kind]
        if not messages:
            return {}
        views = self._views.setdefault(kind, {})
        view = views.get(slot)
        if view is None:
            found = {sender: message for (sender, _), (_, message) in messages.items()}
            view = {peer: found[peer] for peer in sorted(found) if slot is None or found[peer].slot == slot}
            views[slot] = view
        return view

    def every(self, kind: type[_M], slot: wire.Slot) -> list[tuple[wire.Signed, _M]]:
        """Return all messages of a kind that has several subjects, sorted by sender."""
        entries = (entry for entry in self._journal[kind] if entry[1].slot == slot)
        return sorted(entries, key=lambda entry: entry[0].sender)

    def since(self, kind: type[_M], start: int) -> list[tuple[wire.Signed, _M]]:
        """Return the messages of a kind in the order of arrival, without the first `start`, for incremental readers."""
        return self._journal[kind][start:]

    def named(self, kind: type[_M], peer: PeerId, name: bytes) -> tuple[wire.Signed, _M] | None:
        """Return the statement of a peer by its name, be it one that contradicts another one of it."""
        other = self._contradictions.get((kind, peer))
        entries = (*self._by_sender.get((kind, peer), ()), *([] if other is None else [other]))
        return next((entry for entry in entries if entry[0].name == name), None)

    def signed(self, kind: type[wire.RoundMessage], peer: PeerId) -> wire.Signed:
        """Return the signed form of a logged message."""
        return self._messages[kind][peer, None][0]

    def by(self, peer: PeerId) -> list[wire.Signed]:
        """Return the signed messages of one peer."""
        logged = (item for messages in self._messages.values() for item in messages.items())
        return [signed for (sender, _), (signed, _) in logged if sender == peer]
