"""Settings for drafters that the given drafter does not read are refused."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from support.medusa import named, random_heads, write_heads

TREE = [[0], [1]]


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("ngram", {"tap_layers": (0, 1)}, r"tap_layers=\(0, 1\) has no effect on the drafter 'ngram': it has no such"),
        ("ngram-trie", {"draft_tree": 5}, "draft_tree=5 has no effect on the drafter 'ngram-trie'"),
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


def test_a_chain_is_a_tree_of_every_drafter_and_plain_decoding_reads_nothing(target):
    assert sd.Engine(target, "ngram", draft_tree="chain").drafter.max_nodes == 0
    assert sd.Engine(target, None, tap_layers=(0, 1), draft_tree=TREE).drafter.max_nodes == 0
