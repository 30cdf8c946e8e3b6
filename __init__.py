"""flockstep: train one model together over the open internet.

The face of the package is lazy (PEP 562): `flockstep --help` need not import torch, and pytest imports a root
`__init__.py` a second time under the checkout's folder name, which must stay free of side effects.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flockstep.optim.swarm import StepReport, Swarm
    from flockstep.peer.config import PeerConfig
    from flockstep.peer.errors import FlockstepError, LocalError, NetworkError, RemoteError
    from flockstep.scripts.local_run import local_run

__version__ = "0.1.0"

__all__ = [
    "FlockstepError",
    "LocalError",
    "NetworkError",
    "PeerConfig",
    "RemoteError",
    "StepReport",
    "Swarm",
    "__version__",
    "local_run",
]

_HOMES = {
    "FlockstepError": "flockstep.peer.errors",
    "LocalError": "flockstep.peer.errors",
    "NetworkError": "flockstep.peer.errors",
    "PeerConfig": "flockstep.peer.config",
    "RemoteError": "flockstep.peer.errors",
    "StepReport": "flockstep.optim.swarm",
    "Swarm": "flockstep.optim.swarm",
    "local_run": "flockstep.scripts.local_run",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home the first time that it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, so that completion works before anything is imported."""
    return sorted(__all__)
