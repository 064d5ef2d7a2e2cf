"""A padded batch of the bundled prompts."""

from __future__ import annotations

import pytest

from support.padded import padded


@pytest.fixture(scope="session")
def batch(prompt_ids):
    """Five prompts of 1 to 25 tokens; some end by EOS within 40 tokens."""
    return padded([prompt_ids[i] for i in (0, 3, 4, 10, 15)])
