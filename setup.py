"""Build of the one compiled module, ``specdec_fast._C``; everything else stands in pyproject.toml.

The extension includes no torch headers, so an isolated build needs neither torch nor nvcc. ``SPECDEC_NO_CPP=1``
leaves it out: every op then runs in PyTorch.
"""

import os
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup
from setuptools.errors import CompileError

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))


class BuildExtension(build_ext):
    """Say in one line what a failed build needs."""

    def build_extensions(self) -> None:
        """Compile, or exit with the remedy."""
        try:
            super().build_extensions()
        except CompileError as error:
            sys.exit(
                f"specdec_fast: building the C++ extension failed ({error}). Install a C++17 compiler "
                "(e.g. apt-get install g++), or set SPECDEC_NO_CPP=1 to run without compiled ops."
            )


def extensions() -> list[Pybind11Extension]:
    """Return the extension to build: none under SPECDEC_NO_CPP=1."""
    if os.environ.get("SPECDEC_NO_CPP") == "1":
        return []
    # OpenMP is resolved at run time to the libgomp that torch has already loaded, so both share one thread pool.
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    return [
        Pybind11Extension(
            "specdec_fast._C",
            SOURCES,
            depends=HEADERS,
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", *openmp],
            extra_link_args=openmp,
        )
    ]


setup(
    packages=[*find_packages(include=["specdec_fast", "specdec_fast.*"]), "specdec_fast.triton_kernels"],
    # Top-level in the repository, but a top-level `triton_kernels` is another project's import name.
    package_dir={"specdec_fast.triton_kernels": "triton_kernels"},
    package_data={"specdec_fast": ["py.typed", "assets/demo_pair/**/*"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
)
