"""Settings for drafters that the given drafter does not read are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters import DRAFTERS, checked_draft, configs_for
from specdec_fast.drafters.ngram.trie_drafter import NgramTrieDrafter
from support.medusa import named, random_heads, write_heads

TREE = [[0], [1]]
CONTEXT = SimpleNamespace(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("ngram", {"tap_layers": (0, 1)}, r"tap_layers=\(0, 1\) has no effect on the drafter 'ngram': it has no such"),
        ("ngram-trie", {"draft_tree": 5}, "draft_tree=5 has no effect on the drafter 'ngram-trie'"),
        ("ngram-trie", {"draft_tree": "chain"}, "draft_tree='chain' has no effect on the drafter 'ngram-trie'"),
        (
            "medusa",
            {"tap_layers": (1,)},
            r"tap_layers=\(1,\) has no effect on the drafter .medusa.*draft_tree only",
        ),
        ("model", {"draft_tree": TREE}, r"draft_tree=\(\(0,\), \(1,\)\) has no effect on the drafter"),
    ],
)
def test_a_setting_without_effect_is_refused(target, draft, tmp_path, kind, setting, message):
    drafts = {"medusa": tmp_path, "model": draft}
    write_heads(tmp_path, named(random_heads(target.config.vocab_size, target.config.hidden_size), "safetensors"))
    with pytest.raises(sd.ConfigError, match=message):
        sd.Engine(target, drafts.get(kind, kind), **setting)


@pytest.mark.parametrize(
    "draft",
    [None, "none", "ngram", "self", "medusa:x", pytest.param(NgramTrieDrafter(CONTEXT), id="NgramTrieDrafter")],
    ids=str,
)
def test_draft_quantization_without_a_draft_model_is_refused_before_anything_is_loaded(draft):
    with pytest.raises(sd.ConfigError, match=r"draft_quantization='int4' has no effect with draft=.*: draft models"):
        sd.Engine("no-such-folder", draft, draft_quantization="int4")


def test_draft_models_read_draft_quantization(draft):
    config = sd.EngineConfig(draft_quantization="int4", num_draft_tokens=0)
    assert checked_draft(draft, config) is None, "decodes plainly, but the setting has its drafter"
    both = configs_for([draft, "ngram"], config)
    assert [own.draft_quantization for own in both] == ["int4", None]


@pytest.mark.parametrize("draft", ["self", "self:int8"])
def test_a_copy_of_a_rounded_target_is_refused_before_anything_is_loaded(draft):
    with pytest.raises(sd.ConfigError, match=f"draft='{draft}' drafts with a copy .* quantization='int8-a8'"):
        sd.Engine("no-such-folder", draft, quantization="int8-a8")


def test_drafters_that_share_settings_get_those_that_they_read():
    config = sd.EngineConfig(tap_layers=(1, 2, 3), draft_tree=5)
    drafts = ["ngram", None, "medusa:x", "eagle3:x", NgramTrieDrafter(CONTEXT), "./a-draft-model"]
    found = [(own.tap_layers, own.draft_tree) for own in configs_for(drafts, config)]
    nothing = (None, None)
    assert found == [nothing, nothing, (None, 5), ((1, 2, 3), 5), nothing, nothing]
    assert configs_for(["ngram"], config) == [config], "the engine says that nothing reads them"


def test_a_drafter_that_is_made_by_a_function_keeps_all_settings(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "own", lambda context: NgramTrieDrafter(CONTEXT))
    config = sd.EngineConfig(draft_tree=5)
    assert configs_for(["own", "eagle3:x"], config) == [config, config]


def test_drafters_of_chains_propose_chains_and_plain_decoding_reads_nothing(target):
    assert sd.Engine(target, "ngram", draft_tree="chain").drafter.max_nodes == 0
    assert sd.Engine(target, None, tap_layers=(0, 1), draft_tree=TREE).drafter.max_nodes == 0
