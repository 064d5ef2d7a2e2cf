"""The peak of a whole process is within 5% of what was planned, above what it was before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import needs_programs
from support.source_tree import ROOT

TOLERANCE = 0.05


@pytest.mark.grid
@needs_programs
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("drafts", ["draft", "plain"])
def test_the_peak_is_the_plan(drafts):
    command = [sys.executable, str(ROOT / "tests/planner/peak_memory.py"), drafts]
    found = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    report = json.loads(found.stdout.splitlines()[-1])
    planned = sum(report["terms"].values())
    assert abs(report["peak"] - planned) <= TOLERANCE * planned, report
