"""Benchmarks. In a checkout that is not installed, the kernels are found where they lie."""

from importlib.util import find_spec
from pathlib import Path

import specdec_fast

if find_spec("specdec_fast.triton_kernels") is None:  # an installation has them inside the package: see setup.py
    specdec_fast.__path__.append(str(Path(__file__).parents[1]))
