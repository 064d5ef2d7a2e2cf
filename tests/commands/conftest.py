"""Fixtures of the tests of commands."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _bundled_models_loaded_once():
    """Nearly every test here runs a command on the bundled pair."""
    from support.loaded_once import bundled_models_loaded_once

    with bundled_models_loaded_once():
        yield


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A folder of the test's own, which is the present one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
