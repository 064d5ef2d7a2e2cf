"""What several files of tests of ``bench.gpu`` and of ``bench.engine`` use."""

from __future__ import annotations

import pytest

from bench import gpu
from support.gpu_check import TASKS


@pytest.fixture
def only(monkeypatch):
    """Return a function that leaves only the named tasks."""
    return lambda *names: monkeypatch.setattr(gpu, "TASKS", tuple(TASKS[name] for name in names))


@pytest.fixture
def demo(tmp_path):
    """Options of ``bench.engine`` that decode three prompts with the bundled pair."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One day"}\n{"prompt_ids": [0, 70, 71]}\n{"prompt": "Sums: 3"}\n')
    return ["--prompts", str(path), "--batch-sizes", "2", "--repeats", "1", "--max-new-tokens", "16"]
