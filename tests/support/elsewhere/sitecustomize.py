"""Python without what only Linux has: with this folder first on PYTHONPATH, flockstep believes that it runs on a Mac.

Only flockstep's own modules do. The libraries keep their platform, since they were built for it.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

ONLY_LINUX = {
    "os": {"posix_fallocate", "sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open"},
    "socket": {"TCP_INFO", "TCP_KEEPCNT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT", "SO_REUSEPORT", "AF_NETLINK"},
    "trio.socket": {"TCP_INFO", "TCP_KEEPCNT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT", "SO_REUSEPORT"},
    "sys": set[str](),
}


class Elsewhere(ModuleType):
    """A module of the standard library as another platform has it."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        if real is sys:
            self.__dict__["platform"] = "darwin"

    def __getattr__(self, name: str) -> Any:
        if name in ONLY_LINUX[self.__name__]:
            raise AttributeError(f"{self.__name__}.{name} does not exist on this platform")
        return getattr(self.__dict__["_real"], name)


class Loader(SourceFileLoader):
    """Loads a module of flockstep, and gives it those modules."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleType) and value.__name__ in ONLY_LINUX:
                setattr(module, name, Elsewhere(value))


class Finder(PathFinder):
    """Finds the modules of flockstep alone."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname.startswith("flockstep.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder)
