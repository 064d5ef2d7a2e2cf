"""``make sanitize``: the tests of the C++ ops against a build of csrc/ with ASan and UBSan.

The build has its own folder, build/sanitize, and takes the place of the installed extension in these runs only. Tensors
are guarded too: torch's allocator calls malloc, which the preloaded ASan replaces. Before the tests come calls that
must be caught, because a sanitizer that sees nothing looks like code without faults. Wants GCC on Linux.

All instruction sets are built, as in a wheel: their clones are resolved when the extension is loaded, long after ASan
has set itself up, so -DSPECDEC_NO_MULTIVERSION is not needed, and would leave the vectorised code untested.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "sanitize"
TESTS = (
    *("oracle/test_oracle_ops", "ops/test_ops", "ops/test_guard_zones", "ops/test_instruction_sets", "ops/test_fuzz"),
    "ops/test_recurrent_rows",
    *("ops/test_fuzz_attention", "program/test_models", "program/test_changed_models", "program/test_operations"),
    *("program/test_drafting", "models/test_tree_drafting", "drafters/learned/test_eagle3_trees_in_one_call"),
    "engine/test_verify",
)
FLAGS = (
    "-fno-wrapv",  # Python's own flags may have -fwrapv, which hides overflows
    # -O1: more optimisation drops accesses that a sanitizer would have reported
    *("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)

CALL = """
import tools.other_extension
import torch
from specdec_fast.ops import resolve

verify_chain = resolve(torch.device("cpu"), "cpp").unchecked.verify_chain
"""
# Calls that the argument check would refuse, and what must be said of them.
FAULTS = {
    "read beyond a tensor": (
        CALL + "verify_chain(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 3]).int())",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "misaligned logits": (
        CALL + "logits = torch.frombuffer(bytearray(68), dtype=torch.float32, offset=1, count=16).view(2, 8)\n"
        "verify_chain(logits, torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]).int())",
        "runtime error: load of misaligned address",
    ),
}


def build(compiler: list[str]) -> None:
    """Compile csrc/ into FOLDER."""
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    folders = ["--build-temp", str(FOLDER / "objects"), "--build-lib", str(FOLDER)]
    env = {**os.environ, "CXX": shlex.join(compiler), "SPECDEC_CXXFLAGS": shlex.join(FLAGS)}
    subprocess.run([*command, *folders], env=env, cwd=ROOT, check=True)


def library(compiler: list[str], name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    path = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    found = Path(path.stdout.strip())
    if not found.is_absolute():
        sys.exit(f"{shlex.join(compiler)} has no {name}; set CXX to a GCC that has it.")
    return str(found.resolve())


def environment(compiler: list[str], threads: int) -> dict[str, str]:
    """Return what a Python needs to load the sanitized extension."""
    return {
        **os.environ,
        # ASan must be there before Python's first malloc; and libstdc++, of which it looks up __cxa_throw only once.
        "LD_PRELOAD": " ".join(library(compiler, name) for name in ("libasan.so", "libstdc++.so")),
        "ASAN_OPTIONS": "detect_leaks=0",  # CPython and torch free much only by ending
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "SPECDEC_OTHER_EXTENSION": str(FOLDER / "specdec_fast"),
        "SPECDEC_OTHER_CONTAINS": "__asan_init",
        "SPECDEC_OTHER_THREADS": str(threads),
    }


def check_faults(env: dict[str, str]) -> None:
    """Exit unless each of FAULTS ends as it must."""
    for name, (code, report) in FAULTS.items():
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if run.returncode == 0 or report not in run.stderr:
            sys.exit(f"the sanitizers did not see this fault: {name} (expected '{report}'); they said:\n{run.stderr}")


def run_tests(env: dict[str, str], select: str) -> None:
    """Run the tests whose names fit ``select``; exit if any fails."""
    # --capture=sys: a report goes to the file descriptor, and what pytest has captured there is lost on an abort
    options = ("-p", "tools.other_extension", "-p", "no:cacheprovider", "--capture=sys")
    tests = (f"tests/{name}.py" for name in TESTS)
    command = [sys.executable, "-m", "pytest", *options, "-k", select, *tests]
    code = subprocess.run(command, env=env, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    """Build, prove that faults are seen, test with one thread and with two."""
    compiler, started = shlex.split(os.environ.get("CXX", "g++")), time.monotonic()
    build(compiler)
    check_faults(environment(compiler, threads=1))
    run_tests(environment(compiler, threads=1), "not triton")
    run_tests(environment(compiler, threads=2), "cpp and agrees and not triton")
    print(f"sanitized tests passed in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
