"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from support.models import tiny_model, truncated_copy


@pytest.fixture(scope="module")
def pair():
    """Return a tiny target, and its first layers as a draft; a module may define another pair."""
    target = tiny_model("llama")
    return target, truncated_copy(target, 2)
