"""Hypothesis: a hundred examples each by default; `--hypothesis-profile=long` for the thousands of a long run."""

import pytest
from hypothesis import settings

# No deadline for one example: it would be a timing assertion, and these machines are noisy.
settings.register_profile("default", deadline=None)
settings.register_profile("long", deadline=None, max_examples=5000)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--natlab", action="store_true", help="run all of tests/natlab: as root, ten minutes")
