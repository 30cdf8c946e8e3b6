"""Profiles of hypothesis, and what pytest is asked for here.

In the gate property tests try the same few examples each time, so that a change fails by what it changed: by chance nothing
fails. Chance has a command of its own, `scripts/test --explore MINUTES`: the property tests alone, at random seeds. What it
finds becomes a fixed example. `--hypothesis-profile=long` searches farther, for hours.
"""

import gc
import inspect
from collections.abc import Generator, Iterator
from functools import partial

import pytest
from flockstep.peer.log.telemetry import Telemetry
from hypothesis import is_hypothesis_test, settings
from support.commands import fork_network_processes, share_fork_server
from support.real_time import over_sockets

# No deadline for one example: it would be a timing assertion, and these machines are noisy.
settings.register_profile("gate", max_examples=40, deadline=None, database=None, derandomize=True)
settings.register_profile("explore", deadline=None, database=None, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=5000)
settings.load_profile("gate")

Telemetry.strict = True  # An event, or a field of one, that is not in the table of events is an error here.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--natlab", action="store_true", help="run all of tests/natlab: as root, ten minutes")
    parser.addoption("--explore", action="store_true", help="run property tests alone, at random seeds")
    parser.addoption("--zoo", action="store_true", help="train all models of tests/support/zoo.py: five minutes")
    parser.addoption("--share-fork-server", action="store_true", help="fork the commands of all workers from one process")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "explore: repeats, at other seeds and sizes, what the gate tries once: for --explore")
    config.addinivalue_line("markers", "zoo: one of many models, of which the gate tries ten: for --zoo")
    if config.getoption("--explore"):
        settings.load_profile("explore")
    if config.getoption("--share-fork-server") and not hasattr(config, "workerinput"):
        share_fork_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the half million objects of imports and tests, which live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    explores = config.getoption("--explore")
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        repeats = item.get_closest_marker("explore") is not None
        wanted = repeats or is_hypothesis_test(getattr(item, "obj", None)) if explores else not repeats
        wanted &= config.getoption("--zoo") or item.get_closest_marker("zoo") is None
        (kept if wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """A test that is a coroutine is run by its module's `run_test`, or in real time.

    What `run_test` gives it are its positional-only parameters; the others are fixtures.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    getattr(pyfuncitem.module, "run_test", over_sockets)(partial(pyfuncitem.obj, **fixtures))
    return True


@pytest.fixture(autouse=True, scope="module")
def network_processes() -> Iterator[None]:
    """The network processes of a module's trainers are forked; a module whose tests look for those of users overrides it."""
    with fork_network_processes():
        yield
