"""Revisions: how the owner changes settings of a run that trains. Pure.

Theory of operation. A revision is an owner's statement with the verb `revise` (`statements`): all settings that differ from
the manifest's, in canonical JSON. Its number is that of the statement. The run id stays the hash of the manifest.

Which settings hold in a round is a function of the certificate before it, like who votes: its value carries the statement,
or nothing while the manifest's own hold. So whoever holds a certificate has the settings of the next round, and no two
peers on one chain ever use different ones, whenever they hear of a revision. A roster names the revision that the next
round is to have: that of the chain, or one of a greater number that its proposer holds. The statement travels in it. A
voter refuses one of the same or a smaller number, one that the owner has not signed, and settings beyond their limits.

Hence, of two revisions with one number the one that the voters decide on is the run's, and the other one is nothing; an
old one never comes back; one that nobody proposes has no effect.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ...peer.base.errors import MalformedMessage, ProtocolViolation, RemoteError, UsageError
from ...peer.base.transport import PeerId
from ..records import Record
from .manifest import MAX_OUTER_LR, Manifest, SignedManifest
from .settings import faults as value_faults
from .statements import MAX_REVISION_SETTINGS_BYTES, OwnerVerb, open_statement

REVISABLE: Mapping[str, tuple[str, ...]] = {
    "outer": ("rounds", "lr", "momentum", "momentum_warmup"),
    "inner": ("lr", "adamw_lr", "weight_decay", "momentum", "warmup_steps", "schedule", "clip", "ramp"),
    "codec": ("contribution", "result", "choices"),
    "eval": ("every", "prompts"),
}
"""The settings that a revision may name, by section."""
_PLAIN = (int, float, str, bool)
_FIXED = {
    "name": "those who look for the run know it by that name",
    "owner": "the owner's key is the run's",
    "seed": "all have begun from it",
    "model": "the state has its shape",
    "[data] source": "volunteers have agreed to it; publish a run of other data with `[model] from` this one's state",
    "[data] tokenizer": "the model has learned its tokens",
    "data": "the data is cut into the same sequences and batches by all",
    "[inner] optimizer": "its state would begin anew on every peer",
    "[inner] betas": "what they average would be a mixture of two for as long as they average",
    "inner": "it says how long a phase is, which all count alike",
    "[outer] checkpoint_every": "newcomers count on the checkpoints of all to be of the same rounds",
    "outer": "it says which cells a round averages, and when",
    "[admission] allow": "the list grows by `flockstep run invite LINK --peer ID`, and shrinks by `flockstep run revoke`",
    "admission": "who decides must not change under those who decide: vouch, revoke and ban, or `flockstep run succeed`",
    "defence": "trust was earned under it",
    "timing": "peers that wait for each other must agree how long",
    "start": "the run has begun from it",
    "layout": "the state has it",
    "by": "volunteers have joined for whom it named",
    "contact": "it stands beside who asks for the training",
}
"""Why other settings cannot change, for people, by name or section."""


@dataclass(frozen=True, slots=True)
class Revision:
    """An owner's revision of a run's settings."""

    number: int
    """Of the statement; 0 for the manifest itself."""
    settings: str
    """Canonical JSON: the names (`section.key`) in order, and their values."""


UNREVISED = Revision(0, "{}")


@lru_cache(maxsize=64)  # Every certificate carries it.
def open_revision(data: bytes, run: str, owner: PeerId) -> Revision:
    """Decode an owner's statement that revises its run; empty bytes stand for the manifest. Raises `RemoteError`.

    Whoever does not know the run's manifest, such as a directory server, passes no owner and checks the signature alone.
    """
    if not data:
        return UNREVISED
    record = Record.decode(data)
    if record.run != run or (owner and record.peer != owner):
        raise ProtocolViolation(f"a revision by {record.peer!r}, not by the owner of this run")
    statement = open_statement(record)
    if statement.verb != OwnerVerb.REVISE:
        raise ProtocolViolation(f"a revision that is a statement of the kind {statement.verb!r}")
    _parse(statement.settings)
    return Revision(record.sequence, statement.settings)


def why_not_revision(data: bytes, before: bytes, run: str, owner: PeerId, manifest: Manifest | None) -> str:
    """Return why a certificate or roster cannot name this revision after `before`, which was checked; empty if it can.

    Its settings are checked against the run's manifest; None where it is not known.
    """
    if data == before:
        return ""
    try:
        revision, known = open_revision(data, run, owner), open_revision(before, run, owner)
        if manifest is not None:
            revised(manifest, revision)
    except (RemoteError, UsageError) as error:
        return f"it names a revision that is none: {error}"
    if revision.number <= known.number:
        return f"it names revision {revision.number} after revision {known.number}"
    return ""


@lru_cache(maxsize=64)  # A member asks several times a round, and the checks take a millisecond.
def revised(manifest: Manifest, revision: Revision) -> Manifest:
    """Return the settings under a revision. Raises `UsageError` for a value beyond its limits."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in _parse(revision.settings).items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    changed = {section: _with(getattr(manifest, section), values) for section, values in sections.items()}
    after = replace(manifest, **changed)
    for fault in (*(it for section in changed for it in value_faults(getattr(after, section), section)), *after.faults()):
        raise UsageError(f"a revision that makes no valid run: {fault}")
    if not 0 < after.outer.lr <= MAX_OUTER_LR:  # No peer could make an outer step by it.
        raise UsageError(f"a revision that makes no valid run: [outer] lr must be in (0, {MAX_OUTER_LR:g}]")
    return after


