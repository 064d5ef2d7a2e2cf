"""Weights in few bits with ``tp_size``: each rank rounds its part, or keeps its part of a checkpoint's codes."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import specdec_fast as sd
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.runner.model_memory import bytes_of, weights_of
from support.checkpoint_codes import write_with_codes
from support.grids import grid
from support.scripted_trees import RandomTrees
from support.tp_size import SIZES, engine_of, expect_bits_of_plain_decoding, plainly, saved, together


@pytest.mark.grid
def test_rounded_parts_have_the_codes_of_one_process(tmp_path):
    """If a rank's inputs of every linear are whole groups: then only the order of sums differs.

    A rank's part of keys and values has so few outputs that a whole linear of this size would not be rounded.
    """
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 768, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = saved(tmp_path, "tied", **sizes)
    first, kinds = [], []
    for tp_size in (1, 2):
        with engine_of(folder, None, tp_size, dtype="float32", quantization="int4", num_draft_tokens=0) as engine:
            first.append([logprobs[0] for _, logprobs in together(engine)])
            kinds.append(set(engine.describe()["linear_bytes"]))
    assert first[0] == pytest.approx(first[1], abs=1e-4)
    assert kinds == [{"int4", "int8"}] * 2


def written_with_codes(folder, name, **sizes):
    """Write a target with codes, whose inputs two ranks divide into whole groups of 32."""
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128} | sizes
    torch.manual_seed(0)
    write_with_codes(folder, Qwen3ForCausalLM(Qwen3Config(**sizes)), name)
    return str(folder)


@pytest.mark.parametrize(
    "checkpoint",
    grid(
        {
            "int4": ("int4", {}),
            "int8, eagerly": ("int8", {"enforce_eager": True}),
            "fp8": ("fp8-blocks", {}),
            "gptq": ("gptq", {"quantization": "a8"}),
            "awq": ("awq", {"dtype": "bfloat16"}),
        },
        keep=["gptq"],
    ),
)
def test_each_rank_keeps_its_part_of_a_checkpoints_codes(checkpoint, tmp_path):
    pytest.importorskip("accelerate")
    name, settings = checkpoint
    folder = written_with_codes(tmp_path, name)
    settings = {"dtype": "float32"} | settings
    first = []
    for tp_size in (1, 2):
        with engine_of(folder, RandomTrees([]), tp_size, **settings) as engine:
            found = expect_bits_of_plain_decoding(engine) if tp_size == 2 else plainly(engine)
            first.append([logprobs[0] for _, logprobs in found])
            sizes = checkpoint_sizes(folder, engine.target.layout.dtype, settings.get("quantization"), tp_size)
            assert bytes_of(weights_of(engine.target.model)) == sizes.weights
    assert first[0] == pytest.approx(first[1], abs=1e-4 if settings["dtype"] == "float32" else 0.1)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("gptq-act-order", {}, r"its inputs have another order \(desc_act\), and the plan divides them"),
        ("int4", {"intermediate_size": 96}, "inputs 0 to 48 are not whole groups of 32"),
    ],
)
def test_codes_that_cannot_be_divided(name, sizes, why, tmp_path):
    pytest.importorskip("accelerate")
    folder = written_with_codes(tmp_path, name, **sizes)
    with pytest.raises(sd.NotYetSupportedError, match=f"tp_size does not serve the codes of model.layers.*: {why}"):
        engine_of(folder, None)
