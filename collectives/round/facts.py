"""The message log of an attempt: deduplicates signed messages and detects equivocation. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ...peer import wire
from ...peer.transport import PeerId
from ..accountability.statements import STATEMENTS

_M = TypeVar("_M", bound=wire.RoundMessage)


class MessageLog:
    """Signed messages of one attempt by kind, sender and subject. Only `add`, `drop` and `restrict` change it.

    Views that are read after every message are cached: a round of 64 reads them some thirty thousand times.
    """

    def __init__(self) -> None:
        self._messages: dict[type, dict[tuple[PeerId, object], tuple[wire.Signed, Any]]] = defaultdict(dict)
        self._num_messages: dict[tuple[type, PeerId], int] = defaultdict(int)
        self._journal: dict[type, list[tuple[wire.Signed, Any] | None]] = defaultdict(list)
        """In the order of arrival; None in place of what a newer one has replaced: updates must not fill my memory."""
        self._places: dict[tuple[type, PeerId, object], int] = {}
        """Of updates, in the journal."""
        self._ackers: dict[bytes, set[PeerId]] = defaultdict(set)
        """By the hash of the acknowledged cut."""
        self._views: dict[type, dict[wire.Slot | None, dict[PeerId, Any]]] = {}

    def add(self, signed: wire.Signed, message: wire.RoundMessage) -> str:
        """Log a message; returns `new`, `known`, or `conflict` (equivocation: a different one on the same subject)."""
        kind, sender, entry = type(message), signed.sender, (signed, message)
        messages, rules = self._messages[kind], STATEMENTS[kind]
        subject = rules.subject(message)
        earlier = messages.get((sender, subject))
        if self._num_messages[kind, sender] >= rules.most:
            return "known" if earlier is not None and earlier[0].payload == signed.payload else "conflict"
        if earlier is not None:
            if earlier[0].payload == signed.payload:
                return "known"
            if not rules.newest_counts:
                return "conflict"
        self._num_messages[kind, sender] += 1
        messages[sender, subject] = entry
        journal = self._journal[kind]
        if rules.newest_counts:
            if earlier is not None:
                journal[self._places[kind, sender, subject]] = None
            self._places[kind, sender, subject] = len(journal)
        journal.append(entry)
        if isinstance(message, wire.CutAck):
            self._ackers[message.cut].add(sender)
        self._views.pop(kind, None)
        return "new"

    def drop(self, kind: type[wire.RoundMessage], peer: PeerId) -> None:
        """Remove a message that was refused."""
        if (dropped := self._messages[kind].pop((peer, None), None)) is not None:
            self._journal[kind] = [None if entry is dropped else entry for entry in self._journal[kind]]
            self._views.pop(kind, None)

    def restrict(self, members: Collection[PeerId]) -> None:
        """Remove the messages of all peers outside the roster: they take no part in its round."""
        members = frozenset(members)
        for kind, messages in self._messages.items():
            for key in [key for key in messages if key[0] not in members]:
                del messages[key]
            kept = [entry for entry in self._journal[kind] if entry is not None and entry[0].sender in members]
            self._journal[kind] = [*kept]
            if STATEMENTS[kind].newest_counts:
                self._places |= {(kind, signed.sender, None): place for place, (signed, _) in enumerate(kept)}
        for senders in self._ackers.values():
            senders.intersection_update(members)
        self._views.clear()

    def num_ever(self, kind: type) -> int:
        """Return how many messages of a kind were logged, including those that newer ones replaced."""
        return len(self._journal[kind])

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
        entries = (entry for entry in self._messages[kind].values() if entry[1].slot == slot)
        return sorted(entries, key=lambda entry: entry[0].sender)

    def since(self, kind: type[_M], start: int) -> list[tuple[wire.Signed, _M]]:
        """Return the messages of a kind in the order of arrival, without the first `start`, for incremental readers.

        Without those that newer ones have replaced: readers of updates count by `num_ever`.
        """
        return [entry for entry in self._journal[kind][start:] if entry is not None]

    def signed(self, kind: type[wire.RoundMessage], peer: PeerId) -> wire.Signed:
        """Return the signed form of a logged message."""
        return self._messages[kind][peer, None][0]

    def by(self, peer: PeerId) -> list[wire.Signed]:
        """Return the signed messages of one peer."""
        logged = (item for messages in self._messages.values() for item in messages.items())
        return [signed for (sender, _), (signed, _) in logged if sender == peer]

    def acknowledged(self, cut: bytes) -> frozenset[PeerId]:
        """Return the peers that have acknowledged the cut of this hash."""
        return frozenset(self._ackers.get(cut, ()))

