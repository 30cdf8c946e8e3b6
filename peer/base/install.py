"""The command that installs flockstep: its one source for the page, the doctor, and the remedies of errors.

No package index has flockstep. Whoever registered the name there would run code on every computer whose user types it, so
no text names an index.
"""

REPOSITORY = ""
"""The address of the sources, such as https://host/owner/name; empty while readers install from their own checkout."""
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""Installs PyTorch for a computer without an NVIDIA GPU: 0.2 GB, in place of 5.6 GB with CUDA's libraries."""


WHERE = "" if REPOSITORY else " in your checkout of flockstep"


def install_command(extra: str = "") -> str:
    """Return the command that installs flockstep, with a group of optional packages of its `pyproject.toml`."""
    extras = f"[{extra}]" if extra else ""
    if REPOSITORY:
        return f"pip install 'flockstep{extras} @ git+{REPOSITORY}'"
    return f"pip install '.{extras}'" if extra else "pip install ."


def how_to_install(extra: str = "") -> str:
    """Return that command, and where it is to be typed."""
    return install_command(extra) + WHERE
