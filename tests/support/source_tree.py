"""The files of the source tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "specdec_fast").rglob("*.py")) + sorted((ROOT / "triton_kernels").rglob("*.py"))
SOURCES = PACKAGE + sorted((ROOT / "bench").rglob("*.py")) + sorted((ROOT / "tools").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))
