"""setup.py on a project of three small files: what it compiles again after a change, where it keeps object files."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import ROOT

FILES = {
    "specdec_fast/__init__.py": "",
    "csrc/bindings.cpp": """
        #include <Python.h>
        #include "ops/answer.h"
        static PyObject* call(PyObject*, PyObject*) { return PyLong_FromLong(answer()); }
        static PyMethodDef methods[] = {{"answer", call, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
        static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods};
        PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
    """,
    "csrc/ops/answer.h": "int answer();\n",
    "csrc/ops/answer.cpp": '#include "ops/answer.h"\nint answer() { return 41; }\n',
    "csrc/kernels/other.cpp": "int other() { return 1; }\n",
}
ALL = {"bindings.o", "ops/answer.o", "kernels/other.o"}


class Checkout:
    """A checkout and a venv, into which it is built in place."""

    def __init__(self, root: Path, venv: Path) -> None:
        self.root, self.venv, self.times = root, venv, {}
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(self, *arguments: str, **environment: str) -> str:
        command, env = [str(self.venv / "bin/python"), *arguments], {**self.environment, **environment}
        run = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout.strip()

    def build(self, **environment: str) -> set[str]:
        """Build, and return the object files that are new."""
        before = self.objects()
        self.run("setup.py", "-q", "build_ext", "--inplace", **environment)
        return {name for name, time in self.objects().items() if before.get(name) != time}

    def objects(self) -> dict[str, int]:
        folders = list((self.venv / "build/specdec_fast").glob("*"))
        assert len(folders) <= 1
        return {str(p.relative_to(f)): p.stat().st_mtime_ns for f in folders for p in f.rglob("*.o")}

    def answer(self) -> str:
        return self.run("-c", "from specdec_fast import _C; print(_C.answer())")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    path = tmp_path_factory.mktemp("build")
    for name, text in FILES.items():
        file = path / "checkout" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shutil.copy(ROOT / "setup.py", path / "checkout")
    checkout = Checkout(path / "checkout", path / "venv")
    assert checkout.build() == ALL
    return checkout


def test_nothing_is_compiled_twice(checkout):
    assert checkout.build() == set()


def test_a_changed_source_is_compiled_alone(checkout):
    source = checkout.root / "csrc/ops/answer.cpp"
    source.write_text(source.read_text().replace("41", "42"))
    assert checkout.build() == {"ops/answer.o"}
    assert checkout.answer() == "42"


def test_a_changed_header_compiles_the_sources_that_include_it(checkout):
    (checkout.root / "csrc/ops/answer.h").write_text("int answer();  // of everything\n")
    assert checkout.build() == {"bindings.o", "ops/answer.o"}


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="-mfma is a flag for x86")
def test_no_flag_lets_the_compiler_fuse_products_and_sums(checkout):
    """(1 + e)(1 - e) - 1 is -e^2, unless the product is rounded first, to 1."""
    source, before = checkout.root / "csrc/ops/answer.cpp", checkout.answer()
    original = source.read_text()
    source.write_text(
        '#include "ops/answer.h"\n'
        "float e = 0x1p-13f, one = 1.0f;\n"
        "int answer() { return (one + e) * (one - e) - one < 0.0f; }\n"
    )
    try:
        checkout.build(SPECDEC_CXXFLAGS="-O2 -mfma -ffp-contract=fast")
        assert checkout.answer() == "0"
    finally:
        source.write_text(original)
        checkout.build()
    assert checkout.answer() == before


def test_flags_that_reorder_sums_are_refused():
    header = ROOT / "csrc/kernels/multiversion.h"
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-x", "c++", "-std=c++17", "-fsyntax-only", str(header)]
    refused = subprocess.run([*command, "-ffast-math"], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "reorder sums" in refused.stderr
    subprocess.run([*command, "-O3"], check=True)


@pytest.mark.grid
def test_changed_flags_compile_everything(checkout):
    assert checkout.build(SPECDEC_CXXFLAGS="-DANOTHER") == ALL
    assert checkout.build() == ALL


@pytest.mark.grid
def test_each_venv_keeps_its_own_object_files(checkout, tmp_path):
    other = Checkout(checkout.root, tmp_path / "venv")
    assert other.build() == ALL
    assert checkout.build() == set()
    assert not list(checkout.root.rglob("*.o"))
