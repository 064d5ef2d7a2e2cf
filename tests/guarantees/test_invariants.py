"""Random schedules under the invariant checks, and one deliberately broken step per invariant that they must catch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specdec_fast as sd
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner import eager as eager_runner
from support.invariants import CheckedEngine, patched
from support.models import VOCAB_SIZE, tiny_model, truncated_copy


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("llama")
    return target, truncated_copy(target, 2)


def checked(pair, draft="model", poison=True, **config):
    target, draft_model = pair
    engine = sd.Engine(target, draft_model if draft == "model" else draft, page_size=4, **config)
    return CheckedEngine(engine, poison)


def random_prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


schedules = st.fixed_dictionaries(
    {
        "requests": st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14)), min_size=1, max_size=7),
        "method": st.sampled_from(["eqspec", "exspec"]),
        "draft": st.sampled_from(["model", "ngram", "ngram-trie", "self", "suffix"]),
        "max_batch_size": st.integers(1, 4),
        "num_draft_tokens": st.one_of(st.integers(0, 6), st.just("auto")),
        "max_wait_steps": st.integers(0, 3),
        "stop_id": st.integers(0, VOCAB_SIZE - 1),
        "spare_pages": st.integers(0, 8),
        "enforce_eager": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


def assert_invariants_hold(pair, schedule):
    requests = schedule["requests"]
    largest = max(prompt + new for prompt, new in requests)
    engine = checked(
        pair,
        schedule["draft"],
        method=schedule["method"],
        max_batch_size=schedule["max_batch_size"],
        num_draft_tokens=schedule["num_draft_tokens"],
        max_wait_steps=schedule["max_wait_steps"],
        enforce_eager=schedule["enforce_eager"],
        kv_cache_tokens=largest + 4 * schedule["spare_pages"],  # from one sequence at a time upwards
    )
    params = [sd.SamplingParams(max_new_tokens=new, stop_token_ids=(schedule["stop_id"],)) for _, new in requests]
    outputs = engine.generate(random_prompts([n for n, _ in requests], schedule["seed"]), params)
    assert [output.index for output in outputs] == list(range(len(requests)))
    assert all(output.error is None for output in outputs)
    assert engine.num_checked == sum(output.stats.num_steps for output in outputs)
    assert engine.engine.core.pool.num_free_pages == engine.engine.core.pool.num_pages


@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(schedule=schedules)
def test_invariants_hold_over_random_schedules(pair, schedule):
    assert_invariants_hold(pair, schedule)


@pytest.mark.grid
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(schedule=schedules)
def test_invariants_hold_over_random_schedules_at_length(pair, schedule):
    assert_invariants_hold(pair, schedule)


def run(engine):
    engine.generate(random_prompts([9, 5, 14]), sd.SamplingParams(max_new_tokens=20))


def stale_position(original, pool, rows, token_ids, **others):
    """I1: a sequence's rows are placed one position too early."""
    batch = original(pool, rows, token_ids, **others)
    return dataclasses.replace(batch, positions=(batch.positions - 1).clamp_min(0))


def unrejected_entry(original, pool, rows, token_ids, **others):
    """I2: the entry of the last committed token is written elsewhere, so that of a rejected draft token stays."""
    batch = original(pool, rows, token_ids, **others)
    first = [int(i) for i, span in zip(batch.cu_seqlens_q, rows, strict=False) if span.count > 1 and span.start > 0]
    batch.slot_mapping[first] = 0  # the scratch page
    return batch


def uncomputed_entry(original, drafter, sequences, result):
    """I2: after a full acceptance the last draft token counts as cached, though the draft model never got it."""
    for sequence in sequences:
        drafter.draft_kv_length[sequence] = sequence.length - 1


def no_lag(original, sequence, num_draft, num_accepted, emission, *rest):
    """I3: the newest token counts as cached."""
    tokens = original(sequence, num_draft, num_accepted, emission, *rest)
    sequence.target_kv_length += 1
    return tokens


def no_rollback(original, drafter, sequences, result):
    """I3: the draft model keeps the entries of rejected tokens."""


def shared_page(original, pool, owner):
    """I4: pages are returned while another owner still holds them."""
    pool._free.append(next(iter(pool._pages_of.values()))[0])
    original(pool, owner)


