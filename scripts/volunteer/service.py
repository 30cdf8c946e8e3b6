"""`flockstep service`: lets this computer start a peer by itself, look at it, and remove it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...peer.base.config import user_home
from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import LocalError, UsageError
from .units import Job, Line, ServiceFile, launchd_service, systemd_service, windows_service

SERVICE_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
MANAGER_SECONDS = 60
"""The timeout of one command of the system's manager: it waits for a peer that leaves."""


def service_of(name: str, command: Sequence[str] = (), platform: str = sys.platform) -> ServiceFile:
    """Return the service of this name for this computer's system. Raises `UsageError` for what it cannot be."""
    if not SERVICE_NAME.fullmatch(name):
        raise UsageError(f"--name {name!r} names no service", remedy="small letters, digits and hyphens, such as flockstep-2")
    job = Job(name, tuple(command), Path.cwd() if command else user_home())
    if platform == "darwin":
        return launchd_service(job, user_home(), os.getuid())
    if platform == "win32":
        return windows_service(job, Path(os.environ.get("LOCALAPPDATA") or user_home()))
    return systemd_service(job, user_home())


def peer_command(arguments: Sequence[str]) -> Line:
    """Return the command that joins with these arguments; who installs it has agreed to the run.

    It starts in the folder of the installation, and runs no file that lies there (`-P`).
    """
    said = () if "--yes" in arguments else ("--yes",)
    return (sys.executable, "-P", "-m", "flockstep", "join", *arguments, *said)


def install(service: ServiceFile, say: Callable[[str], None], *, as_root: bool) -> None:
    """Write the file and start the service, anew if it runs. Raises `LocalError`."""
    if not as_root and hasattr(os, "geteuid") and os.geteuid() == 0:
        remedy = "log in as a user of its own, or say --as-root"
        raise UsageError("you are root: the peer would run with all rights on this computer", remedy=remedy)
    _demand_manager(service)
    was_there = service.path.exists()
    is_new = not was_there or service.path.read_bytes() != service.data
    if is_new:
        if service.log_file is not None:
            service.log_file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(service.path, service.data)
    say(f"{service.path} is {'written' if is_new else 'there already, and the same'}:")
    for line in ("", *text_of(service).splitlines()):
        say(line)
    if service.manager == "launchctl":  # It knows no reload: what it holds must go first.
        _run(service.stop[0], must=False)
    first, *others = service.start
    try:
        _run(first)
    except LocalError:
        if not was_there:  # Its manager takes no services here, so `service remove` could not remove this one either.
            service.path.unlink(missing_ok=True)
            say("It is removed again.")
        raise
    for command in others:
        _run(command)
    say(f"The peer runs. {service.hint}")
    say(f"{service.log} `flockstep service remove` ends it.")


def remove(service: ServiceFile, say: Callable[[str], None]) -> None:
    """Stop the service and remove its file. Raises `LocalError` if there is none."""
    _demand_file(service)
    *_, last = service.stop
    for command in service.stop:
        _run(command, must=command is last and service.manager != "launchctl")
    with disk_errors(f"remove {service.path}"):
        service.path.unlink(missing_ok=True)
    for command in service.forget:
        _run(command)
    say(f"{service.path} is removed; what the peer knows of its runs stays in its home folder.")


def text_of(service: ServiceFile) -> str:
    """Return the file as a person reads it."""
    encoding = "utf-16" if service.manager == "schtasks" else "utf-8"
    return service.data.decode(encoding).replace("\r\n", "\n")


def _demand_file(service: ServiceFile) -> None:
    if not service.path.exists():
        remedy = "`flockstep service install LINK` makes it; another one needs its --name"
        raise LocalError(f"there is no service {service.path}", remedy=remedy)
    _demand_manager(service)


def _demand_manager(service: ServiceFile) -> None:
    if shutil.which(service.manager) is None:
        remedy = "`--print` shows the file; cron's @reboot or your system's own services can start `flockstep join`, too"
        raise LocalError(f"this computer has no {service.manager}", remedy=remedy)


def _run(command: Line, *, must: bool = True) -> None:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=MANAGER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalError(f"`{' '.join(command)}` did not run: {error}", remedy="try it by hand") from error
    if must and ended.returncode:
        why = (ended.stderr.strip() or ended.stdout.strip() or f"exit code {ended.returncode}").splitlines()[-1]
        login = "; systemd for users needs a login of its own, not su or sudo" if command[0] == "systemctl" else ""
        raise LocalError(f"`{' '.join(command)}` failed: {why}", remedy=f"try it by hand{login}")
