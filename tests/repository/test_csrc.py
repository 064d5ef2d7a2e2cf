"""The directories of csrc/: what each may include, which may use pybind11, how long files may be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.source_tree import ROOT

CSRC = ROOT / "csrc"
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".cpp", ".h"})
# What a directory may include; kernels need the arguments of their ops. The bindings may include all.
ROOMS = {"kernels": {"kernels", "ops"}, "ops": {"kernels", "ops"}, "program": {"kernels", "ops", "program"}}


def shown(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def include_faults(name: str, source: str) -> list[str]:
    own = re.findall(r'^\s*#\s*include\s*"([^"]+)', source, flags=re.M)
    faults = [f"{header} does not exist" for header in own if not (CSRC / header).is_file()]
    room = name.rpartition("/")[0]
    if room:
        faults += [f"{room} includes {header}" for header in own if header.rpartition("/")[0] not in ROOMS[room]]
        faults += [f"{room} includes {header}" for header in re.findall(r"<(pybind11/.*|Python\.h)>", source)]
    return faults


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_rooms_include_one_way(path):
    assert not include_faults(shown(path), path.read_text())


@pytest.mark.parametrize(
    ("name", "source"),
    [("ops/linear.cpp", '#include "program/program.h"'), ("kernels/dtype.h", '#include "program/rowwise.h"'),
     ("ops/linear.cpp", '#include "linear.h"'), ("program/program.cpp", "#include <pybind11/pybind11.h>")],
)  # fmt: skip
def test_include_check_rejects(name, source):
    assert include_faults(name, source)


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_no_file_is_too_long(path):
    assert len(path.read_text().splitlines()) <= 300
