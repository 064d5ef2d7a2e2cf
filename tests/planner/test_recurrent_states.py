"""State slots of recurrent layers within ``memory_bytes``: what is planned is what is allocated, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import specdec_fast as sd
from specdec_fast.engine import engine as engine_module
from specdec_fast.engine import memory as memory_module
from specdec_fast.planner.budget import EngineSetting
from specdec_fast.planner.checkpoint import checkpoint_sizes, least_memory
from specdec_fast.runner.model_memory import storage_bytes, weights_of
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.schedulers.exspec import ExspecScheduler
from support.grids import grid
from support.models import TINY_GROUPED
from support.recurrent_models import FAMILIES, VOCAB_SIZE, recurrent_config, recurrent_model

K = 3
PARAMS = sd.SamplingParams(max_new_tokens=3, ignore_eos=True)
# Few probes, and no terms that vary with the length of prefills.
SETTINGS = {
    "enforce_eager": True, "deterministic": False, "kv_cache_tokens": 64, "max_prefill_tokens": 1,
    "num_draft_tokens": K,
}  # fmt: skip
PROMPTS = [[(7 * i + j) % VOCAB_SIZE for j in range(2 + i % 3)] for i in range(6)]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY_GROUPED, "vocab_size": VOCAB_SIZE})
    llama = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    hybrids = {family: recurrent_model(family) for family in ("qwen3.5", "mamba2")}
    return {**hybrids, "llama": llama, "ngram": "ngram", "": None}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """A plan collects what loading left; here that would take most of the time."""
    monkeypatch.setattr("gc.collect", lambda: 0)


def make(models, target, draft, memory_bytes=10**9, **settings):
    return sd.Engine(models[target], models[draft], memory_bytes=memory_bytes, **{**SETTINGS, **settings})


def states_of(pool):
    """The bytes of a pool's state slots, as allocated."""
    return sum(tensor.nbytes for tensors in pool.states.tensors for tensor in tensors) if pool.states else 0


def planned_states(engine):
    return [engine.memory_plan.terms.get(f"{part} states", 0) for part in ("target", "drafter")]


def decode(engine, params=PARAMS):
    """Decode a prompt, then more than may be resident; the bytes of the slots, which both pools have from the first."""
    sizes = []
    for prompts in (PROMPTS[:1], PROMPTS):
        for output in engine.generate(prompts, params, progress=False):
            output.raise_for_error()
        drafter_pool = getattr(engine.drafter, "pool", None)
        sizes.append([states_of(engine.core.pool), states_of(drafter_pool) if drafter_pool else 0])
    assert sizes[0] == sizes[1]
    return sizes[1]


@pytest.mark.parametrize(
    ("target", "draft"), [("qwen3.5", "ngram"), ("llama", "qwen3.5"), ("mamba2", "qwen3.5"), ("qwen3.5", "")]
)
def test_planned_states_are_those_allocated(models, target, draft):
    """A slot per resident sequence and the scratch slot, in the pool of each model that has states."""
    engine = make(models, target, draft, max_batch_size=2)
    states = planned_states(engine)
    assert [size > 0 for size in states] == [target != "llama", draft == "qwen3.5"]
    has_model = draft in ("qwen3.5", "llama")
    least = least_memory(models[target], models[draft] if has_model else None, engine.config)
    if draft == "ngram":
        least = replace(least, states_for=K)
    terms = least.terms(EngineSetting(2, 1 if draft else 0, 4, 64))
    assert states == [terms.get(f"{part} states", 0) for part in ("target", "drafter")]
    assert decode(engine) == states
    assert states[0] == (4 + 1) * engine.describe()["state_bytes_per_sequence"]


def test_other_models_have_no_term_of_states(models):
    terms = make(models, "llama", "ngram").memory_plan.terms
    assert not [name for name in terms if "states" in name]


def test_a_drafter_that_is_given_up_has_no_states(models):
    """The slots of a loaded target stay as large as with it."""
    settings = {"max_batch_size": 1, "window_size": 1, "num_draft_tokens": 1}
    whole = make(models, "qwen3.5", "mamba2", **settings).memory_plan.terms
    engine = make(models, "qwen3.5", "mamba2", sum(whole.values()) - 1, **settings)
    assert not engine.memory_plan.has_drafter
    assert planned_states(engine) == [whole["target states"], 0]
    assert decode(engine) == planned_states(engine)


def test_a_budget_bounds_the_resident_sequences(models):
    """One byte less than the window needs: a window of one batch. One byte less than that needs: a smaller batch."""
    settings = {"max_batch_size": 3, "num_draft_tokens": 1}
    engine = make(models, "qwen3.5", "ngram", **settings)
    for batch_size, most in ((3, 3), (2, 2)):
        budget = sum(engine.memory_plan.terms.values()) - 1
        engine = make(models, "qwen3.5", "ngram", budget, **settings)
        assert engine.config.max_batch_size == batch_size
        assert engine.core.scheduler.checked_max_resident() == most
        assert planned_states(engine)[0] == (most + 1) * engine.target.layout.bytes_per_sequence
        assert decode(engine) == planned_states(engine)


