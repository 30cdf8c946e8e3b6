"""The directory over a hivemind DHT, as far as it goes without that package."""

import importlib.util

import pytest
import trio
from flockstep.dht.hivemind.directory import HivemindDirectory
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.log.telemetry import Telemetry


@pytest.mark.skipif(importlib.util.find_spec("hivemind") is not None, reason="hivemind is installed")
async def test_its_process_starts_and_reports_that_hivemind_is_missing() -> None:
    directory = HivemindDirectory(Telemetry(), lambda key, value: 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.run, [])
        with pytest.raises(NetworkError, match="No module named 'hivemind'"):
            await directory.get("/flockstep/run")
        nursery.cancel_scope.cancel()
