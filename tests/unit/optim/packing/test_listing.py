"""The files of a place: literal paths first, links once, nothing hidden, and every file left out named."""

import os
from pathlib import Path

import pytest
from flockstep.optim.packing.listing import listing
from flockstep.optim.packing.skips import Skips
from flockstep.peer.base.errors import UsageError

TREE = (
    "a.txt", "b/c.txt", "b/d/e.txt", "b/d/e.md", "[v2]/f.txt", "v/g.txt", ".h/i.txt", "j/.k.txt", "j/l.txt~", "j/Thumbs.db"
)  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    for name in TREE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def found(place: Path | str, tree: Path, skips: Skips) -> list[str]:
    return [str(file.relative_to(tree)) for file in listing("text", str(place), skips)]


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("", ["[v2]/f.txt", "a.txt", "b/c.txt", "b/d/e.md", "b/d/e.txt", "v/g.txt"]),
        ("[v2]", ["[v2]/f.txt"]),
        ("[v2]/*.txt", ["[v2]/f.txt"]),
        ("[v2]*/f.txt", []),
        ("[v]/*.txt", ["v/g.txt"]),
        ("*.txt", ["a.txt"]),
        ("*/*.txt", ["[v2]/f.txt", "b/c.txt", "v/g.txt"]),
        ("**/*.txt", ["[v2]/f.txt", "a.txt", "b/c.txt", "b/d/e.txt", "v/g.txt"]),
        ("b/**", ["b/c.txt", "b/d/e.md", "b/d/e.txt"]),
        ("b/**/e.*", ["b/d/e.md", "b/d/e.txt"]),
        (".h", [".h/i.txt"]),
        ("j/.k.txt", ["j/.k.txt"]),
        ("a.txt/x", []),
        ("none", []),
    ],
)
def test_an_existing_path_is_literal_and_all_else_a_glob(tree: Path, place: str, names: list[str]) -> None:
    if names:
        assert found(tree / place, tree, Skips()) == names
    else:
        with pytest.raises(UsageError, match="there is no such file or folder"):
            found(tree / place, tree, Skips())


def test_hidden_files_and_those_of_systems_are_left_out_and_named(tree: Path) -> None:
    skips = Skips()
    found(tree, tree, skips)
    assert skips.left == [
        f"{tree}/{name}: is hidden, or a system's or an editor's" for name in (".h", "j/.k.txt", "j/Thumbs.db", "j/l.txt~")
    ]


def test_what_is_linked_is_read_once_and_no_circle_is_walked(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "o.txt").touch()
    links = {"z": "../outside", "zz": "../outside/deep/..", "b/self": ".", "b/up": "../..", "b/m.txt": "../a.txt"}
    links["n.txt"] = "gone"
    for name, target in links.items():
        (tree / name).symlink_to(target)
    os.mkfifo(tree / "pipe.txt")
    skips = Skips()
    names = ["[v2]/f.txt", "a.txt", "b/c.txt", "b/d/e.md", "b/d/e.txt", "v/g.txt", "z/o.txt"]
    assert found(tree, tree, skips) == names
    assert [line.removeprefix(f"{tree}/").partition(":")[0] for line in skips.left][1:4] == ["b/m.txt", "b/self", "b/up"]
    assert (skips.num_left, skips.count) == (8, 2)
    assert str(skips.first) == f"{tree}/n.txt: is a link to nothing, or no file"
    assert found(tree / "**" / "*.txt", tree, Skips()) == [name for name in names if name.endswith(".txt")]