def test_a_scheduler_that_admits_more_than_it_says_gets_no_further_slots(models, monkeypatch):
    own = {"max_resident": 3, "num_to_admit": lambda self, num_resident: 99}
    monkeypatch.setitem(SCHEDULERS, "own", type("Own", (ExspecScheduler,), own))
    engine = make(models, "llama", "qwen3.5", method="own", max_batch_size=2, kv_cache_tokens=512)
    assert engine.memory_plan.config.num_resident == 3
    long = replace(PARAMS, max_new_tokens=12)  # so that every resident sequence drafts before one ends
    assert decode(engine, long) == planned_states(engine) > [0, 0]


def test_a_scheduler_of_a_fixed_size_is_planned_for_that_size(models, monkeypatch):
    """It reads no window, so a smaller one would not bound its state slots."""
    monkeypatch.setitem(SCHEDULERS, "own", type("Own", (ExspecScheduler,), {"max_resident": 4}))
    settings = {"method": "own", "max_batch_size": 2, "num_draft_tokens": 1}
    whole = sum(make(models, "qwen3.5", "ngram", **settings).memory_plan.terms.values())
    engine = make(models, "qwen3.5", "ngram", whole - 1, **settings)
    assert engine.config.max_batch_size == 1
    assert decode(engine) == planned_states(engine)


def test_a_budget_without_room_for_one_state_is_refused(models, tmp_path, monkeypatch):
    """Before the checkpoint is loaded; the error names the bytes of the states."""
    recurrent_config("mamba2").save_pretrained(tmp_path)
    sizes = checkpoint_sizes(tmp_path, torch.float32)
    states = 2 * sizes.bytes_per_sequence(0)
    least = sizes.weights + states + sizes.logits_bytes
    monkeypatch.setattr(engine_module, "load_target", lambda *_: pytest.fail("the checkpoint was loaded"))
    with pytest.raises(sd.MemoryBudgetError, match="no sequence fits, however short") as refused:
        sd.Engine(tmp_path, "ngram", memory_bytes=least - 1, dtype="float32")
    assert f"target states {states}" in str(refused.value)
    assert "lacks 1 bytes" in str(refused.value)
    assert "shorten requests" not in str(refused.value)


def test_a_loaded_model_without_room_for_one_state_is_refused(models):
    weights = sum(storage_bytes(weights_of(models["qwen3.5"])).values())
    each = checkpoint_sizes(models["qwen3.5"], None).bytes_per_sequence(0)
    with pytest.raises(sd.MemoryBudgetError, match=rf"target states {2 * each}.*0 KV positions fit.*shorten requests"):
        make(models, "qwen3.5", "", weights + each, kv_cache_tokens=None)


def test_slots_of_draft_tokens_that_cannot_fit_are_not_made(models):
    """Known before the target is loaded, when its slots can still be those of plain decoding."""
    plain = make(models, "mamba2", "", max_batch_size=1, window_size=1)
    budget = plain.memory_plan.describe()["planned_bytes"]
    engine = make(models, "mamba2", "ngram", budget, max_batch_size=1, window_size=1, num_draft_tokens=50)
    assert not engine.memory_plan.has_drafter
    assert decode(engine) == planned_states(engine) == planned_states(plain)


def test_positions_of_a_model_that_does_not_attend_need_no_memory(models, monkeypatch):
    """Its budget bounds no request: pages have no bytes."""
    monkeypatch.setattr(memory_module, "_POSITIONS_EACH", 8)
    engine = make(models, "mamba2", "ngram", 10**7, kv_cache_tokens=None, max_batch_size=1)
    assert engine.memory_plan.terms["target KV"] == 0
    assert engine.config.kv_cache_tokens is None
    (output,) = engine.generate([[1] * 40], PARAMS, progress=False)
    assert len(output.raise_for_error().token_ids) == PARAMS.max_new_tokens
    assert make(models, "mamba2", "ngram", 10**7).config.kv_cache_tokens == 64


def test_the_pages_of_a_draft_model_bound_a_target_that_does_not_attend(models):
    engine = make(models, "mamba2", "llama", 10**7, kv_cache_tokens=None)
    terms = engine.memory_plan.terms
    assert terms["target KV"] == 0 < terms["drafter KV"]
    assert sum(terms.values()) <= 10**7
    each = engine.drafter.bytes_per_token
    assert terms["drafter KV"] == (engine.config.kv_cache_tokens + engine.config.page_size) * each


@pytest.mark.parametrize("family", grid(FAMILIES, keep=["qwen3.5", "mamba"]))
def test_states_are_known_before_loading(family, tmp_path):
    recurrent_config(family).save_pretrained(tmp_path)
    sizes = checkpoint_sizes(tmp_path, torch.bfloat16)
    loaded = checkpoint_sizes(
        AutoModelForCausalLM.from_config(recurrent_config(family), dtype=torch.bfloat16).eval(), None
    )
    assert sizes == loaded
    assert 0 < sizes.bytes_per_sequence(0) < sizes.bytes_per_sequence(K)
