"""The settings of one peer: the folder that is its home."""

from pathlib import Path

import pytest
from flockstep.peer.base.config import PeerConfig, default_home
from flockstep.peer.base.errors import UsageError


def test_a_user_without_a_home_folder_is_told_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("FLOCKSTEP_HOME", raising=False)
    with pytest.raises(UsageError, match="this user has no home folder") as refused:
        PeerConfig()
    assert "--home" in refused.value.remedy
    monkeypatch.setenv("FLOCKSTEP_HOME", "/here")
    assert default_home() == Path("/here")
