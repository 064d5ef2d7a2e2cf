"""A model whose forwards are graphs on the CPU, where repeated calls take the place of recordings."""

from __future__ import annotations

import pytest

from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.graphs import CPU, LIMITS, RULE, Everything
from support.models import tiny_model
from support.repeated import graphs_for_cpu


@pytest.fixture(scope="module")
def hugging_face_model():
    return tiny_model("qwen3")


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    """Let engines on the CPU work as on a GPU: no programs, but graphs."""
    graphs_for_cpu(monkeypatch)


@pytest.fixture
def model(hugging_face_model, graphs_on_cpu):
    """A model that records every forward the first time it sees its bucket."""
    made = RaggedModel(hugging_face_model, resolve(CPU))
    made.row_padding = RULE
    made.use_graphs(LIMITS)
    made.graphs.asked = Everything()
    return made
