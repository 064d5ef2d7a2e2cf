"""What several files of tests of ``bench.gpu`` use."""

from __future__ import annotations

import pytest

from bench import gpu
from support.gpu_check import TASKS


@pytest.fixture
def only(monkeypatch):
    """Return a function that leaves only the named tasks."""
    return lambda *names: monkeypatch.setattr(gpu, "TASKS", tuple(TASKS[name] for name in names))
