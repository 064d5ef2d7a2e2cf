"""``bench.gpu`` at tiny sizes on the CPU: one task, or the whole check."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Any

from bench import gpu
from bench.gpu_.isolated_tasks import Result, Settings, inline

METHODS = ("eqspec", "exspec")
SMOKE = Settings("cpu", smoke=True)
TASKS = {task.name: task for task in gpu.TASKS}


def result_of(name: str, settings: Settings = SMOKE, seconds: float = 600.0) -> Result:
    """Run one task."""
    return inline(TASKS[name], settings, monotonic() + seconds, lambda found: None)


def main(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the check; return its exit status and its file."""
    status = gpu.main(["--out", str(folder), "--device", "cpu", "--smoke", *options])
    return status, json.loads((folder / "gpu.json").read_text())
