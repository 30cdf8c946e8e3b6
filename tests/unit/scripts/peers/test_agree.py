"""The question before the first join of a run: what is shown, what is remembered, and who is not asked."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.dht.run.manifest import Data, Manifest, SignedManifest
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.identity import Identity
from flockstep.scripts.peers.agree import Agreement, Purpose, describe_run, terminal_reader
from flockstep.scripts.peers.join import leaving_on_signals

OWNER = Identity.from_seed(bytes(32))
TOML = 'name = "tiny"\n[model]\nsize = "0.2m"\n[data]\nsource = "text:{stdlib}"\n'


class User:
    """Someone in front of a terminal."""

    def __init__(
        self,
        home: Path,
        *answers: str,
        yes: bool = False,
        terminal: bool = True,
        data: str = "",
        purpose: Purpose = Purpose.JOIN,
    ) -> None:
        self.answers = list(answers)
        self.lines: list[str] = []
        config = PeerConfig(home=home, data=data)
        self.agreement = Agreement(config, self.lines.append, self.read if terminal else None, yes, purpose)

    def read(self, question: str) -> str:
        self.lines.append(question)
        return self.answers.pop(0)


def signed(**changes: object) -> SignedManifest:
    manifest = Manifest.from_toml(TOML, where="run.toml", owner=OWNER.peer_id)
    return SignedManifest.sign(replace(manifest, **changes), OWNER)  # type: ignore[arg-type]  # of fields


def test_a_run_is_shown_asked_for_once_and_remembered(tmp_path: Path) -> None:
    user = User(tmp_path, "y")
    assert user.agreement.agree(signed()) == "agreed to by its user"
    shown = "\n".join(user.lines)
    for part in ('"tiny"', OWNER.peer_id, signed().run_id, "everybody", "gpt, 213.0 k", "text:{stdlib}", "100 rounds of"):
        assert part in shown
    shown = " ".join(shown.split())
    for part in ("up to 0.2 MB a round, 0.3 GB a day at a round a minute", " MB, below ", str(tmp_path), "IP addresses"):
        assert part in shown
    for part in ("about 0.5 GB", "a GPU if there is one", "somebody who gives no name", "TCP port 4001", "Ctrl-C for good"):
        assert part in shown
    assert user.lines[-1] == "Join this run? [y/N] "
    again = User(tmp_path)
    assert again.agreement.agree(signed()) == "agreed to before"
    assert again.lines == []
    other = User(tmp_path, "yes")
    other.agreement.agree(signed(name="other"))  # Other settings are another run.
    assert len(other.lines) > 1


def test_a_run_that_is_over_is_not_asked_about_and_its_round_is_shown_before_that(tmp_path: Path) -> None:
    early = User(tmp_path, "n")
    with pytest.raises(LocalError, match="not joined"):
        early.agreement.agree(signed(), 99)
    assert "100 rounds of about 50 steps each, of which 99 are done" in " ".join(" ".join(early.lines).split())
    late = User(tmp_path)
    with pytest.raises(LocalError, match="this run is over: all of its 100 rounds are done") as over:
        late.agreement.agree(signed(), 100)
    assert "flockstep export" in over.value.remedy
    assert late.lines == []


def test_the_host_of_the_data_is_named_before_it_sees_an_address(tmp_path: Path) -> None:
    source = f"tokens:https://data.example.org/x@{'0' * 64}"
    other = signed(data=Data(source=source))
    user = User(tmp_path, "n")
    with pytest.raises(LocalError, match="not joined"):
        user.agreement.agree(other)
    assert "  from      data.example.org, which sees this computer's IP address" in user.lines
    assert not any("  from " in line for line in describe_run(other, PeerConfig(home=tmp_path, data="my-pack")))


@pytest.mark.parametrize("answer", ["", "n", "no", "q", "yess"])
def test_whoever_does_not_say_yes_does_not_join_and_is_asked_again(tmp_path: Path, answer: str) -> None:
    for _ in range(2):
        user = User(tmp_path, answer)
        with pytest.raises(LocalError, match="not joined"):
            user.agreement.agree(signed())
        assert user.answers == []


@pytest.mark.parametrize("purpose", Purpose)
def test_yes_is_an_answer_and_without_a_terminal_it_is_the_only_one(tmp_path: Path, purpose: Purpose) -> None:
    script = User(tmp_path, terminal=False, purpose=purpose)
    with pytest.raises(UsageError, match=f"no terminal to ask on whether to {purpose} this run"):
        script.agreement.agree(signed())
    assert script.lines == []
    assert not (tmp_path / "runs").exists()


def test_yes_is_remembered(tmp_path: Path) -> None:
    insists = User(tmp_path, yes=True)
    assert insists.agreement.agree(signed()) == "agreed to by --yes"
    assert User(tmp_path).agreement.agree(signed()) == "agreed to before"


def test_what_the_owner_wrote_is_shown_as_text_and_data_of_ones_own_beside_it(tmp_path: Path) -> None:
    user = User(tmp_path, "y", data="text:/corpus")
    user.agreement.agree(signed(name="safe\x1b[2J\n  owner     somebody else"))
    assert user.lines[0].startswith(r'The run "safe\x1b[2J\n  owner     somebody else", ')
    assert all(line.isprintable() for line in user.lines)
    assert any("text:/corpus, in place of text:{stdlib}" in line for line in user.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_ctrl_c_ends_the_question(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setattr("builtins.input", lambda question: signal.raise_signal(number))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    with leaving_on_signals() as stop:
        read = terminal_reader()
        assert read is not None
        with pytest.raises(KeyboardInterrupt):
            read("Join?")
        signal.raise_signal(number)  # After the question it asks for an orderly leave again.
        assert stop.is_set()


def test_without_a_terminal_there_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal_reader() is None
    monkeypatch.setattr(sys, "stdin", None)
    assert terminal_reader() is None


def test_to_keep_a_run_is_another_question_which_whoever_joins_has_answered(tmp_path: Path) -> None:
    keeper = User(tmp_path, "no", purpose=Purpose.KEEP)
    with pytest.raises(LocalError, match="not kept"):
        keeper.agreement.agree(signed())
    shown = "\n".join(keeper.lines)
    assert "trains nothing" in shown
    assert "its owner decides, as its only keeper" in shown
    assert "text:{stdlib}" not in shown
    assert keeper.lines[-1] == "Keep this run? [y/N] "
    assert User(tmp_path, "yes", purpose=Purpose.KEEP).agreement.agree(signed()) == "agreed to by its user"
    assert User(tmp_path, purpose=Purpose.KEEP).agreement.agree(signed()) == "agreed to before"
    assert User(tmp_path, "y").agreement.agree(signed()) == "agreed to by its user"  # To train is asked still.
    other = tmp_path / "other"
    User(other, "y").agreement.agree(signed())
    assert User(other, purpose=Purpose.KEEP).agreement.agree(signed()) == "agreed to before"


def test_what_a_keeper_is_shown_needs_no_torch() -> None:
    script = (
        "import sys; from pathlib import Path; from flockstep.scripts.peers.agree import Purpose, describe_run; "
        "from flockstep.dht.run.manifest import Manifest, SignedManifest; from flockstep.peer.base.config import PeerConfig; "
        "from flockstep.peer.identity import Identity; import flockstep.scripts.peers.keep; "
        "owner = Identity.from_seed(bytes(32)); "
        f"manifest = Manifest.from_toml({TOML!r}, where='', owner=owner.peer_id); "
        "lines = list(describe_run(SignedManifest.sign(manifest, owner), PeerConfig(home=Path('.')), Purpose.KEEP)); "
        "assert lines and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
