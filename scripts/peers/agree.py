"""What `flockstep join` and `keep` show before the first time of a run, and the question whether to go on.

At that time the bootstraps of the link have been asked for the manifest, and nobody else knows of this computer. An answer
is remembered as `<home>/runs/<run id>/agreed`: the run id is the hash of the manifest, so it holds for these settings and
no others. Without a terminal there is nobody to ask, so nothing is joined without `--yes`.
"""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from textwrap import wrap

from ...dht.run.manifest import SignedManifest
from ...optim.shards.packed import Pin
from ...peer.base.config import PeerConfig
from ...peer.base.disk import write_whole
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.plain import plain_text
from ..watch.voters import who_decides
from .terminal import ending_signals

WHO_MAY_JOIN = {
    "open": "everybody",
    "invite": "whoever has an invitation from its owner",
    "allow": "the peers that its owner has listed",
}
LABEL_WIDTH, WIDTH = 10, 80
"""Characters of a label, and of a line: as many as a terminal has at least."""
LOOPBACK = "127.0.0.1"
YES = ("y", "yes")


class Purpose(StrEnum):
    """What this computer is asked for."""

    JOIN = "join"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shows runs by `say`, and asks by `read` unless it is None; `yes` is an answer given beforehand."""

    config: PeerConfig
    say: Callable[[str], None]
    read: Callable[[str], str] | None
    yes: bool
    purpose: Purpose = Purpose.JOIN

    def agree(self, signed: SignedManifest, begun: int = 0) -> str:
        """Show a run and ask for consent, unless that was given before; returns how. Raises `LocalError` on a refusal.

        `signed` holds the settings as the owner has revised them; `begun` is the round at which the run is, 0 where that is
        not known. Raises `LocalError` for a run that is over, and `UsageError` where nobody can be asked.
        """
        folder = self.config.home / "runs" / signed.run_id
        joined = folder / "agreed"
        agreed = joined if self.purpose is Purpose.JOIN else folder / "agreed-keep"
        if agreed.exists() or joined.exists():  # Who joins also keeps, and not the other way round.
            return "agreed to before"
        if begun >= signed.manifest.num_rounds:
            raise LocalError(
                f"this run is over: all of its {begun:,} rounds are done",
                remedy="`flockstep keep LINK` takes its model from a member, then `flockstep export` makes files of it",
            )
        if not self.yes and self.read is None:
            raise UsageError(
                f"there is no terminal to ask on whether to {self.purpose} this run",
                remedy="`flockstep run info LINK` shows it, and --yes agrees",
            )
        lines = list(describe_run(signed, self.config, self.purpose, begun))
        for line in lines:
            self.say(line)
        if self.yes:
            how = "agreed to by --yes"
        elif self.read is not None and self.read(f"{self.purpose.title()} this run? [y/N] ").strip().lower() in YES:
            how = "agreed to by its user"
        else:
            done = "joined" if self.purpose is Purpose.JOIN else "kept"
            raise LocalError(f"not {done}", remedy="the other members have not heard of this computer")
        write_whole(agreed, "".join(f"{line}\n" for line in lines).encode())
        return how


def describe_run(
    signed: SignedManifest, config: PeerConfig, purpose: Purpose = Purpose.JOIN, begun: int = 0
) -> Iterator[str]:
    """Yield what a person should know of a run, at round `begun`, before the first time. Raises as its model does."""
    from ...optim.models.needs import gigabytes, needs_of, num, round_bytes, size_of_gpt

    keeps = purpose is Purpose.KEEP
    manifest = signed.manifest
    model, source = plain_text(manifest.model_name), plain_text(manifest.data.source)
    # Another model is built to be counted, which a stranger's options can make as long as they like.
    is_known = manifest.model.name == "gpt" and not manifest.is_own
    size = size_of_gpt(manifest.model.options) if is_known else None
    needs = needs_of(manifest, size) if size is not None else None
    unknown = "known once the state is here" if keeps else "known once the model is here"
    home = shlex.quote(str(config.home))
    yield f'The run "{plain_text(manifest.name)}", which you {purpose} for the first time:'
    yield from _row("run", signed.run_id)
    by = ", ".join(plain_text(text) for text in (manifest.by, manifest.contact) if text)
    yield from _row("asked for", f'by "{by}" (what they call themselves)' if by else "by somebody who gives no name")
    yield from _row("owner", f"the key {manifest.owner}, which has signed all of this")
    yield from _row("members", WHO_MAY_JOIN[manifest.admission.kind])
    yield from _row("voters", who_decides(manifest))
    if keeps:
        yield from _row("keeping", "this computer holds the state, checks, serves, and votes if it may; it trains nothing")
    yield from _row("model", model if size is None else f"{model}, {num(size.num_trained)} parameters")
    if not keeps:
        yield from _row("data", f"{plain_text(config.data)}, in place of {source}" if config.data else source)
        pin = None if config.data else Pin.of(manifest.data.source)
        if pin is not None:
            where = f"{plain_text(pin.host)}, which sees this computer's IP address" if pin.host else "the members of the run"
            yield from _row("from", where)
    seconds = manifest.inner.seconds / manifest.outer.fragments
    each = f"{seconds:,.0f} s" if seconds else f"{manifest.phase_steps:,} steps"
    streamed = ", while the training goes on" if manifest.outer.mode == "streaming" else ""
    so_far = f", of which {begun:,} are done" if begun else ""
    rounds = f"{manifest.num_rounds:,} rounds of about {each} each{streamed}{so_far}"
    yield from _row("how long", f"{rounds}; you may leave at any time")
    if not keeps:
        where = "a GPU if there is one, or else the processor" if config.device == "auto" else plain_text(config.device)
        yield from _row("works on", f"{where}; --threads, --hours and --when-idle leave some of it to you")
        memory = unknown if needs is None else f"about {gigabytes(needs.memory + needs.training)}, and more for each batch"
        yield from _row("memory", memory)
    disk = unknown if needs is None else gigabytes(needs.disk)
    yield from _row("disk", f"{disk}, below {home}")
    if size is None:
        yield from _row("network", unknown)
    else:
        a_round, often = round_bytes(manifest, size), max(seconds, 1.0) if seconds else 60.0
        pace = "" if seconds else " at a round a minute"
        a_day = f"{gigabytes(int(a_round * 86400 / often))} a day{pace}, sent and as much received"
        yield from _row("network", f"up to {gigabytes(a_round)} a round, {a_day}; --max-up limits it")
    yield from _row("who sees", "bootstraps and members: this computer's IP addresses, its device, and when it is on")
    if config.port and config.host != LOOPBACK:
        yield from _row("open", f"TCP port {config.port}, to your local network; --host {LOOPBACK} closes it")
    to_pause = "" if keeps else f"`flockstep pause --home {home}` for a while, "
    yield from _row("to stop", f"{to_pause}Ctrl-C for good; a service: `flockstep service remove`")


def terminal_reader() -> Callable[[str], str] | None:
    """Return what reads an answer from the terminal; None without one."""
    return _read if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty() else None


def _read(question: str) -> str:
    try:
        with _interruptible():
            return input(plain_text(question))
    except EOFError:
        return ""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let one Ctrl-C end the question: elsewhere it asks for an orderly leave, of which a pending `input` hears nothing."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _row(label: str, text: str) -> list[str]:
    """Return a row in lines of `WIDTH`, which break between words."""
    first, others = f"  {label:{LABEL_WIDTH}}", " " * (2 + LABEL_WIDTH)
    return wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
