"""A member that cannot train under what its run's owner has revised: it keeps the run, and trains nothing.

One rule for every setting and every reason: nobody here has agreed to the data, they are not there or have tokens that the
model does not know, or a later version has named the setting. To leave would cost the others a vote and a copy of the
state, so the member goes on as a keeper does, under the consent that it has for that: whoever joins also keeps. It tries
again at the owner's next revision; as soon as its user agrees (`flockstep agree` writes a file that this one looks for),
where that was missing; and else every half an hour, since a dataset may be out of reach for a moment.
"""

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import trio

from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...optim.consent import is_public_data
from ...optim.keeper.keeper import Keeper
from ...peer.base.config import PeerConfig
from ...peer.base.errors import CannotFollow, NotAgreed
from ...peer.base.plain import plain_text
from ...peer.log.telemetry import Event, Telemetry, log_path
from .agree import Agreement
from .keep import LOOK_PERIOD, keep_on, keep_run

RETRY_SECONDS = 1800.0
"""To try costs a member its place in one round or two, and most of what is out of reach is back by then."""


END_SECONDS = 15.0
"""How long the last state of a run is served to members that do not have it, as by a member that has trained."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How keeping has ended: the settings with which to train on, and the last state if the run is over."""

    config: PeerConfig
    end: tuple[int, str] | None = None
    """The last round, and its state root in hex."""


class Watch:
    """Decides when a keeper that was `refused` a run's settings tries again to train, as a function of trio's clock."""

    def __init__(self, refused: CannotFollow, allows: Callable[[SignedManifest], bool]) -> None:
        self._refused = refused
        self._allows = allows
        self._began: float | None = None
        self._over_since: float | None = None
        self.source = ""
        """The data to which its user has agreed since."""
        self.why = ""
        """Why it tries again."""
        self.end: tuple[int, str] | None = None

    def ends(self, keeper: Keeper) -> bool:
        """Return True if a settled keeper ends keeping: `why` it tries again, or the `end` of the run."""
        now = trio.current_time()
        self._began = self._began or now
        if keeper.is_over and keeper.kept is not None:
            self._over_since = self._over_since or now  # Others take the last state from here.
            self.end = keeper.kept.place.round, keeper.kept.place.root.hex()
            return now - self._over_since >= END_SECONDS
        number, signed = keeper.newest
        if isinstance(self._refused, NotAgreed):
            if number >= self._refused.revision and self._allows(signed):
                self.source = signed.manifest.data.source
                self.why = f"its user has agreed to {plain_text(self.source)}"
        elif number > self._refused.revision:
            self.why = "the run's owner has revised it again"
        elif now - self._began >= RETRY_SECONDS:
            self.why = f"{RETRY_SECONDS / 60:.0f} minutes have passed"
        return bool(self.why)


def keep_unfollowed(
    link: str,
    config: PeerConfig,
    agreement: Agreement,
    refused: CannotFollow,
    over: threading.Event,
    on_event: Callable[[Event], None],
) -> Kept:
    """Keep a run under whose settings this peer cannot train, until it may try again, the run is over, or `over` is set."""
    watch = Watch(refused, agreement.allows)
    if isinstance(refused, NotAgreed):
        stopped, resumed, step = "consent.awaited", "consent.given", "data"
        reason = f"{refused}; it trains nothing until somebody does: flockstep agree '{link}'"
    else:
        stopped, resumed, step = "revision.unfollowed", "revision.retried", "revise"
        remedy = f" ({refused.remedy})" if refused.remedy else ""
        until = f"until the owner's next revision, or {RETRY_SECONDS / 60:.0f} minutes from now"
        reason = f"this peer keeps the run and trains nothing {until}: {refused}{remedy}"
    with closing(Telemetry(log_path(config.home))) as telemetry:
        telemetry.subscribe(on_event)
        telemetry.emit(stopped, step=step, reason=reason)
        trio.run(_keep, JoinLink.parse(link), config, telemetry, watch, over)
        if watch.why:
            telemetry.emit(resumed, step=step, reason=watch.why)
    # What only its user may open is among what was agreed to if the user has named it.
    if watch.source and not is_public_data(watch.source):
        config = replace(config, allow_data=watch.source)
    return Kept(config, watch.end)


async def _keep(link: JoinLink, config: PeerConfig, telemetry: Telemetry, watch: Watch, over: threading.Event) -> None:
    stop = trio.Event()

    async def look() -> None:
        while not over.is_set():  # noqa: ASYNC110  An event of another thread.
            await trio.sleep(LOOK_PERIOD)
        stop.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await keep_on(partial(keep_run, link, config, telemetry, stop, is_over=watch.ends), telemetry, stop)
        nursery.cancel_scope.cancel()
