"""`config.toml` of a home folder: read, overridden, and one line for what is wrong."""

from pathlib import Path

import pytest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.volunteer.preferences import Preferences, load_preferences


def load(home: Path, text: str) -> Preferences:
    (home / "config.toml").write_text(text)
    return load_preferences(home)


def test_options_override_what_the_file_says(tmp_path: Path) -> None:
    assert load_preferences(tmp_path) == Preferences()
    text = 'name = "ada"\n[limits]\nmax_up = 10\nhours = "22-7"\nwhen_idle = true\n'
    preferred = load(tmp_path, text)
    assert preferred.name == "ada"
    assert preferred.override(max_up=None, max_down=None).max_up == 10.0
    limits = preferred.override(max_up=0.0, max_down=2.0, hours="", when_idle=False)
    assert (limits.max_up, limits.max_down, limits.hours, limits.when_idle) == (0.0, 2.0, "", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nam = 'x'", "unknown key nam: did you mean name"),
        ("[limits]\nmax_upp = 1", r"unknown key \[limits\] max_upp: did you mean max_up"),
        ("[limits]\nmax_up = '1'", r"\[limits\] max_up must be a number"),
        ("[limits]\nwhen_idle = 1", r"\[limits\] when_idle must be true or false"),
        ("limits = 3", "limits must be a table"),
        ("bootstraps = ['x']", "bootstraps is gone: remove it: `flockstep runs --via ADDRESS`"),
        ("name = 3", "name must be a text"),
        ("x = ", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        load(tmp_path, text)
    assert str(tmp_path / "config.toml") in str(raised.value)
    assert raised.value.remedy
