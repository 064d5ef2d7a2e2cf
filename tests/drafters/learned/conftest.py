"""Fixtures: the target that learned drafters are made for, a tiny Llama."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def target(model):
    return RaggedModel(model, resolve(torch.device("cpu")))
