"""No text tells anybody to install flockstep from a package index, where somebody else may have registered the name."""

import re
from pathlib import Path

import pytest
from flockstep.peer.base import install

ROOT = Path(__file__).parents[4]
KINDS = {".py", ".md", ".html", ".js", ".ipynb", ".yaml", ".sh", ".toml", ".Dockerfile", ""}
FROM_AN_INDEX = re.compile(
    r"(?:pip3?|pipx|uv|uv tool) install\b[^\n`&]*[ '\"]flockstep(?:\[[\w,]+\])?(?=['\"\s`<)]|$)(?! @ git)"
)


@pytest.mark.parametrize(
    ("line", "is_from_an_index"),
    [
        ("pip install flockstep", True),
        ("pip install -U 'flockstep'", True),
        ("<code>pip install flockstep</code>", True),
        ("!pip install -q 'flockstep[gpu,hf]'", True),
        ("pip install 'flockstep[hf] @ git+https://example.org/it'", False),
        ("pip install --no-deps /wheels/flockstep-*.whl", False),
    ],
)
def test_what_counts_as_an_index(line: str, is_from_an_index: bool) -> None:
    assert bool(FROM_AN_INDEX.search(line)) is is_from_an_index


def texts() -> dict[str, str]:
    """Every text of the repository that a user may read, by path."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "tests"]
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for folder in folders for path in folder.rglob("*"))]
    found = (path for path in paths if path.is_file() and path.suffix in KINDS and path.name != "uPlot.iife.min.js")
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="replace") for path in found}


def test_no_text_names_an_index() -> None:
    assert [name for name, text in texts().items() if FROM_AN_INDEX.search(text.replace(install.WHERE, ""))] == []


def test_the_command_is_that_of_the_repository_where_it_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.how_to_install("hf") == "pip install '.[hf]' in your checkout of flockstep"
    monkeypatch.setattr(install, "REPOSITORY", "https://example.org/it")
    assert install.install_command() == "pip install 'flockstep @ git+https://example.org/it'"
    assert install.install_command("hf") == "pip install 'flockstep[hf] @ git+https://example.org/it'"
