"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from specdec_fast.runner.ragged_model import RaggedModel
from support.models import tiny_model, truncated_copy


@pytest.fixture(scope="module")
def pair():
    """Return a tiny target, and its first layers as a draft; a module may define another pair."""
    target = tiny_model("llama")
    return target, truncated_copy(target, 2)


@pytest.fixture
def forwards(monkeypatch):
    """Rows, and rows whose logits are wanted, of every forward that is no call of C++ for a whole step."""
    found = []
    forward = RaggedModel.forward

    def noted(self, batch, pool, logit_rows=None, hidden_states=None):
        num_rows = len(batch.token_ids)
        found.append((num_rows, num_rows if logit_rows is None else len(logit_rows)))
        return forward(self, batch, pool, logit_rows, hidden_states)

    monkeypatch.setattr(RaggedModel, "forward", noted)
    return found
