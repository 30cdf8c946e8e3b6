"""Feeds: the whole picture, the differences after it, and viewers that take nothing."""

import asyncio
import gzip
import json
import math
from typing import Any

from flockstep.scripts.page import feed as feeds
from flockstep.scripts.page.feed import KEPT_FRAMES, QUEUED_FRAMES, WHOLE_AGE, WHOLE_SECONDS, Feed, StablePeers, Viewer
from support.fake_runs import FakeRun


def numbered(feed: Feed, first: int, last: int) -> None:
    for number in range(first, last + 1):
        feed.update({"n": number})


def body_of(frame: bytes) -> Any:
    return json.loads(frame.decode().partition("data: ")[2])


def test_the_whole_and_the_frames_after_it_lead_to_the_newest_picture() -> None:
    seconds = 0.0
    feed = Feed({"n": 0}, clock=lambda: seconds)
    numbered(feed, 1, WHOLE_AGE - 1)
    first = feed.whole()
    numbered(feed, WHOLE_AGE, 2 * WHOLE_AGE - 2)
    assert feed.whole() is first  # Compressed once for all newcomers of a while.
    whole = json.loads(gzip.decompress(first.body))
    assert whole["picture"] == {"n": WHOLE_AGE - 1}
    frames = feed.after(whole["mark"])
    assert [body_of(frame) for frame in frames][-1] == [["set", ["n"], 2 * WHOLE_AGE - 2]]
    assert len(frames) == WHOLE_AGE - 1
    numbered(feed, 2 * WHOLE_AGE - 1, 2 * WHOLE_AGE - 1)
    second = feed.whole()
    assert second is not first
    seconds = WHOLE_SECONDS
    assert feed.whole() is second  # It is the newest, however old.
    feed.update({"n": 0})
    assert feed.whole().number == feed.number


def test_a_picture_that_is_the_same_is_no_frame() -> None:
    feed = Feed({"n": 1, "l": [1, 2]})
    feed.update({"n": 1, "l": (1, 2)})
    assert feed.number == 0


def test_whoever_is_too_far_behind_or_from_another_process_fetches_the_whole_anew() -> None:
    feed = Feed({"n": 0})
    numbered(feed, 1, KEPT_FRAMES + 2)
    for mark in (f"{feed.epoch}.1", f"{feed.epoch}.999999", "other.3", f"{feed.epoch}.", f"{feed.epoch}.-1", "", "." * 9):
        (frame,) = feed.after(mark)
        assert frame.startswith(b"event: anew\n")
    assert len(feed.after(f"{feed.epoch}.2")) == KEPT_FRAMES
    assert feed.after(f"{feed.epoch}.{feed.number}") == []


def test_a_difference_that_is_too_large_is_fetched_and_leads_nobody_in_circles() -> None:
    feed = Feed({"n": 0})
    mark = json.loads(gzip.decompress(feed.whole().body))["mark"]
    feed.update({"n": "x" * (feeds.MAX_CHANGE_BYTES + 1)})
    assert feed.after(mark)[0].startswith(b"event: anew\n")
    again = json.loads(gzip.decompress(feed.whole().body))
    assert again["mark"] != mark
    assert feed.after(again["mark"]) == []


def test_numbers_that_are_none_become_null_and_no_text_breaks_a_frame() -> None:
    feed = Feed({"n": 0})
    feed.update({"loss": [math.nan, math.inf, 1.5], "reason": "a\n\nevent: evil\r\ndata: \ud800\u2028"})
    (frame,) = feed.after(f"{feed.epoch}.0")
    assert frame.count(b"\n") == 3
    operations = {operation[1][-1]: operation for operation in body_of(frame)}
    assert operations["loss"] == ["set", ["loss"], [None, None, 1.5]]
    assert operations["reason"][2].startswith("a\n\nevent: evil\r\ndata: ")


def test_a_viewer_that_takes_nothing_is_dropped_and_the_others_are_not() -> None:
    async def main() -> None:
        feed = Feed({"n": 0})
        dropped: list[str] = []
        slow, quick = Viewer(dropped.append), Viewer(dropped.append)
        feed.viewers = {slow, quick}
        numbered(feed, 1, QUEUED_FRAMES)
        assert (await quick.next()).count(b"data: ") == QUEUED_FRAMES  # All at once.
        assert not dropped
        numbered(feed, QUEUED_FRAMES + 1, QUEUED_FRAMES + 1)
        assert dropped == ["it takes no updates"]
        assert feed.viewers == {quick}
        feed.end()
        assert body_of(await quick.next())
        assert await quick.next() == b""

    asyncio.run(main())


def test_what_is_kept_and_what_waits_for_a_viewer_is_bounded_in_bytes() -> None:
    feed, dropped = Feed({"n": ""}), list[str]()
    viewer = Viewer(dropped.append)
    feed.viewers = {viewer}
    size = feeds.MAX_CHANGE_BYTES - 100
    most = feeds.MAX_BEHIND_BYTES // size
    for number in range(most):
        feed.update({"n": str(number) * size})
    assert feed.viewers == {viewer}
    first = asyncio.run(viewer.next())
    assert len(first) <= feeds.MAX_BEHIND_BYTES
    for number in range(most + 1):
        feed.update({"n": "ab"[number % 2] * size})
    assert (dropped, feed.viewers) == (["it takes no updates"], set())
    (frame,) = feed.after(f"{feed.epoch}.1")
    assert frame.startswith(b"event: anew\n")
    kept = feed.after(f"{feed.epoch}.{feed.number - most}")
    assert (len(kept), sum(map(len, kept)) <= feeds.MAX_BEHIND_BYTES) == (most, True)


def test_a_peer_keeps_its_place_and_each_round_its_peers() -> None:
    run, stable = FakeRun(peers=9), StablePeers()
    seen: dict[str, Any] = {}
    for _ in range(30):
        run.advance()
        plain, placed = run.picture, stable.placed(run.picture)
        for before, after in zip(plain["recent"], placed["recent"], strict=True):
            for name in ("roster", "cut", "flagged", "voters"):
                assert [plain["peers"][at] for at in before[name]] == [placed["peers"][at] for at in after[name]]
            named = [(placed["peers"][out["peer"]], out["reason"]) for out in after["out"]]
            assert named == [(plain["peers"][out["peer"]], out["reason"]) for out in before["out"]]
            assert seen.setdefault(after["hash"], after) == after  # A round that is over changes no more.
