"""Targets and drafts that transformers has put onto one device by a device map."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from support.grids import grid

PROMPTS = [[5, 6, 7], [41, 84], [70]]
PARAMS = sd.SamplingParams(max_new_tokens=12, logprobs=True)


@pytest.mark.parametrize("device_map", grid({"a name": "cpu", "a map": {"": "cpu"}}, keep=["a map"]))
def test_a_map_onto_one_device(device_map):
    pytest.importorskip("accelerate")  # transformers needs it for device maps
    folders = [demo_pair() / role for role in ("target", "draft")]
    mapped = [AutoModelForCausalLM.from_pretrained(folder, device_map=device_map).eval() for folder in folders]
    engine, plain = sd.Engine(*mapped), sd.Engine(*map(str, folders))
    found, expected = (each.generate(PROMPTS, PARAMS, progress=False) for each in (engine, plain))
    assert [(o.token_ids, o.logprobs) for o in found] == [(o.token_ids, o.logprobs) for o in expected]
    assert engine.describe()["forward_program"] == plain.describe()["forward_program"]
