"""The laboratory runs as root on Linux, and says why where it cannot: a glimpse of it always, all when it is asked for."""

from pathlib import Path

import pytest
from natlab.lab import why_not

HERE = Path(__file__).parent
ALWAYS = "test_glimpse.py"
"""Ten seconds of it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if not here:
        return
    lacking = why_not()
    for item in here:
        unasked = "" if item.path.name == ALWAYS or config.getoption("--natlab") else "asked for with --natlab"
        if reason := lacking or unasked:
            item.add_marker(pytest.mark.skip(reason=reason))
