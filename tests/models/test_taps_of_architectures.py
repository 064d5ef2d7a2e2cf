"""Taps of every architecture that is served: the bits of ``output_hidden_states``, from an unmodified copy."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import specdec_fast as sd
from bench.common.tiny_models import tiny_model
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import grid
from support.programs import CPU
from support.source_tree import ROOT

SERVED = re.findall(r"^\| ([\w-]+) \| served", (ROOT / "docs/models.md").read_text(), flags=re.MULTILINE)
# They scale, or compute, between decoder and output layer.
WITHOUT_FINAL = {"minicpm3", "modernbert-decoder", "bert", "electra", "ernie", "roc_bert"}
WITHOUT_TAPS = {  # and why
    "gemma3n_text": r"do not pass on hidden states \[1, rows, size\]",  # four streams
    "hy_v4": r"do not pass on hidden states \[1, rows, size\]",  # four streams
    "longcat_flash": "no ModuleList of 8 layers",  # two attentions in each of 4 layers
}
# Their output_hidden_states begin behind the first layer: the embeddings, tap 0, are not among them.
WITHOUT_EMBEDDINGS = {"falcon_mamba", "mamba", "mamba2"}


def dense(model, taps, token_ids):
    """What a forward of the unmodified model, with attention of its own, passes on at the taps."""
    model.use_taps(taps)  # which also compares them with those of ragged forwards
    return model.hf.dense_hidden_states(token_ids)


@pytest.mark.parametrize("architecture", grid(SERVED, keep=["modernbert-decoder", "gpt_bigcode", "minicpm3"]))
def test_taps_are_output_hidden_states(architecture):
    unmodified, token_ids = tiny_model(architecture), torch.arange(20)
    model = RaggedModel(copy.deepcopy(unmodified), resolve(CPU))
    if architecture in WITHOUT_TAPS:
        with pytest.raises(sd.UnsupportedModelError, match=WITHOUT_TAPS[architecture]):
            model.use_taps((0,))
        return
    with torch.inference_mode():  # not of the same object, because hooks stay on it
        states = unmodified(token_ids[None], output_hidden_states=True).hidden_states
    if architecture in WITHOUT_EMBEDDINGS:
        states = (unmodified.get_input_embeddings()(token_ids[None]), *states)
    taps = tuple(range(len(states) - 1))  # the last state is normed, which no tap is
    assert torch.equal(dense(model, taps, token_ids), torch.stack(states[:-1], dim=2)[0])
    if architecture in WITHOUT_FINAL:
        with pytest.raises(sd.UnsupportedModelError, match="between its decoder and its output layer"):
            dense(model, ("final",), token_ids)
    else:
        assert torch.equal(dense(model, ("final",), token_ids), states[-1][0, :, None])
