"""Every number of a drafter's ``config.json`` is checked: a wrong one is refused with its name."""

from __future__ import annotations

import json
import math

import pytest

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import make_drafter
from support import clover, dflash, eagle3, medusa, specblock
from support.models import VOCAB_SIZE

HUGE = 10**400
ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LAYER_INTEGERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    """A checkpoint of every kind, with further settings of each."""
    root = tmp_path_factory.mktemp("checkpoints")
    eagle3.write_checkpoint(root / "eagle3", model)
    dflash.write_checkpoint(root / "dflash", model, "deepspec", markov="vanilla")
    specblock.write_checkpoint(root / "specblock", model)
    clover.write_clover(root / "clover", clover.random_clover(), VOCAB_SIZE)
    medusa.write_heads(root / "medusa", medusa.named(medusa.random_heads(VOCAB_SIZE, 32), "safetensors"))
    return root


def load(folders, target, kind, **settings):
    """Load a checkpoint whose ``config.json`` has other settings."""
    path = folders / kind / "config.json"
    text = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(text) | settings))
        return make_drafter(f"{kind}:{path.parent}", target, EngineConfig(), None)
    finally:
        path.write_text(text)


KINDS = ("eagle3", "dflash", "specblock", "clover")  # which share the reader of layers


@pytest.mark.parametrize("value", ["x", 0, -1, math.nan, math.inf, True, [], HUGE], ids=lambda value: repr(value)[:5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_layers(folders, target, kind, value):
    names = ["rms_norm_eps", *LAYER_INTEGERS]
    for name in names:
        with pytest.raises(sd.ConfigError, match=f"config.json.*{name} is .*; expected a positive"):
            load(folders, target, kind, **{name: value})
    for name in ROPE.keys() - {"rope_type"}:
        with pytest.raises(sd.ConfigError, match=f"config.json.*{name} is "):
            load(folders, target, kind, rope_parameters={**ROPE, name: value})
    with pytest.raises(sd.ConfigError, match="rope_theta is "):
        load(folders, target, kind, rope_parameters=None, rope_theta=value)
    for name in ("attention_factor", "beta_fast", "beta_slow"):
        with pytest.raises(sd.ConfigError, match=f"config.json.*{name} is "):
            load(folders, target, kind, rope_parameters={**YARN, name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_embeddings_that_are_served(folders, target, kind):
    for rope in (ROPE, YARN, {"rope_type": "default", "rope_theta": 5e6}):
        load(folders, target, kind, rope_parameters=rope)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({**YARN, "mscale": math.nan, "mscale_all_dim": 1.0}, "not finite"),
        ({**YARN, "mscale": "x", "mscale_all_dim": 1.0}, "cannot compute the rotary embedding"),
        ({"rope_type": "default", "rope_theta": 1e-300}, "not finite"),
    ],
    ids=["scale NaN", "scale of text", "tiny base"],
)
def test_rotary_embeddings_without_finite_frequencies(folders, target, rope, message):
    with pytest.raises(sd.ConfigError, match=message):
        load(folders, target, "eagle3", rope_parameters=rope)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *[("dflash", name, value) for value in ("x", -1, math.nan, HUGE) for name in (
            "block_size", "markov_rank", "draft_vocab_size", "target_hidden_size", "input_embedding_scale",
            "output_multiplier", "final_logit_softcapping")],
        *[("dflash", name, "false") for name in (
            "sample_from_anchor", "is_causal", "enable_confidence_head", "confidence_head_with_markov", "use_swa")],
        *[("eagle3", name, value) for value in ("false", 2, math.nan) for name in (
            "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")],
        *[("specblock", name, value) for value in ("x", 0, math.nan, HUGE) for name in (
            "diffspec_draft_token_num", "tree_nodes", "rank_classes", "draft_vocab_size")],
        *[("clover", name, value) for value in ("x", 0, math.nan, 10**9) for name in (
            "clover_num_heads", "clover_num_layers")],
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_the_numbers_of_one_kind(folders, target, kind, name, value):
    with pytest.raises(sd.ConfigError, match=f"{name} is "):
        load(folders, target, kind, **{name: value})


@pytest.mark.parametrize("name", ["medusa_choices", "clover_choices"])
@pytest.mark.parametrize("choices", [[[5000]], [[10**30], [10**30, 0]]], ids=["rank 5000", "no such rank"])
def test_a_tree_beyond_the_vocabulary(folders, target, name, choices):
    with pytest.raises(
        sd.ConfigError, match=rf"begins with the node \[\d.* none of its nodes .* heads of {VOCAB_SIZE} ids"
    ):
        load(folders, target, name.partition("_")[0], **{name: choices})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
@pytest.mark.parametrize("kind", KINDS)
def test_deep_brackets(tmp_path, target, kind, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(sd.ConfigError, match=r"cannot read .*config\.json"):
        make_drafter(f"{kind}:{tmp_path}", target, EngineConfig(), None)
