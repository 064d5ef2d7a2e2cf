"""An engine within ``memory_bytes``: predicted bytes are those allocated, and what it does to stay within."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.engine import engine as engine_module
from specdec_fast.engine.memory import plan_memory
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.runner.model_memory import forward_memory, storage_bytes, weights_of
from support.eagle3 import write_checkpoint
from support.grids import each_value_once, grid
from support.models import TINY, tiny_model, truncated_copy
from support.other_tokenizers import permuted
from support.programs import needs_programs

BATCH, K = 4, 3
PARAMS = sd.SamplingParams(max_new_tokens=12, ignore_eos=True)
# Multi-head latent attention: keys of 12 + 8 numbers, values of 16.
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 3,
}  # fmt: skip


def latent_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**{**TINY, **LATENT}), dtype=torch.float32).eval()


def grouped_pair():
    model = tiny_model("llama")
    return model, truncated_copy(model, 1)


def latent_pair():
    model = latent_model()
    return model, truncated_copy(model, 1)


@pytest.fixture(autouse=True)
def _without_collections(monkeypatch):
    """A plan collects what loading left; here that would take most of the time."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.fixture
def pair(request, target, draft):
    models = {"bundled": lambda: (target, draft), "grouped": grouped_pair, "latent": latent_pair}
    return models[request.param]()


def prompts_of(lengths):
    return [[(7 * i + j) % 90 for j in range(length)] for i, length in enumerate(lengths)]


def bytes_allocated(pool):
    return sum(tensor.nbytes for tensor in pool.tensors)


def largest_logits(engine, monkeypatch):
    """The bytes of the logits of each verification, as they are computed."""
    sizes, verify = [], engine.target.verify_step

    def spy(*args):
        verification = verify(*args)
        sizes.append(verification.logits.nbytes)
        return verification

    monkeypatch.setattr(engine.target, "verify_step", spy)
    return sizes


@each_value_once
@needs_programs
@pytest.mark.parametrize("prefill", [None, 8])
@pytest.mark.parametrize("pair", grid(["bundled", "grouped", "latent"], keep=["bundled", "latent"]), indirect=True)
def test_predicted_bytes_are_those_allocated(pair, prefill, monkeypatch):
    """Four long prompts fill the 512 rows of a forward; with short ones, verifications have the most rows."""
    target, draft = pair
    engine = sd.Engine(
        target, draft, method="eqspec", memory_bytes=10**9, kv_cache_tokens=640, max_batch_size=BATCH,
        num_draft_tokens=K, max_prefill_tokens=prefill,
    )  # fmt: skip
    assert engine.target.program.held_bytes == 0  # what the probes needed is freed
    sizes = largest_logits(engine, monkeypatch)
    engine.generate(prompts_of([140 if prefill is None else 3] * BATCH), PARAMS)
    terms, drafter = engine.memory_plan.terms, engine.drafter
    assert bytes_allocated(engine.core.pool) == terms["target KV"]
    assert bytes_allocated(drafter.pool) == terms["drafter KV"]
    held = engine.target.program.held_bytes
    assert held == forward_memory(engine.target, {(512, 4)}).held if prefill is None else terms["target arenas"]
    assert held <= terms["target arenas"], "that of prompts beside sequences that verify draft tokens"
    assert max(sizes) == terms["logits"]
    if prefill is None:
        assert drafter.model.program.held_bytes == forward_memory(drafter.model, {(512, 1)}).held
    assert drafter.model.program.held_bytes <= terms["drafter steps"]
    weights = [sum(storage_bytes(weights_of(model)).values()) for model in (target, draft)]
    assert [terms["target weights"], terms["drafter weights"]] == weights


@pytest.mark.parametrize("draft", grid(["ngram", None], keep=["ngram"]))
def test_a_drafter_without_a_model_has_no_bytes(target, draft):
    terms = sd.Engine(target, draft, memory_bytes=10**9).memory_plan.terms
    assert not sum(size for name, size in terms.items() if name.startswith("drafter"))
    assert terms["logits"] == 8 * (6 if draft else 1) * target.config.vocab_size * 4


