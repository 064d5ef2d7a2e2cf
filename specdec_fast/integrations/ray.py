"""Ray: offline batches over any number of workers (Ray Data), and a service of replicas (Ray Serve).

Needs the extra ``ray``. A name is imported when it is first used, so a worker of Ray Data does not import Ray Serve.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec_fast.errors import ConfigError

if TYPE_CHECKING:
    from specdec_fast.integrations.ray_data import BatchGenerator, sum_stats
    from specdec_fast.integrations.ray_serve import EngineDeployment

__all__ = ["BatchGenerator", "EngineDeployment", "sum_stats"]

_MODULES = {"BatchGenerator": "ray_data", "EngineDeployment": "ray_serve", "sum_stats": "ray_data"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("ray")
        module = import_module(f"specdec_fast.integrations.{_MODULES[name]}")
    except ImportError as error:
        raise ConfigError(f"{name} needs Ray Data and Ray Serve ({error}); pip install '.[ray]'.") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
