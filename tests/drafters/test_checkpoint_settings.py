"""A wrong value in the ``config.json`` of a drafter is a ConfigError that names the file and the setting."""

from __future__ import annotations

import json

import pytest

import specdec_fast as sd
from specdec_fast.drafters import is_draft_model
from specdec_fast.drafters.clover.checkpoint import read_config as read_clover
from specdec_fast.drafters.dflash.checkpoint import read_config as read_dflash
from specdec_fast.drafters.eagle3.checkpoint import read_config as read_eagle3
from specdec_fast.drafters.specblock.checkpoint import read_config as read_specblock

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 97}
READERS = {
    "eagle3": (read_eagle3, {}),
    "dflash": (read_dflash, {"mask_token_id": 3}),
    "clover": (read_clover, {}),
    "specblock": (read_specblock, {}),
}
OF_ALL = [
    {"hidden_act": "foo"},
    {"hidden_act": ["silu"]},
    {"hidden_size": 32.5},
    {"layer_types": 5},
    {"sliding_window": 0, "layer_types": ["sliding_attention"]},
    {"sliding_window": -3, "layer_types": ["sliding_attention"]},
]
OF_EAGLE3 = [{"eagle_config": [1]}, {"speculators_config": "x"}, {"speculators_config": {"verifier": 3}}]
OF_DFLASH = [
    {"dflash_config": [1]},
    {"architectures": 5},
    {"speculators_config": "x"},
    {"output_multiplier": [1]},
    {"swa_window_size": -3, "use_swa": True},
]
CASES = [
    *[(kind, wrong) for kind in READERS for wrong in OF_ALL],
    *[("eagle3", wrong) for wrong in OF_EAGLE3],
    *[("dflash", wrong) for wrong in OF_DFLASH],
    ("clover", {"sliding_window": 4, "layer_types": ["sliding_attention"]}),
    ("clover", {"sliding_window": 4}),
]


@pytest.mark.parametrize(("kind", "wrong"), CASES, ids=[f"{kind}-{wrong}" for kind, wrong in CASES])
def test_a_wrong_setting_is_named(tmp_path, kind, wrong):
    read, settings = READERS[kind]
    found = {**SIZES, "num_hidden_layers": 1, **settings, **wrong}
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(sd.ConfigError) as refused:
        read(tmp_path)
    message = str(refused.value)
    assert tmp_path.name in message
    named = "verifier" if wrong == {"speculators_config": {"verifier": 3}} else next(iter(wrong))
    assert named in message


@pytest.mark.parametrize("architectures", [5, "LlamaForCausalLM", [5]], ids=str)
def test_architectures_of_any_folder_must_be_names(tmp_path, architectures):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "architectures": architectures}))
    with pytest.raises(sd.ConfigError, match=r"config.json': architectures is .*expected a list of names"):
        is_draft_model(str(tmp_path))


@pytest.mark.parametrize("softcap", [None, 0, 30, 2.5])
def test_numbers_may_be_integers_and_a_softcap_of_zero_is_none(tmp_path, softcap):
    found = {**SIZES, "mask_token_id": 3, "final_logit_softcapping": softcap, "output_multiplier": 2}
    (tmp_path / "config.json").write_text(json.dumps(found))
    config = read_dflash(tmp_path)
    assert config.softcap == (softcap or None)
    assert config.output_scale == 2.0
