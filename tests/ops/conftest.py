"""Fixtures of the tests of ops."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``paged_attention`` in Triton cut short contexts into many pieces."""
    from specdec_fast.triton_kernels import paged_attention
    from support.triton_attention import SMALL_PIECE

    monkeypatch.setattr(paged_attention, "PIECE", SMALL_PIECE)
