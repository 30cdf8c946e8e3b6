"""A nursery for tasks that run beside the body of a context manager."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """Open a nursery that is cancelled with the body; an error of the body is raised as it is, not in a group as by trio."""
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except trio.Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001  Raised again below, outside of the nursery.
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
