"""`flockstep doctor`: checks that this computer, its network and the run allow taking part.

Theory of operation. A *sheet* collects checks: each is passed, failed or does not apply, and is written as soon as it is
known. The first checks examine this computer with the standard library alone, so that they work even without the
packages. Then `network` uses the network as `join` would, while a child process (`torch_child`) loads torch, which takes
longest and may crash. A check without a result at `DEADLINE` has failed. Causes and remedies are those of `join`
(`peer.base.troubles`). The doctor writes no files and leaves no process behind.
"""

import platform
import shutil
import sys
import time
from collections.abc import Callable

from ...peer.base.config import PeerConfig
from ...peer.base.install import how_to_install
from ...peer.base.troubles import Trouble
from .machine import python_trouble
from .sheet import DEADLINE, Sheet


def doctor(link: str | None, config: PeerConfig, write_line: Callable[[str], None], *, as_json: bool) -> bool:
    """Check this computer, and with a link its run; return True if no check failed. Raises `UsageError`."""
    deadline = time.monotonic() + DEADLINE
    sheet = Sheet(write_line, as_json=as_json, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 0)
    version = platform.python_version()
    if trouble := python_trouble(version):
        sheet.failed("python", trouble)
    else:
        sheet.passed("python", f"{version} on {platform.platform()}")
    try:
        from .visit import visit_run
    except ImportError as error:
        sheet.failed("flockstep", Trouble(f"cannot be loaded: {error}", f"install its packages anew: {how_to_install()}"))
        return False
    visit_run(link, config, sheet, deadline - time.monotonic())
    return sheet.healthy
