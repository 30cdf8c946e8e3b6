"""Files are written whole or not at all, and a disk that refuses is one clear error."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from flockstep.peer.base.disk import STALE_SECONDS, disk_errors, draft_of, write_whole
from flockstep.peer.base.errors import LocalError

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has neither SIGKILL nor limits on a file's size")


def in_process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    write_whole(path, b"old")
    with contextlib.suppress(ZeroDivisionError), draft_of(path) as draft:
        draft.write_bytes(b"half of the n")
        assert path.read_bytes() == b"old"
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    system_replace = os.replace

    def fsync(fd: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"{os.fstat(fd).st_size} bytes")

    def replace(draft: Path, path: Path) -> None:
        calls.append("rename")
        system_replace(draft, path)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "file", b"data")
    assert calls == ["4 bytes", "rename", *["folder"] * hasattr(os, "O_DIRECTORY")]
    calls.clear()
    with draft_of(tmp_path / "file", sync=False):
        pass
    assert calls == ["rename"]


def test_a_file_that_another_library_puts_in_the_place_of_the_draft_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    with draft_of(tmp_path / "file") as draft:
        (tmp_path / "other").write_bytes(b"data")
        os.replace(tmp_path / "other", draft)
    assert (tmp_path / "file").stat().st_ino == synced[0]


@posix
def test_a_process_killed_in_mid_write_leaves_the_old_file_and_no_litter_for_long(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    killed = in_process(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from flockstep.peer.base.disk import draft_of\n"
        "with draft_of(Path(sys.argv[1])) as draft:\n"
        "    draft.write_bytes(b'half of the n')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        path,
    )
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (litter,) = (one for one in tmp_path.iterdir() if one != path)
    write_whole(path, b"new")
    assert litter.exists()  # It might be that of a writer who still lives.
    long_ago = litter.stat().st_mtime - STALE_SECONDS - 1
    os.utime(litter, (long_ago, long_ago))
    write_whole(path, b"newer")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@posix
def test_a_private_file_is_never_readable_for_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for private, mode in ((True, 0o600), (False, 0o666)):
            with draft_of(tmp_path / "file", private=private) as draft:
                assert stat.S_IMODE(draft.stat().st_mode) == mode
            assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("links", [True, False])
def test_of_racing_writers_the_first_counts_where_nothing_is_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    path = tmp_path / "file"

    def link(draft: Path, path: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", link)
    with draft_of(path, replace=False) as draft:
        draft.write_bytes(b"first")
        if links:
            write_whole(path, b"quicker", replace=False)
    assert path.read_bytes() == (b"quicker" if links else b"first")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "writable for you"),
        (errno.EFBIG, "files of this size"),
        (errno.EIO, "may be failing"),
    ],
)
def test_each_refusal_of_a_disk_names_the_file_the_reason_and_a_remedy(number: int, remedy: str) -> None:
    with pytest.raises(LocalError) as caught, disk_errors("write the/file"):
        raise OSError(number, os.strerror(number), "the/draft")
    assert str(caught.value) == f"cannot write the/file: {os.strerror(number)}"
    assert remedy in caught.value.remedy


@posix
def test_a_disk_that_takes_no_more_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """`RLIMIT_FSIZE` makes the system refuse in the middle of a write, as a full disk does."""
    path = tmp_path / "file"
    write_whole(path, b"old")
    refused = in_process(
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from flockstep.optim.models.kept import save_tensors\n"
        "from flockstep.peer.base.disk import write_whole\n"
        "from flockstep.peer.base.errors import LocalError\n"
        "sys.dont_write_bytecode = True\n"  # What is imported from here on would be cached in part.
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))\n"
        "path = Path(sys.argv[1])\n"
        "for write in (lambda: write_whole(path, bytes(10_001)), lambda: save_tensors({'a': torch.zeros(4000)}, path)):\n"
        "    try:\n"
        "        write()\n"
        "    except LocalError as error:\n"
        "        print(error, '|', error.remedy)\n",
        path,
    )
    lines = refused.stdout.splitlines()
    assert [line.startswith(f"cannot write {path}: ") for line in lines] == [True, True], refused.stderr
    assert all("File too large" in line and not line.endswith("| ") for line in lines)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LocalError, match=r"cannot write .*below") as caught:
        write_whole(tmp_path / "file" / "below", b"data")
    assert caught.value.remedy
