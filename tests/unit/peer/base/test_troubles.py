"""Troubles: their wording, and the remedy that is found by it."""

import errno
import socket

import pytest
from flockstep.peer.base import troubles
from flockstep.peer.base.troubles import (
    FORBIDDEN,
    NO_NAME,
    NO_RESOLVER,
    NO_ROUTE,
    OFFLINE,
    REFUSED,
    Trouble,
    clock_trouble,
    duration,
    remedy_for,
    trouble_of,
)
from flockstep.peer.libp2p.tcp import plain_words

ALL = [value for value in vars(troubles).values() if isinstance(value, Trouble)]


@pytest.mark.parametrize("trouble", ALL, ids=lambda trouble: trouble.cause)
def test_every_trouble_is_one_line_with_a_remedy(trouble: Trouble) -> None:
    for text in (trouble.cause, trouble.remedy):
        assert text
        assert "\n" not in text
        assert not text.endswith(".")


def test_no_cause_is_the_beginning_of_another() -> None:
    causes = [trouble.cause for trouble in ALL]
    assert not [(one, other) for one in causes for other in causes if one != other and other.startswith(one)]


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), NO_NAME),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), NO_RESOLVER),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), REFUSED),
        (OSError(errno.EPERM, "Operation not permitted"), FORBIDDEN),
        (OSError(errno.ENETUNREACH, "Error connecting to ('192.0.2.1', 1): Network is unreachable"), OFFLINE),
        (OSError(errno.EHOSTUNREACH, "No route to host"), NO_ROUTE),
    ],
)
def test_what_the_system_says_leads_to_a_remedy(error: OSError, trouble: Trouble) -> None:
    wrapped = RuntimeError("the library's own words")
    wrapped.__cause__ = error
    cause = plain_words(wrapped)
    assert cause.startswith(trouble.cause)
    assert trouble_of(cause).remedy == trouble.remedy


def test_several_remedies_are_named_once_each() -> None:
    causes = [REFUSED.cause, f"{NO_NAME.cause}: x", "something new", REFUSED.cause]
    assert remedy_for(causes) == f"{REFUSED.remedy}; or {NO_NAME.remedy}"


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([], None),
        ([299.0], None),
        ([600.0], "10 minutes behind"),
        ([-600.0], "10 minutes ahead of"),
        ([90_000.0 * 3, 0.0, 1.0], None),  # It is that bootstrap's clock.
        ([7200.0, 7201.0, 0.0], "2 hours behind"),
    ],
)
def test_the_median_of_the_bootstraps_clocks_counts(offsets: list[float], words: str | None) -> None:
    trouble = clock_trouble(offsets)
    assert (trouble is None) == (words is None)
    assert trouble is None or (words is not None and words in trouble.cause)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.24, "0.2 seconds"), (90, "90 seconds"), (600, "10 minutes"), (259_200, "3 days")]
)
def test_durations_are_in_the_unit_that_people_would_use(seconds: float, words: str) -> None:
    assert duration(seconds) == words
