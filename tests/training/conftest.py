"""Fixtures: a tiny target, and texts of unequal length."""

from __future__ import annotations

import pytest
import torch

from support.models import VOCAB_SIZE, tiny_model


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (int(n),), generator=generator) for n in (9, 17, 17, 6, 30, 12)]