@lru_cache(maxsize=64)  # Asked for several times a round.
def revised_by(signed: SignedManifest, data: bytes) -> Manifest:
    """Return the settings of a run under a revision that a valid certificate names, or that was checked."""
    return revised(signed.manifest, open_revision(data, signed.run_id, signed.manifest.owner))


def why_not_revise(signed: SignedManifest, data: bytes, before: bytes) -> str:
    """Return why this revision cannot follow `before`; empty if it can."""
    return why_not_revision(data, before, signed.run_id, signed.manifest.owner, signed.manifest)


def settings_of(manifest: Manifest, before: Revision, changes: Mapping[str, Any]) -> str:
    """Return the settings of the revision that makes these `changes` after `before`. Raises `UsageError`.

    Numbers take the type of the setting, so that `lr = 1` is one.
    """
    for name, value in changes.items():
        if not _is_plain(value) or (type(value) is float and not math.isfinite(value)):
            raise UsageError(f"{name} must be a number, a text, true, false or a list of texts, not {value!r}")
        if not _is_revisable(name):
            known = ", ".join(f"{it}.{other}" for it, keys in REVISABLE.items() for other in keys)
            section, _, key = name.partition(".")
            why = _FIXED.get(f"[{section}] {key}", _FIXED.get(section, "it is not among the settings that can"))
            raise UsageError(f"{name} cannot change while a run trains: {why}", remedy=f"what can: {known}")
    whole = _parse(before.settings) | {name: _typed(manifest, name, value) for name, value in changes.items()}
    text = _dump({name: value for name, value in whole.items() if value != _value_of(manifest, name)})
    if len(text.encode()) > MAX_REVISION_SETTINGS_BYTES:
        raise UsageError(f"the revised settings take {len(text.encode())} bytes, at most {MAX_REVISION_SETTINGS_BYTES} fit")
    revised(manifest, Revision(1, text))
    return text


def describe_revision(manifest: Manifest, revision: Revision) -> Iterator[str]:
    """Yield a line for each revised setting."""
    for name, value in _parse(revision.settings).items():
        section, _, key = name.partition(".")
        yield f"[{section}] {key} = {json.dumps(value)} (published with {json.dumps(_value_of(manifest, name))})"


def _is_revisable(name: str) -> bool:
    section, _, key = name.partition(".")
    return key in REVISABLE.get(section, ())


def _parse(text: str) -> dict[str, Any]:
    """Parse the settings of a revision: plain values by `section.key`. Raises `MalformedMessage`."""
    try:
        found = json.loads(text)
        is_plain = isinstance(found, dict) and all(map(_is_plain, found.values()))
        if is_plain and all(map(_is_revisable, found)) and _dump(found) == text:
            return dict(found)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the settings of a revision are no JSON: {error}") from None
    raise MalformedMessage("the settings of a revision are not plain values of settings that can change, in canonical JSON")


def _is_plain(value: object) -> bool:
    """Return True for what a revision may hold: a number, a text, true, false, or a list of texts."""
    return type(value) in _PLAIN or (type(value) is list and all(type(item) is str for item in value))


def _dump(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _with(section: Any, values: Mapping[str, Any]) -> Any:
    given = {key: tuple(value) if type(value) is list else value for key, value in values.items()}
    return type(section)(**{item.name: given.get(item.name, getattr(section, item.name)) for item in fields(section)})


def _value_of(manifest: Manifest, name: str) -> Any:
    """Return a setting as JSON has it."""
    section, _, key = name.partition(".")
    value = getattr(getattr(manifest, section), key)
    return list(value) if type(value) is tuple else value


def _typed(manifest: Manifest, name: str, value: Any) -> Any:
    return float(value) if type(_value_of(manifest, name)) is float and type(value) is int else value
