"""SpecBlock checkpoints are recognised and loaded, and one that does not fit is refused with the reason."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_fast as sd
from specdec_fast.commands.tap_offsets import agreements
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext, make_drafter
from specdec_fast.drafters.specblock.checkpoint import is_specblock
from specdec_fast.drafters.specblock.drafter import SpecBlockDrafter
from specdec_fast.drafters.specblock.model import load_specblock
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.eagle3 import write_checkpoint as write_eagle3
from support.models import TINY_GROUPED, VOCAB_SIZE, tiny_model
from support.peak_memory import peak_bytes
from support.specblock import HIDDEN, K, write_checkpoint


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_a_folder_is_recognised(tmp_path, model, target, draft_vocab_size):
    write_checkpoint(tmp_path, model, draft_vocab_size=draft_vocab_size)
    for draft in (str(tmp_path), f"specblock:{tmp_path}", tmp_path):
        drafter = make_drafter(draft, target, EngineConfig(), None)
        assert isinstance(drafter, SpecBlockDrafter)
        assert drafter.name == f"specblock:{tmp_path}"
    write_eagle3(tmp_path / "eagle3", model, draft_vocab_size=40)
    model.save_pretrained(tmp_path / "model")
    assert not any(map(is_specblock, (tmp_path / "eagle3", tmp_path / "model", tmp_path / "nowhere")))


def test_weights_get_the_targets_dtype_and_memory_is_counted(tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    target = RaggedModel(model, resolve(torch.device("cpu")))
    write_checkpoint(tmp_path, model)
    drafter = SpecBlockDrafter(DrafterContext(target, EngineConfig()), str(tmp_path))
    assert {t.dtype for t in drafter.weights() if t.is_floating_point()} == {torch.bfloat16}
    kv_bytes = K * 2 * 2 * drafter.model.config.layer.num_key_value_heads * 6 * 2
    assert drafter.bytes_per_token == kv_bytes
    drafter.prepare(100, 16)
    assert sum(tensor.nbytes for tensor in drafter.pool.tensors) == kv_bytes * 16 * (7 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_draft_tokens", [K, 2 * K])
def test_the_memory_of_logits_is_estimated(tmp_path, monkeypatch, dtype, num_draft_tokens):
    """A wide vocabulary, and few hidden states that wait, so that logits are most of it."""
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0)
    model = LlamaForCausalLM(LlamaConfig(**TINY_GROUPED | {"vocab_size": 4_000})).to(dtype).eval()
    write_checkpoint(tmp_path, model)
    target = RaggedModel(model, resolve(torch.device("cpu")))
    drafter = SpecBlockDrafter(DrafterContext(target, EngineConfig()), str(tmp_path))
    blocks = 8 if num_draft_tokens == K else 8 * num_draft_tokens  # of the second call, one behind every node
    hidden = torch.randn(blocks * K, HIDDEN, dtype=dtype)
    weight = torch.randn(4_000, HIDDEN, dtype=dtype)
    needed = peak_bytes(lambda: drafter.model.ranked(hidden, hidden @ weight.T))
    assert needed <= drafter.step_bytes(8, num_draft_tokens, 8) < 2 * needed


def test_an_engine_with_a_memory_budget_runs(tmp_path, model):
    write_checkpoint(tmp_path, model)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    params = sd.SamplingParams(max_new_tokens=6)
    engine = sd.Engine(model, str(tmp_path), memory_bytes=64 << 20)
    plain = sd.Engine(model, None).generate(prompts, params)
    assert [o.token_ids for o in engine.generate(prompts, params)] == [o.token_ids for o in plain]


def test_a_target_without_trees_gets_chains_of_one_block(tmp_path, model, monkeypatch):
    """The second call is a forward over a tree, which attention of such a target refuses."""
    write_checkpoint(tmp_path, model)
    prompts, params = [[1, 2, 3], [4, 5, 6, 7]], sd.SamplingParams(max_new_tokens=12)
    plain = sd.Engine(model, None).generate(prompts, params)
    monkeypatch.setattr("specdec_fast.ops.registry.Ops.has_trees", lambda self, op: False)
    engine = sd.Engine(model, str(tmp_path), num_draft_tokens=2 * K)
    monkeypatch.setattr("specdec_fast.drafters.specblock.drafter.rows_of_trees", None)  # a second call would fail
    assert [o.token_ids for o in engine.generate(prompts, params)] == [o.token_ids for o in plain]
    assert engine.last_run.decoding.num_draft_tokens >= K
    assert engine.drafter.describe()["draft_tree"] == "chain"
    with pytest.raises(sd.NotYetSupportedError, match="verifies no trees"):
        sd.Engine(model, str(tmp_path), draft_tree=16)


def test_the_targets_embedding_is_shared(tmp_path):
    model = type(tiny_model("llama"))(type(tiny_model("llama").config)(**TINY_GROUPED | {"hidden_size": HIDDEN})).eval()
    target = RaggedModel(model, resolve(torch.device("cpu")))
    write_checkpoint(tmp_path, model, shares_embedding=True)
    embedding = model.get_input_embeddings().weight.data_ptr()
    assert embedding in {weight.data_ptr() for weight in load_specblock(tmp_path, target).weights()}


def test_taps_are_those_of_the_checkpoint_or_of_the_settings(tmp_path, model, target):
    write_checkpoint(tmp_path, model)
    assert load_specblock(tmp_path, target).taps == (0, 1, 2)
    drafter = SpecBlockDrafter(DrafterContext(target, EngineConfig(tap_layers=[3, 1, 0])), str(tmp_path))
    assert drafter.taps == (3, 1, 0)
    message = r"condition_proj.weight has the shape \[24, 96\]; expected \[24, 64\] \(2 taps of 32\)"
    with pytest.raises(sd.ConfigError, match=message):
        load_specblock(tmp_path, target, (0, 1))


def test_taps_are_measured_by_one_token_a_step(tmp_path, model):
    """A tree of siblings would count as many draft tokens, most of them wrong."""
    write_checkpoint(tmp_path, model, config={"tap_layers": [1, 2, 3]})
    found = agreements(model, f"specblock:{tmp_path}", EngineConfig(), [[1, 2, 3]], 6)
    assert [(own.offset, own.taps) for own in found] == [(-1, (0, 1, 2)), (0, (1, 2, 3))]
    assert all(1 <= own.num_drafts <= 5 for own in found)


# What is wrong, and what the message says.
CONFIGS = {
    "hidden size": ({"target_hidden_size": 48}, "hidden states of 48, target .* has 32"),
    "vocabulary": ({"vocab_size": VOCAB_SIZE + 1}, "98 ids, target .* has 97"),
    "slots": ({"diffspec_draft_token_num": 0}, "diffspec_draft_token_num is 0"),
    "other slots": ({"diffspec_draft_token_num": 7}, r"position_queries.weight has the shape \[4, 24\]"),
    "classes": ({"rank_classes": 11}, "rank head of 11 classes"),
    "few ids": ({"draft_vocab_size": 19}, "over 19 ids; expected .* 20 ids or more"),
    "taps": ({"tap_layers": "all"}, "tap_layers is 'all'"),
    "no such tap": ({"tap_layers": [0, 1, 77]}, "contain 77"),
    "no default taps": ({"tap_layers": None}, "layers has no default taps"),
    "size": ({"intermediate_size": None}, "lacks intermediate_size"),
    "nodes": ({"tree_nodes": 65}, "tree_nodes is 65; expected at most 64"),
    "window of a layer": ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, "full_attent"),
    "window of all": ({"sliding_window": 4}, "sliding_window is 4"),
}


@pytest.mark.parametrize(
    "unused",
    [{"layer_types": ["full_attention"] * 2, "sliding_window": 4}, {"sliding_window": 4, "use_sliding_window": False}],
)
def test_a_window_of_no_layer_is_ignored(tmp_path, model, target, unused):
    write_checkpoint(tmp_path, model, config=unused)
    assert load_specblock(tmp_path, target).config.sliding_windows == (None, None)


@pytest.mark.parametrize(("wrong", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configurations_that_do_not_fit_are_refused(tmp_path, model, target, wrong, message):
    write_checkpoint(tmp_path, model, config=wrong)
    with pytest.raises((sd.ConfigError, sd.VocabularyMismatchError), match=message):
        load_specblock(tmp_path, target)


WEIGHTS = {
    "missing": ({"shift_proj.0.weight": None}, r"lacks the weights shift_proj.0.weight \(1 in all\)"),
    "no rank head": ({"rank_head.0.weight": None}, "lacks the weights rank_head.0.weight"),
    "no map": ({"d2t": None}, "lacks the weights d2t"),
    "unknown": ({"router.weight": torch.ones(2)}, "weights that SpecBlock does not: router.weight"),
    "shape": ({"norm.weight": torch.ones(5)}, r"norm.weight has the shape \[5\]; expected \[24\]"),
    "another width": ({"input_layer.embed_tokens.weight": None}, r"no embed_tokens, and the target's is \[\d+, 32\]"),
}


@pytest.mark.parametrize(("changes", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_do_not_fit_are_refused(tmp_path, model, target, changes, message):
    write_checkpoint(tmp_path, model, draft_vocab_size=30)
    weights = load_file(tmp_path / "model.safetensors") | changes
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(sd.ConfigError, match=message):
        load_specblock(tmp_path, target)


def test_a_static_tree_and_a_missing_file_are_refused(tmp_path, model, target):
    with pytest.raises(sd.ConfigError, match=r"config.json.*expected the folder of a SpecBlock drafter"):
        load_specblock(tmp_path, target)
    write_checkpoint(tmp_path, model)
    with pytest.raises(sd.ConfigError, match="makes a tree of its own"):
        SpecBlockDrafter(DrafterContext(target, EngineConfig(draft_tree=[[0], [1]])), str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(sd.ConfigError, match="has no weights"):
        load_specblock(tmp_path, target)
