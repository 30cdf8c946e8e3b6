"""The terminal view of a run, driven by textual's own pilot."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from flockstep.collectives.picture.picture import Picture
from flockstep.peer.errors import NetworkError
from flockstep.scripts.watch.top import TopApp
from support.pictures import big_picture
from textual.pilot import Pilot
from textual.widgets import ContentSwitcher, DataTable, Static

HOSTILE = r"[/nope] [link=x]\x1b[2J"


@pytest.fixture(scope="module")
def picture() -> Picture:
    return big_picture(12, 60)


def driven(app: TopApp, body: Callable[[Pilot[None]], Awaitable[None]]) -> None:
    async def main() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            await body(pilot)

    anyio.run(main)


def text_of(app: TopApp, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def test_keys_switch_between_peers_rounds_and_events(picture: Picture) -> None:
    app = TopApp(lambda: picture)

    async def body(pilot: Pilot[None]) -> None:
        assert "round 60 of 120 (50 %)" in text_of(app, "state")
        assert "3 of 4 are here, 3 needed: a quorum is here" in text_of(app, "state")
        assert app.query_one("#peers", DataTable).row_count == 12
        for key, view in (("r", "rounds"), ("e", "events"), ("p", "peers")):
            await pilot.press(key)
            assert app.query_one(ContentSwitcher).current == view
        assert app.query_one("#rounds", DataTable).row_count == 60
        assert "ban" in text_of(app, "troubles")
        if folder := os.environ.get("SHOTS"):
            for key in "pre":
                await pilot.press(key)
                await pilot.pause()
                (Path(folder) / f"top-{key}.svg").write_text(app.export_screenshot())
        await pilot.press("q")

    driven(app, body)


def test_all_columns_of_the_peers_fit_into_80_characters(picture: Picture) -> None:
    app = TopApp(lambda: picture)

    async def body(pilot: Pilot[None]) -> None:
        assert app.query_one("#peers", DataTable).virtual_size.width <= 80

    driven(app, body)


def test_others_texts_are_shown_as_texts(picture: Picture) -> None:
    members = tuple(replace(member, name=HOSTILE, device=HOSTILE) for member in picture.members)
    troubles = tuple(replace(trouble, reason=HOSTILE) for trouble in picture.troubles)
    app = TopApp(lambda: replace(picture, name=HOSTILE, members=members, troubles=troubles))

    async def body(pilot: Pilot[None]) -> None:
        assert text_of(app, "heading").startswith(HOSTILE)
        assert HOSTILE in text_of(app, "troubles")
        cells = app.query_one("#peers", DataTable).get_row_at(0)
        assert str(cells[0]).strip() == members[0].peer[-8:]  # Whatever it calls itself.
        assert str(cells[-1]).strip() == HOSTILE[:7] + "…"

    driven(app, body)


def test_the_cursor_stays_while_the_rows_change(picture: Picture) -> None:
    pictures = [picture]
    app = TopApp(lambda: pictures[-1])

    async def body(pilot: Pilot[None]) -> None:
        await pilot.press("down", "down", "down")
        pictures.append(replace(picture, members=picture.members[:-1]))
        app.show_newest()
        table = app.query_one("#peers", DataTable)
        assert (table.row_count, table.cursor_row) == (11, 3)

    driven(app, body)


def test_what_ends_the_feed_ends_the_view(picture: Picture) -> None:
    def source() -> Picture:
        raise NetworkError("no bootstrap answers")

    app = TopApp(source)

    async def body(pilot: Pilot[None]) -> None:
        assert str(app.failure) == "no bootstrap answers"

    driven(app, body)
