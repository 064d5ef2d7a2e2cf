"""Taps: which ids a drafter may ask for."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.models.hidden_states import checked_taps, default_taps


def test_default_taps_are_those_of_eagle_3():
    assert default_taps(7) == (2, 3, 4)
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(36) == (2, 18, 33)


@pytest.mark.parametrize("num_layers", [1, 4, 5, 6])
def test_models_of_few_layers_have_no_default_taps(num_layers):
    with pytest.raises(sd.ConfigError, match=rf"of {num_layers} layers has no default taps.*pass three ids"):
        default_taps(num_layers)


@pytest.mark.parametrize("taps", [(), (0,), (4,), ("final",), (2, 0, "final"), [1, 3]])
def test_taps_from_the_embeddings_to_the_output_layer_are_accepted(taps):
    assert checked_taps(taps, 4) == tuple(taps)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ((5,), "contain 5; the target has 4 layers"),
        ((-1,), "contain -1; the target has 4 layers"),
        ((1.0,), "contain 1.0"),
        ((True,), "contain True"),
        (("last",), "contain 'last'.*or 'final'"),
        ((1, 2, 1), "contain an id twice"),
        (3, "taps are 3; expected a tuple"),
        ("final", "taps are 'final'; expected a tuple"),
        (None, "taps are None"),
        (([1],), r"contain \[1\]"),
    ],
)
def test_other_taps_are_refused(taps, message):
    with pytest.raises(sd.DrafterError, match=message):
        checked_taps(taps, 4)