def lost_bonus(original, sequence, num_draft, num_accepted, emission, *rest):
    """I5: nothing is emitted after a full acceptance but the drafts themselves."""
    if num_accepted == num_draft and num_accepted:
        emission = emission[:-1]
    return original(sequence, num_draft, num_accepted, emission, *rest)


def draft_bonus_token(original, sequence, num_draft, num_accepted, emission, *rest):
    """I5: another token than the target's stands after the accepted ones."""
    other = (emission[-1] + 1) % VOCAB_SIZE
    return original(sequence, num_draft, num_accepted, [*emission[:-1], other], *rest)


def neighbours_pages(original, pool, rows, token_ids, **others):
    """I6: a sequence reads the KV of the one beside it."""
    batch = original(pool, rows, token_ids, **others)
    own = len(batch.last_rows)  # padding is on the scratch page, which has no owner
    tables = torch.cat([batch.block_table[:own].roll(1, dims=0), batch.block_table[own:]])
    return dataclasses.replace(batch, block_table=tables)


def earlier_span(original, pool, rows, ahead=None):
    """I1: the same, where a program lays out the rows."""
    spans = original(pool, rows, ahead)
    if ahead is not None:  # of a draft model
        return spans
    return spans._replace(spans=[(place, max(0, start - 1), *others) for place, start, *others in spans.spans])


def neighbours_place(original, pool, rows, ahead=None):
    """I6: the same, where a program lays out the rows."""
    spans = original(pool, rows, ahead)
    if ahead is not None:  # of a draft model
        return spans
    places = [place for place, *_ in spans.spans]
    moved = [*places[1:], places[0]]
    return spans._replace(spans=[(place, *span[1:]) for place, span in zip(moved, spans.spans, strict=True)])


# K 2, so that full acceptances occur; no poison, so that stale entries look as they do in service.
BROKEN = {"max_batch_size": 3, "method": "eqspec", "num_draft_tokens": 2, "poison": False}


@pytest.fixture(scope="module")
def holding(pair):
    """Check once that the same runs break nothing by themselves."""
    for enforce_eager in (False, True):
        run(checked(pair, **BROKEN, enforce_eager=enforce_eager))


@pytest.mark.parametrize(
    ("owner", "method", "mutation", "invariant"),
    [
        (eager_runner, "lay_out", stale_position, "I1"),
        (eager_runner, "lay_out", unrejected_entry, "I2"),
        (ModelDrafter, "commit", uncomputed_entry, "I2"),
        (Sequence, "append_emission", no_lag, "I3"),
        (ModelDrafter, "commit", no_rollback, "I3"),
        (PagePool, "free", shared_page, "I4"),
        (Sequence, "append_emission", lost_bonus, "I5"),
        (Sequence, "append_emission", draft_bonus_token, "I5"),
        (eager_runner, "lay_out", neighbours_pages, "I6"),
        (PagePool, "spans", earlier_span, "I1"),
        (PagePool, "spans", neighbours_place, "I6"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_step_is_caught(pair, holding, owner, method, mutation, invariant):
    broken = checked(pair, **BROKEN, enforce_eager=method == "lay_out")  # a program lays out its rows by itself
    with patched(owner, method, mutation), pytest.raises(AssertionError, match=invariant):
        run(broken)


def test_kv_beyond_the_context_is_poisoned_and_never_read(pair):
    """The negative control of the poison: reading one entry too many brings a NaN into the logits."""
    target, _ = pair
    engine = CheckedEngine(sd.Engine(target, "ngram", page_size=64, enforce_eager=True))
    inner = engine._forward

    def one_too_many(batch, *rest):
        longer = {"seqused_k": batch.seqused_k + 1, "max_seqlen_k": batch.max_seqlen_k + 1}
        return inner(dataclasses.replace(batch, **longer), *rest)

    engine._forward = one_too_many
    with pytest.raises(AssertionError, match="hold a NaN"):
        engine.generate(random_prompts([9, 6]), sd.SamplingParams(max_new_tokens=8))


@pytest.mark.parametrize("num_draft_tokens", [0, 1])
def test_invariants_at_the_smallest_k(pair, num_draft_tokens):
    """0 decodes plainly, with no draft model to feed."""
    run(checked(pair, num_draft_tokens=num_draft_tokens, max_batch_size=2))
