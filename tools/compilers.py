"""``make compilers``: the tests that compare a row's bits, against builds of csrc/ by every compiler that is found.

A row must have the same bits alone and in any batch, whatever the compiler decides: what it fuses, vectorises, unrolls
and inlines. So there are builds with flags that change these decisions, too. Each takes some minutes on two cores, and
has its own folder below build/compilers. Compilers can be named as arguments.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compilers"
NAMES = [
    *("g++", "clang++"),
    *(f"{name}-{version}" for name in ("g++", "clang++") for version in range(11, 23)),
]
# Of the first GCC: products are fused in some loops only, as some tunings do; other code around each sum.
FLAGS = ("--param=avoid-fma-max-bits=512", "-O2 -fno-tree-slp-vectorize", "-O1")
TESTS = (
    *("ops/test_ops", "ops/test_instruction_sets", "ops/test_recurrent_rows", "ops/test_quantized_linear"),
    *("ops/test_attention_tiles", "ops/test_linear_tiles", "guarantees/test_row_invariance"),
)


def installed(names: list[str]) -> list[str]:
    """Return the compilers that are installed; of several names of one compiler the first."""
    by_version = {}
    for name in names:
        if shutil.which(name):
            shown = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
            by_version.setdefault(shown.splitlines()[0].split(maxsplit=1)[1], name)
    return list(by_version.values())


def builds(compilers: list[str]) -> list[tuple[str, str]]:
    """Return every compiler without flags, and the first GCC with each of FLAGS."""
    gcc = [name for name in compilers if "clang" not in name][:1]
    return [*((name, "") for name in compilers), *((name, flags) for name in gcc for flags in FLAGS)]


def build_and_test(compiler: str, flags: str) -> bool:
    """Return whether the extension compiles and the tests pass with it."""
    folder = FOLDER / f"{compiler}{flags}".replace(" ", "")
    folders = ("--build-temp", str(folder / "objects"), "--build-lib", str(folder))
    tests = (f"tests/{name}.py" for name in TESTS)
    return succeeds("setup.py", "-q", "build_ext", *folders, CXX=compiler, SPECDEC_CXXFLAGS=flags) and succeeds(
        *("-m", "pytest", "-q", "-p", "tools.other_extension", "-k", "not triton", *tests),
        SPECDEC_OTHER_EXTENSION=str(folder / "specdec_fast"),
    )


def succeeds(*arguments: str, **environment: str) -> bool:
    """Return whether Python, run with these arguments in the checkout, exits with 0."""
    command, env = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0


def main() -> None:
    """Build and test; exit with the builds that failed."""
    compilers = installed(sys.argv[1:] or NAMES)
    if not compilers:
        sys.exit("no compiler was found; name one, such as: python tools/compilers.py g++-13")
    passed = {shlex.join([name, *shlex.split(flags)]): build_and_test(name, flags) for name, flags in builds(compilers)}
    for name, is_good in passed.items():
        print(f"{'passed' if is_good else 'FAILED'}  {name}")
    if not all(passed.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
