"""Launches find in Triton's cache what ``bench.gpu`` compiled; and it runs in a checkout that is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import ROOT

pytest.importorskip("triton")

# A process that has the dependencies of the package, but not the package.
BARE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__.startswith("_frozen_importlib")]
"""


def run(script: str, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "ignore", "-c", BARE + script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernels_in(cache: Path) -> set[Path]:
    return set(cache.rglob("*.cubin"))


@pytest.mark.grid  # tests/ops/test_launches.py compares launches with what is compiled ahead of time, in less time
def test_launches_find_what_was_compiled(tmp_path):
    """The task in a process of its own, as on a GPU; then Triton's own path from a launch to the compiler."""
    cache, out = tmp_path / "cache", tmp_path / "out"
    found = run(
        f"""
import json
from pathlib import Path
from time import monotonic
from bench import gpu
from bench.gpu_.isolated_tasks import Settings, isolated
(task,) = (task for task in gpu.TASKS if task.name == "compile")
if __name__ == "__main__":
    record = gpu.Record(Path({str(out)!r}), {{}})
    result = isolated(task, Settings("cpu", smoke=True), monotonic() + 300, lambda found: record.keep("compile", found))
    print(json.dumps(result))
""",
        cache,
    )
    result = json.loads(found.splitlines()[-1])
    assert (result["status"], result["failures"], result["skipped"]) == ("done", [], [])
    assert result["rows"][0]["compiled"] == result["rows"][0]["of"] == result["compilations"] > 2
    kept = json.loads((out / "gpu.json").read_text())["parts"]["compile"]
    assert kept["rows"][0]["compiled"] == result["compilations"], "written before the task has ended"
    compiled = kernels_in(cache)
    assert len(compiled) == result["compilations"]
    first, second = run(
        f"""
import json
from pathlib import Path
from triton.runtime.jit import JITFunction
from bench.gpu_ import compilation as gpu_compile
from bench.gpu_ import launches
from specdec_fast.triton_kernels import verify_chain
compiles = JITFunction._do_compile
for chunk in (verify_chain._CHUNK, 4096):
    verify_chain._CHUNK = chunk
    with launches.noted(gpu_compile.HOPPER):
        JITFunction._do_compile = compiles
        for name, call in gpu_compile._smoke_calls():
            call()
    print(json.dumps([str(path) for path in Path({str(cache)!r}).rglob("*.cubin")]))
""",
        cache,
    ).splitlines()
    assert set(map(Path, json.loads(first))) == compiled
    assert set(map(Path, json.loads(second))) > compiled, "a launch of another size is compiled"


def test_kernels_are_found_in_a_checkout_that_is_not_installed(tmp_path):
    found = run("import bench, specdec_fast.triton_kernels as kernels; print(kernels.__file__)", tmp_path)
    assert Path(found.strip()) == ROOT / "triton_kernels" / "__init__.py"


def test_make_runs_the_python_it_is_given_and_installs_nothing(tmp_path):
    given = tmp_path / "python"
    given.write_text('#!/bin/sh\necho "$@"\n')
    given.chmod(0o755)
    command = ["make", "--no-print-directory", "gpu-check", f"PYTHON={given}", "OUT=there", "GPU_CHECK=--parts compile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "-m bench.gpu --out there --parts compile"
    assert "pip" not in done.stdout


def test_make_says_what_is_missing(tmp_path):
    given = tmp_path / "python"
    given.write_text("#!/bin/sh\nexit 1\n")
    given.chmod(0o755)
    command = ["make", "gpu-check", f"PYTHON={given}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"gpu-check needs torch, triton, transformers and tqdm in {given}" in done.stderr
