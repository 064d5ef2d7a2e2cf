"""Build of the one compiled module, ``specdec_fast._C``; everything else stands in pyproject.toml.

The extension includes no torch headers, so an isolated build needs neither torch nor nvcc. ninja compiles as many files
at a time as there are cores, and again only those that changed, or whose headers or flags did. Environment variables:
``SPECDEC_NO_CPP=1`` leaves the extension out, every op then runs in PyTorch; ``CXX`` is the compiler;
``SPECDEC_CXXFLAGS`` are flags that come after the others when it compiles and links, except for ``EXACT``.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
# GCC may fuse a * b + c by default, and its tuning decides where. With the parameter avoid-fma-max-bits, which some
# tunings set, it does not where a loop adds to one vector, and does where it adds to several. Then a row has other bits
# alone than in a batch. So nothing is fused but where the source says so (multiply_add in csrc/kernels/vectors.h).
EXACT = "-ffp-contract=off"
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))


def object_file(source: str) -> str:
    """Return the name of a source's object file, below the build folder."""
    return str(Path(source).relative_to("csrc").with_suffix(".o"))


def no_warnings(source: str) -> list[str]:
    """Return the flags that silence false warnings of the compiler for a source.

    GCC's AVX-512 headers make undefined vectors as ``__m512 __Y = __Y``, and GCC warns about them wherever an intrinsic
    is inlined: 750 lines that hide every other warning. Clang does not know the warning, and would warn about the flag.
    """
    uses_avx512 = Path(source).stem.endswith(("_x86_64_v4", "_avx512_bf16", "_avx512_vnni", "_amx"))
    return ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"] if uses_avx512 else []


class BuildExtension(build_ext):
    """Compile with ninja. What an editable or in-place build compiles is kept, in the folder of the venv."""

    def finalize_options(self) -> None:
        """Choose the folder for object files: setuptools takes a new one for every editable install."""
        may_choose, in_venv = self.build_temp is None, sys.prefix != sys.base_prefix
        super().finalize_options()
        if may_choose and in_venv and (self.inplace or self.editable_mode):
            self.build_temp = str(Path(sys.prefix, "build", "specdec_fast"))

    def build_extension(self, ext: Pybind11Extension) -> None:
        """Compile and link, or exit with the remedy."""
        # The headers of Python and pybind11 are no dependencies of an object file, so what distinguishes them names the
        # folder. An isolated build unpacks pybind11 to another path every time, so it must not be in a command either.
        folder = Path(self.build_temp, f"{sysconfig.get_config_var('SOABI')}-pybind11-{pybind11.__version__}").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        headers = [*ext.include_dirs, *self.include_dirs, os.environ.get("CPLUS_INCLUDE_PATH")]
        environment = {**os.environ, "CPLUS_INCLUDE_PATH": os.pathsep.join(filter(None, headers))}
        module = Path(self.get_ext_filename(ext.name)).name
        self.write_ninja_file(folder / "build.ninja", ext, module)
        ninja = subprocess.run([ninja_program(), f"-j{num_jobs()}"], cwd=folder, env=environment, check=False)
        if ninja.returncode:
            compiler = self.compiler.compiler_so_cxx[0]
            sys.exit(
                f"specdec_fast: building the C++ extension with {compiler} failed, see above. Install a C++17 compiler "
                "(e.g. apt-get install g++), or set SPECDEC_NO_CPP=1 to run without compiled ops."
            )
        built = Path(self.get_ext_fullpath(ext.name))
        built.parent.mkdir(parents=True, exist_ok=True)
        # Its time is new, because setuptools copies it to the sources only if it is newer than what is there.
        shutil.copyfile(folder / module, built)

    def write_ninja_file(self, path: Path, ext: Pybind11Extension, module: str) -> None:
        """Say how ``module`` is made, in ninja's language."""
        from ninja.ninja_syntax import Writer, escape

        def command(*words: str) -> str:
            return escape(shlex.join(words))

        last = shlex.split(os.environ.get("SPECDEC_CXXFLAGS", ""))
        compiler = command(*self.compiler.compiler_so_cxx, *ext.extra_compile_args, f"-I{ROOT / 'csrc'}")
        linker = command(*self.compiler.linker_so_cxx, *ext.extra_link_args)
        with path.open("w", encoding="utf-8") as file:
            writer = Writer(file, width=1000)
            writer.rule(
                "compile", f"{compiler} $level $warnings {command(*last, EXACT)} -MMD -MF $out.d -c $in -o $out",
                description="C++ $out", depfile="$out.d", deps="gcc",
            )  # fmt: skip
            writer.rule("link", f"{linker} $in {command(*last)} -o $out", description="link $out")
            for source in ext.sources:
                # The bindings are templates without a loop; more optimisation takes longer and makes nothing faster.
                level = "-O1" if Path(source).name == "bindings.cpp" else "-O3"
                variables = {"level": level, "warnings": command(*no_warnings(source))}
                writer.build(object_file(source), "compile", str(ROOT / source), variables=variables)
            writer.build(module, "link", [object_file(source) for source in ext.sources])


def ninja_program() -> str:
    """Return the path of ninja: beside this Python, or in PATH, where pip puts it for an isolated build."""
    from ninja import BIN_DIR

    path = os.pathsep.join(filter(None, (BIN_DIR, os.environ.get("PATH", os.defpath))))
    return shutil.which("ninja", path=path) or sys.exit("specdec_fast: ninja was not found; run: pip install ninja")


def num_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
            cxx_std=17,
            extra_compile_args=["-Wall", "-Wextra", *openmp],
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
