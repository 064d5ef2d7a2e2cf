"""The prefix cache of an engine: what is found, what is computed once, what is given up, and when all is forgotten."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.errors import ConfigError
from specdec_fast.runner.ragged_model import RaggedModel
from support import eagle3
from support.grids import each_value_once, grid
from support.memory_errors import ERRORS
from support.models import TINY_GROUPED, tiny_model, truncated_copy
from support.prefixes import (
    PAGE,
    PARAMS,
    PREFIX,
    PROMPTS,
    assert_vacant,
    engine_of,
    entries,
    plain_results,
    request_of,
    results,
    same_bits,
)
from support.recording_drafter import Recording
from support.recurrent_models import recurrent_model

GREEDY = sd.SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(pair):
    """What plain decoding makes of each request by itself."""
    return plain_results(pair[0])


@pytest.fixture
def num_rows(monkeypatch):
    """Count the rows of every forward that prefills, with the model."""
    counted = []
    original = RaggedModel.forward

    def counting(model, batch, *rest):
        counted.append((model, len(batch.token_ids)))
        return original(model, batch, *rest)

    monkeypatch.setattr(RaggedModel, "forward", counting)
    return counted


def cached(outputs):
    return [output.num_cached_tokens for output in outputs]


def test_full_pages_are_found_and_the_last_token_is_always_computed(pair):
    engine = engine_of(pair[0], None)
    for prompt, expected in ((PREFIX[:32], 0), (PREFIX[:32], 28), (PREFIX[:33], 32), (PREFIX[:34], 32), ([1], 0)):
        (output,) = engine.generate([prompt], GREEDY)
        assert output.num_cached_tokens == engine.last_run.num_cached_tokens == expected


def test_what_a_request_has_emitted_is_found_too(pair):
    """As the next turn of a chat begins."""
    engine = engine_of(pair[0], pair[1])
    (first,) = engine.generate([PREFIX[:10]], sd.SamplingParams(max_new_tokens=23, ignore_eos=True))
    text = PREFIX[:10] + first.token_ids  # all but the newest token have entries
    assert len(text) == 33
    assert cached(engine.generate([[*text, 5]], GREEDY)) == [32]


def test_running_requests_share_with_those_that_join_later(pair):
    engine = engine_of(pair[0], None)
    core = engine.core
    first = request_of(engine, PREFIX[:21])
    core.add(first)
    for _ in range(6):
        core.step()
    later = request_of(engine, first.token_ids[:25])
    core.add(later)
    core.step()
    assert later.num_cached_tokens == 24
    tables = [core.pool.block_table(sequence) for sequence in (first, later)]
    assert tables[0][:6] == tables[1][:6]
    assert not {*tables[0][6:]} & {*tables[1][6:]}
    core.cancel_all()
    assert core.pool.is_vacant


@each_value_once
@pytest.mark.parametrize("draft", [None, "model"])
@pytest.mark.parametrize(
    "config", [{}, {"method": "eqspec"}, {"max_prefill_tokens": 30}, {"max_batch_size": 3}], ids=str
)
def test_requests_of_one_step_with_one_prompt_share_one_prefill(pair, num_rows, draft, config):
    """As the n texts of one prompt do, and requests behind a long common prefix."""
    prompts = [PREFIX] * 5 + [[*PREFIX[:40], i] for i in range(3)]
    params = [sd.SamplingParams(max_new_tokens=6, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
    expected = results(sd.Engine(pair[0], None, max_batch_size=1).generate(prompts, params))
    engine = engine_of(pair[0], draft and pair[1], **{"max_batch_size": 8, "num_draft_tokens": 3, **config})
    num_rows.clear()
    outputs = engine.generate(prompts, params)
    assert results(outputs) == expected
    assert sorted(cached(outputs)) == [0, *[40] * 3, *[48] * 4]
    num_of_one = len(PREFIX) - 1
    num_of_all = num_of_one + 4 * (num_of_one % PAGE)  # 40 tokens are full pages, and the last token is another row
    num_of_target = sum(n for model, n in num_rows if model is engine.target)
    most = num_of_all + 4 * len(prompts)  # last tokens and draft tokens may be in the same forwards
    assert num_of_all <= num_of_target <= most
    if draft:  # while it prefills in chunks, the target decodes, and the draft model has these tokens to compute too
        num_of_draft = sum(n for model, n in num_rows if model is engine.drafter.model)
        most = num_of_all + len(prompts) + 16 * ("max_prefill_tokens" in config)  # its prompts end with first tokens
        assert num_of_all <= num_of_draft <= most
    assert_vacant(engine)


def test_few_common_tokens_are_worth_no_forward_of_their_own(pair, num_rows):
    engine = engine_of(pair[0], None, max_batch_size=8)
    num_rows.clear()
    engine.generate([[*PREFIX[:5], *[i] * 40] for i in range(4)], GREEDY)
    assert num_rows == [(engine.target, 4 * 45)]
    assert engine.core.prefixes.describe(engine.core.pool)["num_pages"] >= 4 * 10 + 1, "the first page is kept once"


def test_kept_pages_are_given_up_before_anybody_waits_or_is_preempted(pair):
    """An engine whose pool is full of kept pages takes the very steps of a fresh one."""
    config = {"kv_cache_tokens": 120, "num_draft_tokens": 3}
    prompts = [[i] * (9 + i) for i in range(6)]

    def counts(engine):
        engine.generate(prompts, sd.SamplingParams(max_new_tokens=30, ignore_eos=True))
        run = engine.last_run
        return run.num_steps, run.num_sequence_steps, run.num_preemptions

    fresh = engine_of(*pair, **config)
    used = engine_of(*pair, **config)
    used.generate(PROMPTS, PARAMS)
    assert used.core.pool.num_idle_pages > 20, "next to nothing of the pool is free"
    assert counts(used) == counts(fresh) == counts(engine_of(*pair, prefix_cache=False, **config))
    assert fresh.last_run.num_preemptions > 0


def test_shared_pages_count_once_where_room_is_made(pair):
    """Four requests of 12 pages, of which they have 10 in common, run at once in a pool of 20 pages."""
    engine = engine_of(pair[0], None, kv_cache_tokens=20 * PAGE)
    prompts = [[*PREFIX[:40], i] for i in range(4)]
    engine.generate(prompts[:1], GREEDY)
    engine.generate(prompts, sd.SamplingParams(max_new_tokens=4, ignore_eos=True))
    run = engine.last_run
    assert (run.num_steps, run.num_preemptions) == (4, 0)


def test_a_preempted_request_finds_its_own_pages(pair, num_rows):
    config = {"kv_cache_tokens": 100, "max_batch_size": 8}
    prompts = [[i] * 20 for i in range(6)]
    params = sd.SamplingParams(max_new_tokens=30, ignore_eos=True)
    expected = results(engine_of(pair[0], None, prefix_cache=False, **config).generate(prompts, params))
    rows = []
    for is_on in (False, True):
        engine = engine_of(pair[0], None, prefix_cache=is_on, **config)
        num_rows.clear()
        outputs = engine.generate(prompts, params)
        assert results(outputs) == expected
        assert engine.last_run.num_preemptions > 2
        assert cached(outputs) == [0] * 6, "no prompt had been computed by another request"
        rows.append(sum(n for _, n in num_rows))
    assert rows[1] < rows[0]


def test_a_pool_that_grows_keeps_its_entries(pair):
    engine = engine_of(pair[0], pair[1])
    engine.generate([PREFIX[:32]], GREEDY)
    pools = [engine.core.pool, engine.drafter.pool]
    long = sd.SamplingParams(max_new_tokens=100, ignore_eos=True)
    expected = results(sd.Engine(pair[0], None, max_batch_size=1).generate([PREFIX[:37]], long))
    outputs = engine.generate([PREFIX[:37]], long)
    assert engine.core.pool is not pools[0]
    assert engine.drafter.pool is not pools[1]
    assert cached(outputs) == [32]
    assert results(outputs) == expected


def test_without_memory_for_a_larger_pool_beside_the_present_one_the_entries_are_lost(pair, monkeypatch):
    engine = engine_of(pair[0], None)
    engine.generate([PREFIX[:32]], GREEDY)

    def refuse(pool, *args):
        raise sd.KVCacheAllocationError("no memory for two pools")

    monkeypatch.setattr("specdec_fast.kv_cache.page_pool.PagePool.grown", refuse)
    outputs = engine.generate([PREFIX[:37]], sd.SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert cached(outputs) == [0]
    assert cached(engine.generate([PREFIX[:37]], GREEDY)) == [36]


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
def test_cancelled_requests_leave_what_they_have_computed(pair, expected, monkeypatch, ahead):
    """In the middle of a prompt, and of an answer; pages that are not complete are not found."""
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = engine_of(*pair, max_prefill_tokens=10)
    for num_steps, least in ((2, 8), (8, 48)):
        request_id = engine.core.add(request_of(engine, PROMPTS[0]))
        for _ in range(num_steps):
            engine.core.step()
        engine.core.cancel(request_id)
        engine.core.cancel_all()
        assert_vacant(engine)
        outputs = engine.generate(PROMPTS, PARAMS)
        assert results(outputs) == expected
        assert outputs[0].num_cached_tokens >= least


@pytest.mark.parametrize("place", ["forward", "verify_step"])
def test_a_step_that_fails_leaves_nothing_that_was_not_computed(pair, expected, monkeypatch, place):
    engine = engine_of(*pair, max_prefill_tokens=10)
    original, calls = getattr(engine.target, place), []

    def failing(*args):
        calls.append(place)
        if len(calls) == 3:
            for tensor in engine.core.pool.tensors:  # what the step would have written
                tensor[:, :, [*engine.core.pool._free]] = float("nan")
            raise ValueError("a fault")
        return original(*args)

    monkeypatch.setattr(engine.target, place, failing)
    with pytest.raises(ValueError, match="a fault"):
        engine.generate(PROMPTS, PARAMS)
    assert_vacant(engine)
    assert results(engine.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("draft", [None, "model"])
def test_an_interrupt_forgets_all(pair, expected, monkeypatch, draft):
    """It may have come in the middle of a change of the books."""
    engine = engine_of(pair[0], draft and pair[1])
    engine.generate(PROMPTS, PARAMS)
    pools = [pool for pool in (engine.core.pool, getattr(engine.drafter, "pool", None)) if pool is not None]
    for pool in pools:
        original = pool.prefixes.take

        def interrupted(page, original=original):
            original(page)
            raise KeyboardInterrupt

        monkeypatch.setattr(pool.prefixes, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    outputs = engine.generate(PROMPTS, PARAMS)
    assert outputs[0].num_cached_tokens == 0
    assert results(outputs) == expected


def scaled(model, way):
    """Change the weights of a model in place: in a way that PyTorch counts, or not."""
    weight = model.model.layers[0].mlp.up_proj.weight
    if way == "counted":
        with torch.no_grad():
            weight.mul_(1.5)
    elif way == "data":
        for parameter in model.parameters():
            parameter.data.mul_(1.25)
    elif way == "loaded":
        model.load_state_dict({name: 1.25 * tensor for name, tensor in model.state_dict().items()})
    else:
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(1.5 * weight.detach())


@pytest.mark.parametrize(
    ("way", "config"), [("counted", {}), ("data", {}), ("loaded", {}), ("replaced", {"enforce_eager": True})]
)
def test_other_weights_find_nothing(way, config):
    target = tiny_model("llama")
    engine = engine_of(target, None, **config)
    before = results(engine.generate(PROMPTS[:2], PARAMS[:2]))
    scaled(target, way)
    outputs = engine.generate(PROMPTS[:1], PARAMS[:1])
    assert cached(outputs) == [0]
    fresh = sd.Engine(target, None, page_size=PAGE, **config)
    after = results(fresh.generate(PROMPTS[:2], PARAMS[:2]))
    assert results(outputs) == after[:1] != before[:1]
    assert results(engine.generate(PROMPTS[:2], PARAMS[:2])) == after


def test_entries_of_other_weights_would_change_outputs(monkeypatch):
    """Else the test above would show nothing."""
    monkeypatch.setattr(RaggedModel, "has_changed", lambda model: False)
    target = tiny_model("llama")
    engine = engine_of(target, None)
    engine.generate(PROMPTS[:1], PARAMS[:1])
    scaled(target, "counted")
    outputs = engine.generate(PROMPTS[:1], PARAMS[:1])
    assert outputs[0].num_cached_tokens > 0
    assert results(outputs) != results(sd.Engine(target, None).generate(PROMPTS[:1], PARAMS[:1]))


def test_a_draft_model_forgets_with_its_own_weights():
    target = tiny_model("llama")
    draft = truncated_copy(target, 2)
    engine = engine_of(target, draft)
    engine.generate([PREFIX], GREEDY)
    known = dict(engine.drafter.pool.prefixes.page_of)
    scaled(draft, "counted")
    outputs = engine.generate([PREFIX], GREEDY)
    assert cached(outputs) == [48], "the target's entries are still right"
    request = request_of(engine, PREFIX)
    fresh = engine_of(target, draft, prefix_cache=False)
    alone = request_of(fresh, PREFIX)
    for each, own in ((engine, request), (fresh, alone)):
        each.core.add(own)
        for _ in range(2):  # it drafts after the first token
            each.core.step()
    found = [entries(e.drafter.pool, r, 49) for e, r in ((engine, request), (fresh, alone))]
    assert same_bits(*found)
    assert known.keys() & engine.drafter.pool.prefixes.page_of.keys()


def test_a_caller_can_reset_it_while_requests_run(pair):
    engine = engine_of(*pair)
    running = request_of(engine, PREFIX)
    engine.core.add(running)
    engine.core.step()
    engine.reset_prefix_cache()
    later = [request_of(engine, PREFIX, index=i) for i in range(2)]
    for request in later:
        engine.core.add(request)
    engine.core.step()
    assert [request.num_cached_tokens for request in later] == [0, 48], "they share with each other alone"
    while engine.core.has_work:
        engine.core.step()
    assert running.token_ids == later[0].token_ids == later[1].token_ids
    assert_vacant(engine)


@pytest.mark.parametrize("place", grid(["prefill", "verify_step", "commit"], keep=["commit"]))
def test_a_step_without_memory_begins_anew_and_writes_no_shared_page(pair, expected, tmp_path, monkeypatch, place):
    """A drafter with taps needs hidden states again, of pages that others have as well."""
    eagle3.write_checkpoint(tmp_path, pair[0])
    engine = engine_of(pair[0], f"eagle3:{tmp_path}", num_draft_tokens=3)
    engine.generate(PROMPTS, PARAMS)
    owner = engine.drafter if place == "commit" else engine.target
    name = "forward" if place == "prefill" else place
    original, calls = getattr(owner, name), []
    bits = {}

    def failing(*args):
        result = original(*args)
        for key, page in engine.core.pool.prefixes.page_of.items():
            written = [tensor[:, :, page].clone() for tensor in engine.core.pool.tensors]
            assert same_bits(bits.setdefault((key, page), written), written)
        calls.append(name)
        if len(calls) in (1, 3):
            raise ERRORS["gpu"]
        return result

    monkeypatch.setattr(owner, name, failing)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert results(outputs) == expected
    assert engine.last_run.num_out_of_memory == 2
    assert_vacant(engine)


def test_a_drafter_with_taps_that_knows_no_prefixes_gets_every_row(pair):
    drafter = Recording((2, "final"), lambda sequence, limit: [])
    engine = engine_of(pair[0], drafter)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, PARAMS)
        assert cached(outputs) == [0] * len(PROMPTS)
    assert "hidden states" in engine.describe()["prefix_cache"]["why_off"]


def test_recurrent_targets_find_nothing_and_say_why():
    engine = engine_of(recurrent_model("qwen3.5"), "ngram")
    for _ in range(2):
        (output,) = engine.generate([[5] * 20], GREEDY)
    assert output.num_cached_tokens == 0
    assert "recurrent" in engine.describe()["prefix_cache"]["why_off"]


def test_a_recurrent_draft_model_computes_whole_prompts():
    target = LlamaForCausalLM(LlamaConfig(**{**TINY_GROUPED, "vocab_size": 64})).eval()
    prompt = [token % 64 for token in PREFIX]
    expected = results(sd.Engine(target, None).generate([prompt], PARAMS[:1]))
    engine = engine_of(target, recurrent_model("qwen3.5"))
    for _ in range(2):
        outputs = engine.generate([prompt], PARAMS[:1])
        assert results(outputs) == expected
    assert cached(outputs) == [48]


def test_it_is_off_unless_asked_for_and_checks_its_value(pair):
    engine = sd.Engine(pair[0], None, page_size=PAGE)
    for _ in range(2):
        assert cached(engine.generate([PREFIX], GREEDY)) == [0]
    found = engine.describe()["prefix_cache"]
    assert found == {"is_on": False, "why_off": "prefix_cache is not set", "num_pages": 0, "num_evicted_pages": 0}
    assert sd.EngineConfig().for_service().prefix_cache is True
    assert sd.EngineConfig(prefix_cache=False).for_service().prefix_cache is False
    with pytest.raises(ConfigError, match="prefix_cache='yes': expected True, False or None"):
        sd.EngineConfig(prefix_cache="yes")
