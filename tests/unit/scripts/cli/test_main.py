"""The command line: its errors, and its output."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from flockstep.collectives.agreement.electorate import NOBODY
from flockstep.collectives.picture.shown import shown_members
from flockstep.dht.members.body import MemberBody
from flockstep.dht.members.table import Member, MemberTable
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Manifest
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.base.home_lock import HOME_LOCK, home_lock
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, log_path
from flockstep.scripts.cli import main
from flockstep.scripts.demo.demo import DemoOptions, check_out, prepare
from flockstep.scripts.demo.processes import Process, descendants, running
from flockstep.scripts.peers.join import (
    TrainingOptions,
    join,
    leaving_on_signals,
    progress_line,
    progress_rows,
    shown,
)
from flockstep.scripts.volunteer.control import TRAINING_LOCK
from flockstep.scripts.watch.story import PeerStory
from flockstep.scripts.watch.words import member_story

OWNER = Identity.from_seed(bytes(32)).peer_id
LINK_TEXT = f"flockstep://{'a' * 52}?via=/ip4/192.0.2.1/tcp/1/p2p/{OWNER}"
FLEET = ("--peers", "8", "--gpu", "4090", "--rate", "50")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `flockstep ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["flockstep", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize(
    "verb",
    [
        *([], ["bootstrap"], ["run"], ["run", "create"], ["run", "info"], ["join"], ["status"], ["doctor"], ["simulate"]),
        ["plan"],
        *(["bench", "utilization"], ["run", "vouch"], ["run", "revoke"], ["run", "ban"], ["run", "pardon"]),
    ],
)
def test_every_verb_has_help_with_an_example(capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    code, out, _ = said(capsys, *verb, "--help")
    assert code == 0
    assert "flockstep" in out.partition("Example")[2] or verb == ["run"]


@pytest.mark.parametrize("group", [[], ["run"], ["data"], ["service"], ["bench"]])
def test_no_summary_is_cut_and_h_shows_them(capsys: pytest.CaptureFixture[str], group: list[str]) -> None:
    code, out, _ = said(capsys, *group, "-h")
    assert code == 0
    assert not [line for line in out.partition("Commands:")[2].splitlines() if line.endswith("...")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "hello"], "not a whole join link"),
        (["join", f"flockstep://{'a' * 52}"], "has no via="),
        (["join", f"flockstep://{'a' * 52}?via=/ip4/192.0.2.1/tcp/1/p2p/{OWNER}", "--save", "no/such/m"], "no folder"),
        (["join", "hello", "--port", "70000"], "port 70000"),
        (["run", "create", "missing.toml", "--via", "x"], "cannot read missing.toml"),
        (["run", "create", "typo.toml", "--via", "x"], "did you mean source?"),
        (["run", "create", "good.toml", "--via", "localhost:4001"], "does not name a peer and where it is"),
        (["run", "create", "late.toml", "--via", "x"], "unknown key min_version"),
        (["run", "create", "good.toml", "--via", "x", *FLEET, "--gpu", "voodoo"], "no GPU 'voodoo' in the table"),
        (["plan", "missing.toml", *FLEET], "cannot read missing.toml"),
        (["plan", "good.toml", "--rate", "5"], "--peers 8 --gpu 4090 --rate 50"),
        (["run", "create", "good.toml", "--via", "x", "--peers", "2"], "--peers 8 --gpu 4090 --rate 50"),
        (["plan", "typo.toml", *FLEET], "did you mean source?"),
        (["plan", "good.toml", *FLEET, "--peers", "0"], "not 0"),
        (["plan", "good.toml", *FLEET, "--rate", "nan"], "not nan"),
        (["plan", "own.toml", *FLEET], "its size is not known"),
        (["run", "info", "missing.flockstep"], "cannot read missing.flockstep"),
        (["run", "info", "good.toml"], "is not a manifest"),
        (["run", "ban", LINK_TEXT, "12D3"], "'12D3' is not a peer id"),
        (["run", "revoke", LINK_TEXT, "hello"], "'hello' is not a peer id"),
        (["run", "vouch", "hello", OWNER], "not a whole join link"),
        (["run", "ban", LINK_TEXT, OWNER, "--reason", "x" * 161], "the reason has 161 bytes, at most 160"),
        (["keep", LINK_TEXT, "--publish", "hf://x/y"], "`--publish` is gone — `flockstep export HOME FOLDER --to"),
        (["bootstrap", "--page", "127.0.0.1:9402"], "`flockstep bootstrap --page` is gone — `flockstep page LINK`"),
        (["status", "--home", "nowhere"], "no peer has run with"),
        (["join", LINK_TEXT, "--allow-data=text:x"], "`--allow-data` is gone — leave it out"),
        (["run", "snapshot", LINK_TEXT], "`flockstep run snapshot` is gone — `flockstep status LINK --json`"),
        (["status", "flockstep://short", "--follow"], "not a whole join link"),
        (["status", "--follow"], "give the run's join link"),
        (["status", LINK_TEXT, "--follow"], "--follow needs a terminal"),
        (["doctor", "hello"], "not a whole join link"),
        (["demo", "--peers", "1"], "at least 2 peers"),
        (["demo", "--out", "."], "no demo wrote"),
        (["demo", "--data", "missing.txt"], "no such file or folder"),
        (["bench", "outer", "--mode", "parallel"], "no mode 'parallel'"),
        (["bench", "outer", "--outer", "0.9"], "write lr/momentum"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOCKSTEP_HOME", str(tmp_path / "home"))
    Path("typo.toml").write_text('name = "x"\n[data]\nsorce = "text:{stdlib}"\n')
    Path("good.toml").write_text('name = "x"\n[data]\nsource = "text:{stdlib}"\n')
    Path("own.toml").write_text('name = "x"\n[data]\nsource = "own"\n')
    Path("late.toml").write_text('name = "x"\nmin_version = "0.1"\n[data]\nsource = "text:{stdlib}"\n')
    code, _, err = said(capsys, *arguments)
    assert code == 2
    assert err.startswith("flockstep: ")
    assert words in err
    assert err.count("\n") == 1


def test_an_unwritable_home_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    toml, occupied = tmp_path / "run.toml", tmp_path / "file"
    toml.write_text('name = "x"\n[data]\nsource = "text:{stdlib}"\n')
    occupied.write_text("")
    code, _, err = said(capsys, "run", "create", str(toml), "--via", "x", "--home", str(occupied / "home"))
    assert (code, err.count("\n")) == (1, 1)
    assert str(occupied) in err


@pytest.mark.parametrize(
    "verb",
    [
        ["join", LINK_TEXT],
        ["run", "create", "good.toml", "--via", f"/ip4/192.0.2.1/tcp/1/p2p/{OWNER}"],
    ],
    ids=["join", "run create"],
)
def test_without_torch_what_needs_it_is_one_line_and_exit_code_1(tmp_path: Path, verb: list[str]) -> None:
    (tmp_path / "good.toml").write_text('name = "x"\n[data]\nsource = "text:{stdlib}"\n')
    without = "import sys; sys.modules['torch'] = None; from flockstep.scripts.cli.main import main; main()"
    environment = {**os.environ, "FLOCKSTEP_HOME": str(tmp_path)}
    command = [sys.executable, "-c", without, *verb]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert re.search("torch(, which)? is not installed", ended.stderr)


def test_status_tells_what_the_last_peer_of_this_home_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events = [
        {"event": "peer.start", "device": "cuda"},
        {"event": "step", "step": 900},
        {"event": "peer.start", "device": "cpu"},
        {"event": "state.synced", "round": 7, "root": "ab" * 32},
        {"event": "step", "step": 12, "tokens": 3000, "loss": 2.5, "tokens_per_s": 10.0, "sent": 5, "received": 6},
    ]
    log_path(tmp_path).write_text("".join(json.dumps(event) + "\n" for event in events))
    code, out, _ = said(capsys, "status", "--home", str(tmp_path), "--json")
    (figures,) = json.loads(out)
    assert code == 0
    assert (figures["device"], figures["step"], figures["round"], figures["loss"]) == ("cpu", 12, 7, 2.5)


@pytest.mark.parametrize(
    ("lock", "state", "said_of_it"),
    [
        (HOME_LOCK, "training", "votes: 1 of 1 are here"),
        (TRAINING_LOCK, "training", "votes: 1 of 1 are here"),
        ("", "killed", "It ended without leaving"),
    ],
    ids=["in its run", "between memberships", "after SIGKILL"],
)
def test_status_tells_a_peer_that_runs_from_one_that_was_killed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lock: str, state: str, said_of_it: str
) -> None:
    votes = {"event": "run.votes", "votes": 1, "total": 1, "quorum": 1, "reason": "a quorum is here"}
    events = [{"event": "peer.start", "device": "cpu"}, votes, {"event": "step", "step": 12, "tokens_per_s": 10.0}]
    log_path(tmp_path).write_text("".join(json.dumps(event) + "\n" for event in events))
    with home_lock(tmp_path, pid=os.getpid(), name=lock) if lock else nullcontext():
        _, out, _ = said(capsys, "status", "--home", str(tmp_path), "--json")
        assert json.loads(out)[0]["state"] == state
        assert said_of_it in said(capsys, "status", "--home", str(tmp_path))[1]


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["in front", "in the background"])
def test_ctrl_c_asks_to_leave_and_a_second_one_insists(before: Callable[..., object]) -> None:
    found = signal.signal(signal.SIGINT, before)
    try:
        with leaving_on_signals() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, found)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("under_nohup", [False, True])
def test_a_closed_terminal_asks_to_leave_and_not_under_nohup(under_nohup: bool) -> None:
    found = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        with leaving_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.is_set() is not under_nohup
    finally:
        signal.signal(signal.SIGHUP, found)


EVIL = r"a\u001b]0;owned\u0007\u009b2J\u202eb\nrun c"


@pytest.mark.parametrize(
    "toml",
    [
        f'name = "{EVIL}"\n[data]\nsource = "text:{{stdlib}}"\n',
        f'name = "x"\n[model]\nname = "{EVIL}"\n[data]\nsource = "own"\n',
        f'name = "x"\n[data]\nsource = "{EVIL}"\n',
        f'name = "x"\n"{EVIL}" = 1\n',
        "name = \x1b[2J",
    ],
)
def test_a_run_toml_of_others_does_nothing_to_a_terminal(
    toml: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run\x1b[2J\n.toml"
    file.write_text(toml)
    _, out, err = said(capsys, "plan", str(file))
    assert out or err.count("\n") == 1
    assert all(line.isprintable() for line in (out + err).split("\n"))


def test_status_and_run_info_show_a_members_texts_as_texts() -> None:
    body = MemberBody(state="training", device="\x1b[2J[/nope]")
    record = MemberTable("", OWNER).update_own(Identity.from_seed(bytes(32)), body, 0.0)
    (shown_member,) = shown_members([Member(record, body, 0.0)], NOBODY, {}, {})
    assert member_story(shown_member).device == r"\x1b[2J[/nope]"


@pytest.mark.parametrize("encoding", ["ascii"])
def test_a_terminal_that_lacks_a_letter_ends_nothing(tmp_path: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "FLOCKSTEP_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "flockstep", "join", "--help"]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_log_has_a_line_of_progress_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(print, as_json=False) as on_event:
        for time in range(0, 150, 5):
            on_event({"event": "step", "step": time + 1, "time": float(time)})
    assert capsys.readouterr().out.splitlines() == ["training | step 61", "training | step 121"]


def round_done(number: int, credit: int | None, cut: list[str], roster: list[str] = ["me", "her"]) -> Event:  # noqa: B006
    done: Event = {"event": "round.done", "time": 60.0 * number, "round": number, "roster": roster, "cut": cut}
    return done | {"root": "ab" * 32} | ({} if credit is None else {"credit": credit})


def test_the_panel_shows_rounds_of_how_many_the_time_left_who_trains_and_what_counted() -> None:
    peer = PeerStory("", "")
    peer.apply({"event": "peer.start", "peer": "me", "device": "cpu"})
    peer.apply({"event": "run.joined", "round": 0, "rounds": 60, "peers": 1})
    peer.apply({"event": "round.awaited", "reason": "its owner is away", "time": 100.0})
    peer.apply({"event": "round.awaited", "reason": "waits for its owner", "time": 340.0})
    assert ("no round", "waits for its owner, for 4 min now") in progress_rows(peer)
    assert progress_line(peer).endswith("no round: waits for its owner, for 4 min now")
    for number in range(1, 4):
        peer.apply(round_done(number, 1500, ["me", "her"]))
    peer.apply({"event": "step", "step": 1, "peers": 2})
    rows = dict(progress_rows(peer))
    assert rows["round"] == "3 of 60, about 57 min left, state root abababab"
    assert rows["peers"] == "2 train now"
    assert rows["last work"] == "yours counts with 1,500 tokens"
    assert rows["counted"] == "3 rounds, 4.5 k tokens since the start"
    assert "waits for" not in rows
    peer.apply({"event": "run.revised", "round": 4, "rounds": 4})
    assert dict(progress_rows(peer))["round"].startswith("3 of 4, about 1 min left")


@pytest.mark.parametrize(
    ("flaw_of", "done", "said_of_it"),
    [
        ("me", round_done(3, 0, ["me"]), "yours does not count: its norm is below 0.1 of the median"),
        ("her", round_done(3, 0, ["me"]), "yours does not count: the run's rule gave it no weight"),
        ("her", round_done(3, 900, ["me", "her"]), "yours counts with 900 tokens"),
        ("her", round_done(3, 0, ["her"]), "yours came too late"),
        ("her", round_done(3, 0, ["her"], ["her"]), "none of it is yours, since you were not ready when it began"),
        ("her", round_done(3, None, ["her"]), ""),  # A keeper's.
    ],
)
def test_whoever_trains_reads_what_became_of_each_contribution(
    capsys: pytest.CaptureFixture[str], flaw_of: str, done: Event, said_of_it: str
) -> None:
    with shown(print, as_json=False) as on_event:
        on_event({"event": "peer.start", "peer": "me", "device": "cpu"})
        on_event({"event": "peer.flagged", "peer": flaw_of, "round": 3, "reason": "its norm is below 0.1 of the median"})
        on_event(done)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.partition("state root abababab")[2] == (f"; {said_of_it}" if said_of_it else "")


def test_the_panel_says_why_a_peer_waits_until_it_does_not() -> None:
    peer = PeerStory("", "")
    peer.apply({"event": "step", "step": 1})
    peer.apply({"event": "device.rests", "reason": "the GPU has 76 °C, of 75 at most"})
    assert ("has rested", "the GPU has 76 °C, of 75 at most") in progress_rows(peer)
    peer.apply({"event": "peer.paused", "reason": "other programs use the GPU"})
    assert ("waits", "other programs use the GPU") in progress_rows(peer)
    peer.apply({"event": "peer.resumed", "reason": ""})
    assert {"has rested", "waits"}.isdisjoint(label for label, _ in progress_rows(peer))


@pytest.mark.parametrize(
    ("rank", "message"), [("", "--max-temp and --max-watts: cpu is no GPU of NVIDIA"), ("0", "are not for torchrun")]
)
def test_a_limit_that_cannot_be_kept_is_refused_before_the_run_hears_of_this_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, message: str
) -> None:
    if rank:
        monkeypatch.setenv("RANK", rank)
    link = str(JoinLink("a" * 52, (f"/ip4/192.0.2.1/tcp/4001/p2p/{OWNER}",)))
    config = PeerConfig(home=tmp_path, device="cpu")
    with pytest.raises(UsageError, match=message) as raised:
        join(link, config, print, TrainingOptions(yes=True, max_watts=100.0))
    assert raised.value.remedy


def options(out: Path) -> DemoOptions:
    return DemoOptions(peers=2, rounds=4, kill=True, data=None, out=out, seed=7)


def test_the_demo_writes_a_manifest_that_can_be_run_and_overwrites_only_its_own(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    for _ in range(2):
        prepare(options(out))
        manifest = Manifest.from_toml((out / "run.toml").read_text(), where="run.toml", owner=OWNER)
        assert (manifest.seed, manifest.outer.rounds, manifest.model.options) == (7, 4, {"size": "1m"})
        (out / "left-over").write_text("from the last demo")
    check_out(out)
    prepare(options(out))
    assert [path.name for path in out.iterdir()] == ["run.toml"]
    (out / "run.toml").write_text("name = 'my own run'")
    with pytest.raises(UsageError, match="no demo wrote"):
        check_out(out)


def test_a_process_that_dies_is_named_with_its_last_line_and_its_log(tmp_path: Path) -> None:
    process = Process("the bootstrap", ["status", "--home", str(tmp_path)], tmp_path / "log.txt")
    with pytest.raises(LocalError, match=r"the bootstrap ended with exit code 2: .*no peer has run") as raised:
        process.await_line("never said", 60)
    assert "log.txt" in raised.value.remedy


@pytest.mark.skipif(os.name == "nt", reason="Windows has no zombies")
def test_grandchildren_are_found_and_the_dead_do_not_count() -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert descendants(os.getpid()) >= {process.pid, grandchild}
        assert descendants(process.pid) == {grandchild}
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # Dead, but nobody has asked for its end yet.
        assert process.pid not in running()


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without asking it")
def test_who_is_told_to_terminate_leaves_no_process_behind(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from flockstep.scripts.demo.processes import Processes
with Processes() as processes:
    home = Path({str(tmp_path)!r})
    arguments = ["bootstrap", "--host", "127.0.0.1", "--port", "0", "--home", str(home)]
    bootstrap = processes.start("bootstrap", arguments, home / "log")
    bootstrap.await_line("/p2p/", 60)
    print(bootstrap._popen.pid, flush=True)
    bootstrap._popen.wait()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        bootstrap = int(process.stdout.readline())
        assert bootstrap in running()
        process.terminate()
        process.wait()
        assert bootstrap not in running()
