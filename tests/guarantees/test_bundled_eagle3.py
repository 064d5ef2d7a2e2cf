"""The bundled EAGLE-3 drafter is accepted as often as it was trained to be."""

from __future__ import annotations

import json

import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from support.grids import grid


def outputs_of(draft, num_prompts, temperature=0.0, **config):
    """Return the tokens, and how many a sequence got per step."""
    lines = (demo_pair() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:num_prompts]]
    params = [sd.SamplingParams(max_new_tokens=40, temperature=temperature, seed=i) for i in range(len(prompts))]
    engine = sd.Engine(demo_pair() / "target", draft, dtype="float32", **config)
    tokens = [output.token_ids for output in engine.generate(prompts, params)]
    return tokens, engine.last_run.decoding.mean_acceptance_length


def test_the_bundled_drafter_is_accepted():
    """Its features are those that it was trained on: with every tap one layer too early, much less is accepted."""
    expected, _ = outputs_of("none", 12)
    found, length = outputs_of("eagle3:" + str(demo_pair() / "eagle3"), 12)
    others, shorter = outputs_of(demo_pair() / "eagle3", 12, tap_layers=(0, 1, 2))
    assert found == others == expected
    assert length > 2.8
    assert shorter < length - 1


@pytest.mark.parametrize("temperature", grid([0.0, 1.0], keep=[1.0]))
def test_a_tree_of_the_bundled_drafter_is_accepted_more_often_than_its_chain(temperature):
    chain, tree = (outputs_of(demo_pair() / "eagle3", 4, temperature, draft_tree=shape)[1] for shape in ("chain", 16))
    assert tree > chain + 0.3
