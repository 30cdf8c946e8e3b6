"""A nursery for what runs beside the body of a context manager."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """Tasks that end with the body; an error of the body comes out as it is, where trio's own would wrap it in a group."""
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
