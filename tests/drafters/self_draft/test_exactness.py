"""With the target's own rounded weights as the drafter, outputs have the bits of plain decoding."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.drafters import DRAFTERS
from specdec_fast.engine.core import EngineCore
from support.grids import combinations, each_value_once
from support.memory_errors import ERRORS
from support.mixed_batch import PARAMS, PROMPTS, outputs_of
from support.models import tiny_model
from support.self_draft import Poisoned, UnroundedDrafter

SAMPLINGS = {
    "greedy": sd.SamplingParams(max_new_tokens=20, logprobs=True),
    "sampled": sd.SamplingParams(max_new_tokens=20, logprobs=True, temperature=0.8, top_k=40, top_p=0.95, seed=7),
}
SMALL_POOL = {"kv_cache_tokens": 64, "page_size": 4}


def results(outputs):
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def plain(prompt_ids):
    """A function from a dtype to the bundled target, and the outputs of plain decoding, one prompt at a time."""
    made = {}

    def of(dtype):
        if dtype not in made:
            target = AutoModelForCausalLM.from_pretrained(demo_pair() / "target", dtype=dtype).eval()
            alone = sd.Engine(target, None, max_batch_size=1, method="eqspec")
            found = {name: results(alone.generate(prompt_ids[:9], params)) for name, params in SAMPLINGS.items()}
            made[dtype] = target, found
        return made[dtype]

    return of


@combinations(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    batch_size=[1, 8],
    num_draft_tokens=[1, 7],
    method=["exspec", "eqspec"],
    sampling=list(SAMPLINGS),
    draft=["self", "self:int8"],
)
def test_outputs_are_those_of_plain_decoding(
    plain, prompt_ids, dtype, batch_size, num_draft_tokens, method, sampling, draft
):
    target, expected = plain(dtype)
    config = {"max_batch_size": batch_size, "num_draft_tokens": num_draft_tokens, "method": method}
    engine = sd.Engine(target, draft, **config)
    assert results(engine.generate(prompt_ids[:9], SAMPLINGS[sampling])) == expected[sampling]
    decoding = engine.last_run.decoding
    assert decoding.num_accepted_tokens > 0.6 * decoding.num_draft_tokens > 30


@combinations(method=["exspec", "eqspec"], sampling=list(SAMPLINGS), draft=["self", "self:int8"])
def test_k_by_measured_costs(plain, prompt_ids, method, sampling, draft):
    target, expected = plain(torch.bfloat16)
    engine = sd.Engine(target, draft, num_draft_tokens="auto", method=method, max_batch_size=3)
    assert results(engine.generate(prompt_ids[:9], SAMPLINGS[sampling])) == expected[sampling]


@each_value_once
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["program", "eager"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_of_the_unrounded_weights_are_all_accepted(plain, prompt_ids, monkeypatch, enforce_eager, sampling):
    """The draft rows attend over the target's entries and their own, and choose with the target's noise."""
    monkeypatch.setitem(DRAFTERS, "self", UnroundedDrafter)
    target, _ = plain(torch.float32)
    settings = {"max_batch_size": 3, "enforce_eager": enforce_eager}
    expected = results(sd.Engine(target, None, **settings).generate(prompt_ids[:5], SAMPLINGS[sampling]))
    engine = sd.Engine(target, "self", num_draft_tokens=4, **settings)
    assert results(engine.generate(prompt_ids[:5], SAMPLINGS[sampling])) == expected
    decoding = engine.last_run.decoding
    cut = sum(len(output[0]) < 20 for output in expected)  # a text that ends within a draft accepts no more of it
    assert decoding.num_draft_tokens > 50
    assert decoding.num_draft_tokens - decoding.num_accepted_tokens <= 4 * cut


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(tiny):
    return outputs_of(tiny, None)[0]


@combinations(
    draft=["self", "self:int8"],
    method=["exspec", "eqspec"],
    config=[{}, SMALL_POOL, {"max_prefill_tokens": 7}, {"num_draft_tokens": 1, "page_size": 1}],
    ahead=[False, True],
)
def test_no_entry_beyond_the_committed_ones_is_read(tiny, expected, monkeypatch, draft, method, config, ahead):
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    engine = sd.Engine(tiny, draft, **{"max_batch_size": 4, "method": method, **config})
    poisoned = Poisoned(engine)
    assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert poisoned.num_proposals > 5  # few where the copy of 8 bits has nearly every draft accepted
    assert bool(engine.last_run.num_preemptions) == (config == SMALL_POOL), "the small pool must preempt"
    assert engine.core.pool.is_vacant


def test_where_pytorch_runs_the_forwards(tiny):
    expected, _ = outputs_of(tiny, None, enforce_eager=True)
    engine = sd.Engine(tiny, "self", enforce_eager=True, max_batch_size=4, **SMALL_POOL)
    poisoned = Poisoned(engine)
    assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert poisoned.num_proposals > 5  # few where the copy of 8 bits has nearly every draft accepted
    assert engine.last_run.num_preemptions > 0


def test_the_poison_reaches_what_is_read(tiny):
    """The negative control: one entry less may stay, and the logits are NaN."""
    engine = sd.Engine(tiny, "self", max_batch_size=4)
    Poisoned(engine, committed=lambda sequence: max(0, sequence.target_kv_length - 1))
    outputs = engine.generate(PROMPTS[2:], PARAMS[2:])
    assert all(isinstance(output.error, sd.InvalidLogitsError) for output in outputs)


@each_value_once("place")
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("place", ["propose", "verify_step"])
def test_a_step_without_memory_is_repeated(tiny, expected, monkeypatch, place, error):
    """What a failed step has drafted stays in the pages, and nothing reads it."""
    engine = sd.Engine(tiny, "self", max_batch_size=4)
    Poisoned(engine)
    owner = engine.drafter if place == "propose" else engine.target
    original, num_calls = getattr(owner, place), 0

    def failing(*args):
        nonlocal num_calls
        num_calls += 1
        found = original(*args)
        if num_calls in (2, 3, 9):
            raise error
        return found

    monkeypatch.setattr(owner, place, failing)
    assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert engine.last_run.num_out_of_memory == 3
    assert engine.core.pool.is_vacant


def requests_for(engine):
    """Build a sequence of every prompt."""
    builder = engine.request_builder()
    options = sd.PromptOptions()
    return [builder.build(i, p, params, options, 3) for i, (p, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


def test_a_pool_that_grows(tiny, expected):
    """The drafter goes on with the larger pool, and keeps no other one alive."""
    engine = sd.Engine(tiny, "self", max_batch_size=4, page_size=4)
    Poisoned(engine)
    requests = requests_for(engine)
    sizes = set()
    for request in requests:
        engine.core.add(request)
        engine.core.step()
        sizes.add(engine.core.pool.num_pages)
        assert engine.drafter._pool is engine.core.pool
    while engine.core.has_work:
        engine.core.step()
    assert len(sizes) > 1
    assert [(request.emitted_ids, request.logprobs) for request in requests] == expected


def test_a_stream_that_is_closed_frees_its_pages(tiny, expected):
    engine = sd.Engine(tiny, "self", max_batch_size=4, **SMALL_POOL)
    Poisoned(engine)
    stream = engine.stream(PROMPTS, PARAMS)
    begun = [next(stream) for _ in range(5)]
    stream.close()
    assert all(chunk.token_ids for chunk in begun)
    assert engine.core.pool.is_vacant
    assert results(engine.generate(PROMPTS, PARAMS)) == expected, "on pages that hold what was left behind"


def test_a_cancelled_request_changes_no_other(tiny, expected):
    engine = sd.Engine(tiny, "self", max_batch_size=4, page_size=4)
    Poisoned(engine)
    requests = requests_for(engine)
    ids = [engine.core.add(request) for request in requests]
    engine.core.step()
    assert engine.core.cancel(ids[1])
    while engine.core.has_work:
        engine.core.step()
    for i, request in enumerate(requests):
        assert (request.emitted_ids, request.logprobs) == expected[i] or i == 1
    assert engine.core.pool.is_vacant


def test_requests_with_a_k_of_their_own(tiny, expected):
    params = [sd.SamplingParams(**{**vars(p), "num_draft_tokens": i % 4}) for i, p in enumerate(PARAMS)]
    engine = sd.Engine(tiny, "self", max_batch_size=4, num_draft_tokens=3)
    Poisoned(engine)
    outputs = engine.generate(PROMPTS, params)
    assert results(outputs) == expected
    assert [output.stats.num_draft_tokens > 0 for output in outputs] == [i % 4 > 0 for i in range(len(PARAMS))]
