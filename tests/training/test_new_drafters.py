"""A drafter that begins with the target's output layer needs one that is a matrix and nothing else."""

from __future__ import annotations

import pytest
from torch import nn

import specdec_fast as sd
from specdec_fast.drafters.clover.training import new_clover
from specdec_fast.drafters.dflash.training import BlockSize, new_dflash
from specdec_fast.drafters.medusa.training import new_heads
from specdec_fast.drafters.shared.new_drafter import DrafterSize


@pytest.mark.parametrize(
    "begin",
    [
        lambda target: new_heads(target, 3),
        lambda target: new_clover(target, 3),
        lambda target: new_dflash(target, DrafterSize(tap_layers=(0, 1)), BlockSize(), 5),
    ],
    ids=["medusa", "clover", "dflash"],
)
@pytest.mark.parametrize(
    ("layer", "shown"),
    [(nn.Linear(4, 5), "Linear with a bias"), (nn.Embedding(5, 4), "Embedding")],
    ids=["bias", "no linear"],
)
def test_another_output_layer_is_refused(target, monkeypatch, begin, layer, shown):
    monkeypatch.setattr(target, "get_output_embeddings", lambda: layer)
    with pytest.raises(sd.ConfigError, match=f"the output layer of LlamaForCausalLM is a {shown}; .* without a bias"):
        begin(target)
