"""Benchmarks. In a checkout that is not installed, ``specdec_fast.triton_kernels`` is found in ``triton_kernels/``."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

_KERNELS = Path(__file__).parents[1] / "triton_kernels"


class _InCheckout:
    """Finds ``specdec_fast.triton_kernels`` if nothing else does. An installation has it inside the package."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "specdec_fast.triton_kernels":
            return None
        return spec_from_file_location(name, _KERNELS / "__init__.py", submodule_search_locations=[str(_KERNELS)])


if _InCheckout not in sys.meta_path:
    sys.meta_path.append(_InCheckout)  # type: ignore[arg-type]
