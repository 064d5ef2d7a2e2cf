"""These tests are about what is recorded, so every engine records its model."""

from __future__ import annotations

import pytest

from specdec_fast.program import compile_forward


@pytest.fixture(autouse=True)
def _no_shared_plans(monkeypatch):
    monkeypatch.setattr("specdec_fast.models.ragged_model.compile_forward", compile_forward)
