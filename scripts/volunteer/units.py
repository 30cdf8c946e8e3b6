"""The files with which systemd, launchd and Windows start a peer, and the commands for them.

Each system starts the peer when its user logs in, as that user, and again if it fails; not after a wrong argument, where the
system can tell. A peer that is stopped gets the time to leave its run in order.
"""

import plistlib
import re
from dataclasses import dataclass
from pathlib import Path
from subprocess import list2cmdline
from xml.sax.saxutils import escape

from ...peer.base.errors import UsageError

RESTART_PERIOD = 30
"""Seconds between a failure and the next start: a network that is not up yet is, by then."""
STOP_SECONDS = 20
"""Seconds to leave in order; more than a peer takes on a busy computer."""

CONFINED = """\
UMask=0077
CapabilityBoundingSet=
NoNewPrivileges=yes
PrivateUsers=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
"""
"""What keeps a process of flockstep, should it be taken over, from the rest of the computer (systemd.exec(5)). The unit of a
bootstrap in docs/deploy.md has these lines, too. Left out, since a peer needs it: its home, devices (GPUs), the processes of
others (`--when-idle`), and memory that is written and run (the kernels that torch compiles)."""
MEMORY_MOST, TASKS_MOST = "80%", 2048
"""Of the computer's memory, and threads: several pools of torch on many cores, never so many that others cannot start."""

UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Letters that would begin another line of a unit, that XML has not, or that are no text."""

Line = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What a service starts. Raises `UsageError` for what the files of services cannot hold."""

    name: str
    command: Line
    """The program and its arguments."""
    folder: Path
    """Where it starts, so that relative paths mean what they meant at the installation."""

    def __post_init__(self) -> None:
        for word in self.command:
            if UNFIT.search(word):
                raise UsageError(f"a service cannot have {word!r} among its options", remedy="leave the line break out")
        if UNFIT.search(str(self.folder)):
            raise UsageError(f"a service cannot start in {str(self.folder)!r}", remedy="install it from another folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFile:
    """A file that describes a service to its system, and the commands that make it so."""

    path: Path
    data: bytes
    manager: str
    """The program that manages services, which must be there."""
    start: tuple[Line, ...]
    """Commands after the file was written; they also restart a service that runs."""
    stop: tuple[Line, ...]
    """Commands before the file is removed; the first may fail where the service does not run."""
    forget: tuple[Line, ...] = ()
    """Commands after the file was removed."""
    log: str
    """How its user sees what it has printed."""
    log_file: Path | None = None
    """Where the system writes that; None: it keeps a log of its own."""
    hint: str = ""
    """What its user may want to know or do."""


def systemd_service(job: Job, home: Path) -> ServiceFile:
    """A user unit of systemd."""
    unit = f"{job.name}.service"
    control = ("systemctl", "--user")
    text = f"""\
[Unit]
Description=flockstep: lends this computer to a run ({job.name})

[Service]
Type=exec
ExecStart={" ".join(map(_systemd_word, job.command))}
WorkingDirectory={_systemd_path(job.folder)}
Nice=10
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}
Restart=on-failure
RestartSec={RESTART_PERIOD}
RestartPreventExitStatus=2
SuccessExitStatus=130
MemoryMax={MEMORY_MOST}
TasksMax={TASKS_MOST}
ProtectSystem=full
{CONFINED}
[Install]
WantedBy=default.target
"""
    return ServiceFile(
        path=home / ".config" / "systemd" / "user" / unit,
        data=text.encode(),
        manager="systemctl",
        start=((*control, "daemon-reload"), (*control, "enable", unit), (*control, "restart", unit)),
        stop=((*control, "disable", "--now", unit),),
        forget=((*control, "daemon-reload"),),
        log=f"`journalctl --user -u {unit}` shows what it says.",
        hint="It runs while you are logged in; `loginctl enable-linger` lets it run from the start of the computer on.",
    )


def launchd_service(job: Job, home: Path, user: int) -> ServiceFile:
    """A launch agent of macOS, for the user with this number."""
    label = f"org.flockstep.{job.name}"
    path, log = home / "Library" / "LaunchAgents" / f"{label}.plist", home / "Library" / "Logs" / f"{job.name}.log"
    agent = {
        "Label": label,
        "ProgramArguments": list(job.command),
        "WorkingDirectory": str(job.folder),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_PERIOD,
        "ExitTimeOut": STOP_SECONDS,
        "ProcessType": "Background",
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    domain = f"gui/{user}"
    return ServiceFile(
        path=path,
        data=plistlib.dumps(agent),
        manager="launchctl",
        start=(("launchctl", "bootstrap", domain, str(path)), ("launchctl", "kickstart", "-k", f"{domain}/{label}")),
        stop=(("launchctl", "bootout", f"{domain}/{label}"),),
        log=f"{log} has what it says.",
        log_file=log,
        hint="It runs while you are logged in.",
    )


def windows_service(job: Job, local_data: Path) -> ServiceFile:
    """A task of the Windows Task Scheduler."""
    program, *arguments = job.command
    path = local_data / "flockstep" / f"{job.name}.xml"
    text = f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>flockstep: lends this computer to a run ({escape(job.name)})</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger><Enabled>true</Enabled></LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>true</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>true</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>7</Priority>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>999</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(program)}</Command>
      <Arguments>{escape(list2cmdline(arguments))}</Arguments>
      <WorkingDirectory>{escape(str(job.folder))}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""
    return ServiceFile(
        path=path,
        data=text.replace("\n", "\r\n").encode("utf-16"),
        manager="schtasks",
        start=(("schtasks", "/Create", "/F", "/TN", job.name, "/XML", str(path)), ("schtasks", "/Run", "/TN", job.name)),
        stop=(("schtasks", "/End", "/TN", job.name), ("schtasks", "/Delete", "/F", "/TN", job.name)),
        log="This system keeps no output of tasks: `flockstep status` shows how the peer stands.",
        hint="It runs while you are logged in and the computer is not on its battery.",
    )


def _systemd_word(word: str) -> str:
    """A word of a command line as systemd reads it (systemd.service(5)): quoted, nothing expanded."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _systemd_path(path: Path) -> str:
    """A path as a setting of systemd, which expands only `%` there, and joins a line that ends in a backslash to the next."""
    text = str(path)
    if text.endswith("\\") or text != text.strip():
        raise UsageError(f"a service cannot start in {text!r}", remedy="install it from another folder")
    return text.replace("%", "%%")
