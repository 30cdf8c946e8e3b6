"""The laboratory runs when it is asked for, as root on Linux; it says why where it cannot."""

from pathlib import Path

import pytest
from natlab.lab import why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if not here:
        return
    reason = why_not() if config.getoption("--natlab") else "asked for with --natlab"
    for item in here if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
