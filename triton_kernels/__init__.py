"""Triton kernels, one file per op; imported as ``specdec_fast.triton_kernels``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
from types import ModuleType


def kernel_modules() -> list[ModuleType]:
    """Import every file that has a function ``variants()``; the other files are parts that these share."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [module for module in modules if hasattr(module, "variants")]


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    importlib.import_module(f"{__name__}.interpreted").install()
