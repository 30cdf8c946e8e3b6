"""Texts of others, before they are shown or become events."""

import io

import pytest
from flockstep.peer.base.plain import plain_lines, plain_text
from flockstep.scripts.cli.echo import echo
from flockstep.scripts.watch.console import PlainConsole
from flockstep.scripts.watch.live_view import peers_table
from flockstep.scripts.watch.story import PeerStory
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text
from support.recorded import recorded

HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x1b\\",
    "clear screen": "\x1b[2J\x1b[H\x1b[32mAll good",
    "eight bits": "\x9b2J",
    "title": "\x1b]0;owned\x07",
    "overwrite": "a\rb\x08c",
    "second line": "gone\nround 9: averaged",
    "line separator": "a\u2028b\u0085c",
    "bidi override": "\u202egnp.exe",
    "no width": "pay\u200bpal\ufeff",
    "half a pair": "\ud800",
}


@given(st.text())
def test_what_becomes_plain_is_printable_and_stays_so(text: str) -> None:
    plain = plain_text(text)
    assert plain.isprintable()
    assert plain_text(plain) == plain


@pytest.mark.parametrize("text", ["", "cuda:0", "Zürich 東京 — …", "[red]", "100 %", r"C:\new"])
def test_plain_texts_stay_as_they_are(text: str) -> None:
    assert plain_text(text) == text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_event_carries_a_text_that_does_something_to_a_terminal(text: str) -> None:
    telemetry, events = recorded()
    telemetry.emit("round.void", reason=text, round=3, roster=[text])
    telemetry.take({"event": "peer.lost", "peer": text})
    void, lost = events
    assert void == {**void, "reason": plain_text(text), "round": 3, "roster": [plain_text(text)]}
    assert str(lost["peer"]).isprintable()


def test_a_sample_keeps_its_lines_and_nothing_else_that_a_terminal_acts_on() -> None:
    assert plain_lines("def f():\n\treturn 1\r\x1b[2J") == "def f():\n    return 1\\r\\x1b[2J"


@pytest.mark.parametrize("text", [*HOSTILE.values(), "[/nope]", "[link=https://evil.example]cpu[/link]", "[bold]x"])
def test_the_table_shows_others_texts_as_texts(text: str) -> None:
    story = PeerStory("[/nope]", "x", called="[blink]ada[/]")
    story.apply({"event": "peer.start", "device": text})
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=200).print(peers_table([story]))
    shown = out.getvalue()
    assert "[/nope]" in shown
    assert "[blink]ada[/]" in shown
    assert plain_text(text) in shown
    assert "evil.example" not in shown or "[link=" in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_the_door_of_the_command_line_writes_one_plain_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"run {text}")
    echo(text, err=True)
    assert capsys.readouterr() == (plain_text(f"run {text}") + "\n", plain_text(text) + "\n")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_the_door_of_tables_shows_nothing_that_does_something_to_a_terminal(text: str) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=200)
    console.say(f"run {text}")
    assert out.getvalue() == plain_text(f"run {text}") + "\n"
    table = peers_table([PeerStory("a", "x", called=text)])  # Whoever fills a table may forget what others wrote.
    console.print(Group(table, Panel(Text(text)), text), markup=False)
    assert all(line.isprintable() for line in out.getvalue().split("\n"))
