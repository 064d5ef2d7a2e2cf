"""Fixtures of the tests of commands."""

from __future__ import annotations

import pytest


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A folder of the test's own, which is the present one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