def test_shared_weights_count_once(target):
    terms = sd.Engine(target, target, memory_bytes=10**9).memory_plan.terms
    assert terms["drafter weights"] == 0 < terms["drafter KV"]


def test_forwards_by_pytorch_are_estimates():
    plan = sd.Engine(tiny_model("llama"), None, memory_bytes=10**8, enforce_eager=True).memory_plan
    assert plan.is_estimate
    assert plan.terms["target arenas"] == 0 < plan.terms["working memory"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_known_before_loading(dtype):
    sizes = checkpoint_sizes(demo_pair() / "target", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(demo_pair() / "target", dtype=dtype)
    assert sizes.weights == sum(storage_bytes(weights_of(loaded)).values())
    engine = sd.Engine(loaded.eval(), None)
    assert sizes.bytes_per_token == engine.target.layout.bytes_per_token
    assert sizes.logits_bytes == engine.target.vocab_size * dtype.itemsize
    assert sizes.max_positions == engine.target.max_positions


def test_a_checkpoint_that_cannot_fit_is_not_loaded(monkeypatch):
    def loaded(*_, **settings):
        raise AssertionError("the checkpoint was loaded")

    monkeypatch.setattr(engine_module, "load_target", loaded)
    with pytest.raises(sd.MemoryBudgetError, match=r"lacks \d+ bytes .* largest term is target weights"):
        sd.Engine(demo_pair() / "target", demo_pair() / "draft", memory_bytes=10**6)
    with pytest.raises(AssertionError, match="was loaded"):
        sd.Engine(demo_pair() / "target", demo_pair() / "draft", memory_bytes=10**7)


def test_the_shortfall_is_exact(target):
    """The missing bytes are those with which an engine of one page is made, and it decodes as any other."""
    budget = sum(storage_bytes(weights_of(target)).values()) + 75_000  # enough for a page
    with pytest.raises(sd.MemoryBudgetError, match="over 1 KV positions") as refused:
        sd.Engine(target, None, memory_bytes=budget)
    missing = int(re.search(r"lacks (\d+) bytes", str(refused.value))[1])
    with pytest.raises(sd.MemoryBudgetError):
        sd.Engine(target, None, memory_bytes=budget + missing - 1)
    engine = sd.Engine(target, None, memory_bytes=budget + missing)
    assert engine.config.kv_cache_tokens == 16
    prompt = [1, 2, 3]
    expected = sd.Engine(target, None).generate([prompt], PARAMS)[0].token_ids
    assert engine.generate([prompt], PARAMS)[0].token_ids == expected


def test_the_longest_prompt_that_fits_runs(target):
    engine = sd.Engine(target, "ngram", memory_bytes=10**7, kv_cache_tokens=64)
    refused = engine.generate(prompts_of([90]), PARAMS)[0].error
    assert isinstance(refused, sd.KVCacheTooSmallError)
    assert "raise memory_bytes" in str(refused)
    longest = int(re.search(r"has (\d+)\.$", str(refused))[1])
    assert longest == 64 + 1 - PARAMS.max_new_tokens
    fits, too_long = engine.generate(prompts_of([longest, longest + 1]), PARAMS)
    assert len(fits.token_ids) == PARAMS.max_new_tokens
    assert isinstance(too_long.error, sd.KVCacheTooSmallError)


def test_kv_cache_tokens_within_a_budget(target):
    with pytest.raises(sd.MemoryBudgetError, match="over 100000 KV positions"):
        sd.Engine(target, None, memory_bytes=10**7, kv_cache_tokens=100_000)
    assert sd.Engine(target, None, memory_bytes=10**7, kv_cache_tokens=100).config.kv_cache_tokens == 100


@pytest.fixture(scope="module")
def made(target, draft):
    """An engine of the bundled pair, whose models are planned for again and again."""
    return sd.Engine(target, draft)


def smallest_with(made, condition, **keywords):
    """The smallest budget whose plan satisfies a condition that more memory never ends, to 1,000 bytes."""
    fails, holds = 10**6, 10**8
    while holds - fails > 1000:
        middle = (fails + holds) // 2
        config = sd.EngineConfig(memory_bytes=middle, **keywords)
        try:
            with patch("gc.collect"):  # a plan collects what loading left; here that would take most of the time
                is_met = condition(plan_memory(made.target, made.drafter, config, drafts=True).describe())
        except sd.MemoryBudgetError:
            is_met = False
        fails, holds = (fails, middle) if is_met else (middle, holds)
    return holds


@pytest.mark.grid
@needs_programs
def test_what_is_lowered_first(made, target, draft, prompt_ids, expected):
    """Less and less memory: shorter prefills and a smaller window, then a smaller batch, then no drafter."""
    plain = smallest_with(made, lambda plan: True)
    drafting = smallest_with(made, lambda plan: plan["has_drafter"])
    whole = smallest_with(made, lambda plan: plan["max_batch_size"] == 8)
    assert plain < drafting < whole
    shown = {}
    for budget in (plain, drafting, (drafting + whole) // 2, 10**8):
        engine = sd.Engine(target, draft, memory_bytes=budget)
        plan = engine.describe()["memory"]
        assert plan["planned_bytes"] <= budget
        shown[budget] = (plan["has_drafter"], engine.config.max_batch_size, plan["most_draft_tokens"])
        outputs = engine.generate(prompt_ids[4:8], sd.SamplingParams(max_new_tokens=8))
        served = [output.token_ids == want[:8] for output, want in zip(outputs, expected[4:8], strict=True)]
        assert all(same or output.error for same, output in zip(served, outputs, strict=True))
        assert any(served)
        assert engine.target.program.held_bytes <= plan["terms"]["target arenas"]
        assert bytes_allocated(engine.core.pool) == plan["terms"]["target KV"]
    assert shown[plain] == (False, 1, 0)
    assert shown[drafting][:2] == (True, 1)
    assert 1 < shown[(drafting + whole) // 2][1] < 8
    assert shown[10**8] == (True, 8, 5)


@needs_programs
def test_less_memory_never_brings_back_what_was_given_up(made):
    """A batch is made smaller before a step prefills fewer than 64 tokens; a drafter that does not fit stays away."""
    plans = []
    for budget in range(4_400_000, 12_000_000, 100_000):
        config = sd.EngineConfig(memory_bytes=budget)
        try:
            plans.append(plan_memory(made.target, made.drafter, config, drafts=True).describe())
        except sd.MemoryBudgetError:
            assert not plans
    assert [plan["has_drafter"] for plan in plans] == sorted(plan["has_drafter"] for plan in plans)
    assert {plan["has_drafter"] for plan in plans} == {False, True}
    for plan in plans:
        if plan["max_batch_size"] > 1:
            assert plan["max_prefill_tokens"] is None or plan["max_prefill_tokens"] >= 64
    assert {plan["max_batch_size"] for plan in plans} >= {1, 2, 4}
    for drafts in (False, True):
        sizes = [plan["max_batch_size"] for plan in plans if plan["has_drafter"] == drafts]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("num_draft_tokens", grid([8, "auto"], keep=[8]))
def test_k_is_lowered_before_the_batch(made, target, draft, num_draft_tokens):
    keywords = {"window_size": 8, "num_draft_tokens": num_draft_tokens}
    whole = smallest_with(made, lambda plan: (plan["max_batch_size"], plan["most_draft_tokens"]) == (8, 8), **keywords)
    engine = sd.Engine(target, draft, memory_bytes=whole - 20_000, **keywords)
    assert engine.config.max_batch_size == 8
    assert 1 <= engine.config.most_draft_tokens < 8
    own = [replace(PARAMS, num_draft_tokens=k) for k in (None, 8, 1, 8, None, 0, 8, 9)]  # bounds of the requests
    *outputs, refused = engine.generate(prompts_of([20] * 8), own)
    assert isinstance(refused.error, sd.TooManyDraftTokensError), "more than K as it was asked for"
    plain = sd.Engine(target, None).generate(prompts_of([20] * 7), PARAMS)
    assert [output.raise_for_error().token_ids for output in outputs] == [output.token_ids for output in plain]
    assert max(len(output.stats.accepted_per_position) for output in outputs) <= engine.config.most_draft_tokens


def test_the_drafter_prefills_within_the_bound(target, draft):
    engine = sd.Engine(target, draft, memory_bytes=6 * 10**6)
    assert isinstance(engine.drafter, ModelDrafter)
    assert engine.config.max_prefill_tokens is not None
    outputs = engine.generate(prompts_of([100, 90]), PARAMS)
    assert [len(output.token_ids) for output in outputs] == [12, 12]
    rows = (engine.config.max_batch_size * 2, engine.config.max_batch_size), (engine.config.max_prefill_tokens, 1)
    assert engine.drafter.model.program.held_bytes <= forward_memory(engine.drafter.model, rows).held


@needs_programs
def test_the_positions_of_a_draft_model_with_another_tokenizer_are_counted(target, draft, tokenizer):
    model, other = permuted(draft)
    tokenizers = {"tokenizer": tokenizer, "draft_tokenizer": other}
    engine = sd.Engine(target, model, memory_bytes=10**9, kv_cache_tokens=640, num_draft_tokens=K, **tokenizers)
    engine.generate(prompts_of([140] * BATCH), PARAMS)
    terms, drafter = engine.memory_plan.terms, engine.drafter
    assert bytes_allocated(drafter.pool) == terms["drafter KV"]
    assert drafter.pool.num_pages >= 2 * engine.core.pool.num_pages
    assert drafter.model.program.held_bytes <= terms["drafter steps"]


@needs_programs
def test_a_drafter_of_hidden_states_is_counted(target, tmp_path):
    """EAGLE-3: weights, pages and hidden states as allocated; the forwards of the drafter are estimated."""
    write_checkpoint(tmp_path, target)
    engine = sd.Engine(target, f"eagle3:{tmp_path}", memory_bytes=10**9, kv_cache_tokens=640, num_draft_tokens=K)
    engine.generate(prompts_of([140] * BATCH), PARAMS)
    plan, drafter = engine.memory_plan, engine.drafter
    assert plan.is_estimate
    assert bytes_allocated(drafter.pool) == plan.terms["drafter KV"]
    own = storage_bytes(weights_of(target))
    others = {address: size for address, size in storage_bytes(drafter.weights()).items() if address not in own}
    assert plan.terms["drafter weights"] == sum(others.values()) > 0
    assert plan.terms["hidden states"] == engine.target.empty_hidden_states(2 * 512).nbytes
    held = engine.target.program.held_bytes
    assert forward_memory(engine.target, {(512, 4)}).held == held <= plan.terms["target arenas"]


@needs_programs
@pytest.mark.parametrize("tree", grid({"dynamic": 7, "static": [[0], [1], [0, 0], [2]]}, keep=["dynamic"]))
def test_the_nodes_of_trees_are_counted(target, tmp_path, tree, monkeypatch):
    """A verification has a row per node; a budget one byte short of it keeps K and gives up the tree."""
    write_checkpoint(tmp_path, target)
    settings = {"max_batch_size": BATCH, "method": "eqspec", "kv_cache_tokens": 640, "max_prefill_tokens": 9}
    most = 7 if tree == 7 else len(tree)
    make = partial(sd.Engine, target, f"eagle3:{tmp_path}", num_draft_tokens=K, draft_tree=tree, **settings)
    engine = make(memory_bytes=10**9)
    assert engine.describe()["memory"]["max_nodes"] == engine.memory_plan.max_nodes == most
    sizes = largest_logits(engine, monkeypatch)
    prompts = prompts_of([9] * BATCH)
    outputs = engine.generate(prompts, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in sd.Engine(target, None).generate(prompts, PARAMS)]
    terms = engine.memory_plan.terms
    assert max(sizes) == terms["logits"]
    assert engine.target.program.held_bytes == terms["target arenas"]
    less = make(memory_bytes=sum(terms.values()) - 1)
    assert less.config.most_draft_tokens == K
    assert less.memory_plan.max_nodes == 0
    assert less.memory_plan.terms["logits"] == terms["logits"] * (1 + K) // (1 + most)
