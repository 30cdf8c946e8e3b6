"""flockstep: train one model together over the open internet.

The public names are imported lazily (PEP 562): `flockstep --help` need not import torch, and pytest imports a root
`__init__.py` a second time under the checkout's folder name, which must have no side effects.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flockstep.optim.train.swarm import StepReport, Swarm
    from flockstep.peer.base.config import PeerConfig
    from flockstep.peer.base.errors import FlockstepError, LocalError, NetworkError, RemoteError
    from flockstep.scripts.demo.local_run import local_run

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

if "__path__" in globals():  # Not so in the second import by pytest.
    # `flockstep.transformers` and `flockstep.lightning`: from a folder of their own, since a `transformers.py` beside this
    # file would hide the library of that name from whatever is started here.
    __path__.append(str(Path(__file__).parent / "scripts" / "trainers"))

_MODULES = {
    "FlockstepError": "flockstep.peer.base.errors",
    "LocalError": "flockstep.peer.base.errors",
    "NetworkError": "flockstep.peer.base.errors",
    "PeerConfig": "flockstep.peer.base.config",
    "RemoteError": "flockstep.peer.base.errors",
    "StepReport": "flockstep.optim.train.swarm",
    "Swarm": "flockstep.optim.train.swarm",
    "local_run": "flockstep.scripts.demo.local_run",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'flockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, so that completion works before anything is imported."""
    return sorted(__all__)
