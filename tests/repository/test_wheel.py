"""What ``pip install .`` builds, from a copy of the repository that holds no build products."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.source_tree import ROOT


def build_wheel(tmp_path: Path, *, is_isolated: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    source = tmp_path / "source"
    # Other tests write into the hidden folders of caches meanwhile.
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    options = [] if is_isolated else ["--no-build-isolation"]  # isolated, pip installs the build's requirements first
    folder = str(tmp_path / "dist")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *options, "--wheel-dir", folder, str(source)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False, cwd=tmp_path
    )


def names_in_wheel(tmp_path: Path) -> list[str]:
    (wheel,) = (tmp_path / "dist").glob("specdec_fast-*.whl")
    return zipfile.ZipFile(wheel).namelist()


# With the extension, which takes long to compile even without optimisation, and without it.
BUILDS = [
    pytest.param({"SPECDEC_NO_CPP": "1"}, id="no_cpp", marks=pytest.mark.grid),
    pytest.param({"SPECDEC_CXXFLAGS": "-O0", "is_isolated": True}, id="cpp", marks=pytest.mark.grid),
]


@pytest.fixture(scope="module", params=BUILDS)
def wheel(request, tmp_path_factory):
    """Return whether the wheel has the extension, and the names of its files."""
    path = tmp_path_factory.mktemp("wheel")
    built = build_wheel(path, **request.param)
    assert built.returncode == 0, built.stderr[-2000:]
    return "SPECDEC_NO_CPP" not in request.param, names_in_wheel(path)


@pytest.fixture
def wheel_names(wheel):
    return wheel[1]


def test_wheel_holds_the_extension_and_the_kernels(wheel):
    has_extension, wheel_names = wheel
    assert any(re.fullmatch(r"specdec_fast/_C\..*so", name) for name in wheel_names) is has_extension
    assert "specdec_fast/triton_kernels/__init__.py" in wheel_names
    assert "specdec_fast/py.typed" in wheel_names
    for part in (
        "target/model.safetensors",
        "draft/config.json",
        "eagle3/model.safetensors",
        "prompts.jsonl",
        "README.md",
    ):
        assert f"specdec_fast/assets/demo_pair/{part}" in wheel_names


def test_wheel_has_one_top_level_package(wheel_names):
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"specdec_fast"}
    assert not [name for name in wheel_names if name.endswith((".o", ".d", ".ninja", ".cpp", ".h"))]


def test_every_module_is_in_the_wheel(wheel_names):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specdec_fast").rglob("*.py")}
    assert modules <= set(wheel_names)


def test_extension_needs_no_torch_library():
    """So one wheel works with every version of torch."""
    import specdec_fast._C as extension

    needed = subprocess.run(["ldd", extension.__file__], capture_output=True, text=True, check=True).stdout
    assert "libgomp" in needed
    assert "torch" not in needed.replace(str(ROOT), "")


@pytest.mark.grid
def test_missing_compiler_is_said_in_one_line(tmp_path):
    built = build_wheel(tmp_path, CC="no-such-compiler", CXX="no-such-compiler")
    assert built.returncode != 0
    assert re.search(r"specdec_fast: .*no-such-compiler.*Install a C\+\+17 compiler .*SPECDEC_NO_CPP=1", built.stderr)


def test_make_says_what_is_missing(tmp_path):
    command = ["make", "demo", f"VENV={tmp_path / 'venv'}", "CXX=no-such-compiler"]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert made.returncode != 0
    (line,) = [line for line in made.stderr.splitlines() if "compiler" in line]
    assert "no-such-compiler was not found" in line
    assert "SPECDEC_NO_CPP=1" in line
    assert not (tmp_path / "venv").exists()
