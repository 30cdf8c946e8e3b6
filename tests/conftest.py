"""Hypothesis profiles: 100 examples by default; `--hypothesis-profile=long` for a long run."""

import pytest
from flockstep.peer.telemetry import Telemetry
from hypothesis import settings

# No deadline for one example: it would be a timing assertion, and these machines are noisy.
settings.register_profile("default", deadline=None)
settings.register_profile("long", deadline=None, max_examples=5000)
settings.load_profile("default")

Telemetry.strict = True  # An event, or a field of one, that is not in the table of events is an error here.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--natlab", action="store_true", help="run all of tests/natlab: as root, ten minutes")
