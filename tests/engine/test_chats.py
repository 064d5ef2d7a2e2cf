"""Chats: a turn takes the pages of the turns before it, of prompts and answers, in the target and in its drafter."""

from __future__ import annotations

import re
from functools import partial

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_fast as sd
from specdec_fast.drafters.shared.tapped import TappedDrafter
from specdec_fast.request.page_keys import PageKeys
from support import clover, dflash, eagle3, medusa, specblock
from support.grids import grid
from support.models import MAX_POSITIONS, TINY_GROUPED, VOCAB_SIZE, tiny_model, truncated_copy
from support.prefixes import PAGE, assert_vacant, engine_of, entries, request_of, results, same_bits
from support.recording_drafter import Recording

CHECKPOINTS = {
    "eagle3": partial(eagle3.write_checkpoint, draft_vocab_size=60),
    "dflash": dflash.write_checkpoint,
    "specblock": specblock.write_checkpoint,
    "clover": lambda folder, _: clover.write_clover(folder, clover.random_clover(), VOCAB_SIZE),
    "medusa": lambda folder, target: medusa.write_heads(
        folder, medusa.named(medusa.random_heads(VOCAB_SIZE, target.config.hidden_size), "safetensors")
    ),
}
WITH_PAGES = ["model", "eagle3", "dflash", "specblock", "clover"]
TARGET = tiny_model("llama")


@pytest.fixture
def draft_of(tmp_path):
    """Return a function from the name of a drafter to what an engine takes as ``draft``."""

    def make(name):
        if name in CHECKPOINTS:
            CHECKPOINTS[name](tmp_path, TARGET)
            return f"{name}:{tmp_path}"
        return {"none": None, "model": truncated_copy(TARGET, 2), "target": TARGET}.get(name, name)

    return make


def user_text(chat, turn):
    return [(11 * chat + 7 * turn + 3 * i) % VOCAB_SIZE for i in range(5 + chat)]


def full_pages(num_tokens):
    """The positions of full pages of a text, whose newest token has no entry."""
    return (num_tokens - 1) // PAGE * PAGE


def params_of(chat, turn, **settings):
    return sd.SamplingParams(max_new_tokens=7 + chat + 2 * turn, ignore_eos=True, **settings)


def chats_with(engine, num_turns=3, num_chats=4):
    """Hold chats at once, turn by turn; yield each turn's prompts, outputs, and the texts before it."""
    texts = [[] for _ in range(num_chats)]
    for turn in range(num_turns):
        prompts = [text + user_text(chat, turn) for chat, text in enumerate(texts)]
        params = [params_of(chat, turn) for chat in range(num_chats)]
        outputs = engine.generate(prompts, params)
        yield prompts, outputs, texts
        texts = [prompt + output.raise_for_error().token_ids for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize("config", [{}, pytest.param({"max_prefill_tokens": 9}, marks=pytest.mark.grid)], ids=str)
@pytest.mark.parametrize(
    "name", grid(["none", "ngram", "self", "medusa", *WITH_PAGES], keep=["none", "self", "model", "eagle3"])
)
def test_a_turn_computes_its_own_text_alone(draft_of, name, config):
    """But for the rest of a page, and the newest token of the turn before. Of the drafter's pages none is missing."""
    engine = engine_of(TARGET, draft_of(name), num_draft_tokens=3, **config)
    plain = sd.Engine(TARGET, None, max_batch_size=1)
    for prompts, outputs, texts in chats_with(engine):
        assert [output.num_cached_tokens for output in outputs] == [full_pages(len(text) or 1) for text in texts]
        params = [sd.SamplingParams(max_new_tokens=len(output.token_ids), ignore_eos=True) for output in outputs]
        assert results(outputs) == results(plain.generate(prompts, params))
        pool = getattr(engine.drafter, "pool", None)
        if pool is not None and pool.prefixes is not None:
            assert len(pool.prefixes.key_of) == len(engine.core.pool.prefixes.key_of)
        assert_vacant(engine)


@pytest.mark.parametrize("name", grid(["target", *WITH_PAGES], keep=["target", "eagle3", "specblock"]))
@pytest.mark.parametrize("num_new", grid([10, 11, 12, 13], keep=[11]))
def test_kept_entries_of_an_answer_have_the_bits_of_computed_ones(draft_of, name, num_new):
    """The target as its own draft has every draft token accepted: a stop id then cuts the last step's tokens."""
    draft = draft_of(name)
    prompt = user_text(3, 0)
    stop = {}
    if name == "target":
        (answer,) = sd.Engine(TARGET, None).generate([prompt], params_of(0, num_new))
        stop = {"stop_token_ids": answer.token_ids[num_new : num_new + 1]}
    found = []
    for is_warm in (True, False):
        engine = engine_of(TARGET, draft, num_draft_tokens=3)
        if is_warm:
            params = sd.SamplingParams(max_new_tokens=40 if stop else num_new, ignore_eos=True, **stop)
            (first,) = engine.generate([prompt], params)
            text = prompt + first.raise_for_error().token_ids
        request = request_of(engine, [*text, 5, 6])
        engine.core.add(request)
        while not request.is_admitted:
            engine.core.step()
        assert request.num_cached_tokens == (full_pages(len(text)) if is_warm else 0)
        pool = engine.drafter.pool
        num_known = engine.drafter.draft_kv_length[request] if name in ("target", "model") else full_pages(len(text))
        assert num_known >= full_pages(len(text))
        rows_each = pool.page_size // PAGE
        found.append(
            [
                *entries(engine.core.pool, request, full_pages(len(text))),
                *entries(pool, request, rows_each * full_pages(len(text))),
            ]
        )
    assert same_bits(*found)


def test_a_drafter_learns_the_last_step_of_what_has_ended():
    """Rows of the tokens that were committed, after a stop within a step; nothing where no pages are kept."""
    expected = sd.Engine(TARGET, None).generate([user_text(3, 0)], params_of(3, 3))[0].token_ids
    learnt = []

    class Learning(Recording):
        knows_prefixes = True

        def known_positions(self, sequence):
            return 0

        def commit_ended(self, sequences, result):
            learnt.extend(zip(sequences, map(len, result.accepted_rows), strict=True))
            for sequence, rows in zip(sequences, result.accepted_rows, strict=True):
                self.seen[sequence] += result.hidden_states[list(rows)]
                assert len(self.seen[sequence]) == sequence.length - 1

    def script(sequence, limit):
        start = sequence.length - sequence.prompt_length
        return expected[start : start + limit]

    params = sd.SamplingParams(max_new_tokens=12, ignore_eos=True, stop_token_ids=[expected[6]])
    num_expected = expected.index(expected[6]) + 1
    for is_on in (True, False):
        engine = engine_of(TARGET, Learning(("final",), script), num_draft_tokens=4, prefix_cache=is_on)
        (output,) = engine.generate([user_text(3, 0)], params)
        assert output.token_ids == expected[:num_expected]
        assert [count for _, count in learnt] == [(num_expected - 2) % 5 + 1] * is_on
        learnt.clear()


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), ValueError("a fault")], ids=lambda error: type(error).__name__
)
def test_an_end_that_runs_out_of_memory_is_an_end(draft_of, monkeypatch, error):
    """Nothing needs what a drafter keeps; any other error of it is a fault, as in ``commit``."""

    def failing(*_):
        raise error

    monkeypatch.setattr(TappedDrafter, "commit_ended", failing)
    engine = engine_of(TARGET, draft_of("eagle3"), num_draft_tokens=3)
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="a fault"):
            engine.generate([user_text(0, 0)], params_of(0, 0))
    else:
        (output,) = engine.generate([user_text(0, 0)], params_of(0, 0))
        assert output.raise_for_error().finish_reason == "length"
        assert engine.last_run.num_out_of_memory == 0
    assert_vacant(engine)


SESSION = 4 * PAGE  # positions of a first turn: ten tokens, and seven new ones, of which the newest has no entry


def turn_of(engine, text, num_user, num_new=7):
    """Hold a turn of a chat; return its text so far, and how many of its tokens were found."""
    user = [(len(text) + 5 * i + text[0]) % VOCAB_SIZE for i in range(num_user)]
    (output,) = engine.generate([[*text, *user]], sd.SamplingParams(max_new_tokens=num_new, ignore_eos=True))
    return [*text, *user, *output.raise_for_error().token_ids], output.num_cached_tokens


@pytest.mark.parametrize("name", grid(["none", "model", "eagle3", "dflash"], keep=["none", "eagle3"]))
def test_the_chat_that_was_used_least_recently_loses_its_pages_first(draft_of, name):
    """Not the one that began first, and the end of its text before the beginning."""
    engine = engine_of(TARGET, draft_of(name), memory_bytes=10**8, kv_cache_tokens=3 * SESSION)
    first, second, third = (turn_of(engine, [chat], 9)[0] for chat in range(3))
    assert num_evicted(engine) == 0
    first, num_found = turn_of(engine, first, 1, 3)  # a page more, which is the second chat's last
    assert (num_found, num_evicted(engine)) == (SESSION, 1)
    fourth, _ = turn_of(engine, [3], 9)  # three pages of the second chat, one of the third
    assert num_evicted(engine) == 5
    found = [num_kept(engine, text) for text in (fourth, first, third, second)]
    assert found == [SESSION, SESSION + PAGE, SESSION - PAGE, 0]
    assert turn_of(engine, third, 2, 2)[1] == SESSION - PAGE


def num_evicted(engine):
    return engine.describe()["prefix_cache"]["num_evicted_pages"]


def num_kept(engine, text):
    """How many positions of a text are kept, by the target and, as many, by the drafter."""
    keys = PageKeys(PAGE, engine.core.prefixes._root).first(text, (len(text) - 1) // PAGE)
    found = [key in engine.core.pool.prefixes.page_of for key in keys]
    assert found == sorted(found, reverse=True), "a page is kept, and not those before it"
    if (pool := getattr(engine.drafter, "pool", None)) is not None:
        known = {key if isinstance(key, bytes) else key[0] for key in pool.prefixes.page_of}
        assert [key in known for key in keys] == found
    return PAGE * sum(found)


@pytest.mark.parametrize("name", grid(["none", "self", "model", "eagle3", "dflash"], keep=["none", "model"]))
def test_more_chats_than_a_budget_holds(draft_of, monkeypatch, name):
    """Outputs are those without a budget; pages are given up, none of a running request, and memory stays planned."""
    settings = {"max_batch_size": 2, "window_size": 2, "num_draft_tokens": 3}
    roomy = engine_of(TARGET, draft_of(name), memory_bytes=10**8, kv_cache_tokens=2 * MAX_POSITIONS, **settings)
    budget = sum(roomy.memory_plan.terms.values())
    engine = engine_of(TARGET, draft_of(name), memory_bytes=budget, **settings)
    assert (engine.config.kv_cache_tokens, engine.config.max_batch_size) == (2 * MAX_POSITIONS, 2)
    core = engine.core
    step = core.step
    pools = set()

    def checked_step():
        outputs = step()
        for pool in (core.pool, getattr(engine.drafter, "pool", None)):
            if pool is not None:
                pools.add(pool)
                held = {page for owner in pool._pages_of for page in pool.block_table(owner)}
                assert not held & {*pool.prefixes.idle}
        return outputs

    monkeypatch.setattr(core, "step", checked_step)
    free = engine_of(TARGET, None, prefix_cache=False)
    turns = zip(chats_with(engine, num_chats=8), chats_with(free, num_chats=8), strict=True)
    for (prompts, outputs, _), (_, expected, _) in turns:
        last = [*prompts[-1], *outputs[-1].token_ids]
        assert results(outputs) == results(expected)
    assert num_evicted(engine) > 0
    assert turn_of(engine, last, 2, 2)[1] == full_pages(len(last)), "what was used last is kept"
    terms = engine.memory_plan.terms
    planned = terms["target KV"] + terms.get("drafter KV", 0)
    assert sum(tensor.nbytes for pool in pools for tensor in pool.tensors) == planned
    assert sum(terms.values()) <= budget


def test_what_no_running_request_can_use_keeps_chats():
    """A budget with room for more positions than two sequences can have, which is their limit without a cache."""
    settings = {"memory_bytes": 10**7, "max_batch_size": 2, "window_size": 2}
    sizes = [engine_of(TARGET, None, prefix_cache=is_on, **settings).config.kv_cache_tokens for is_on in (False, True)]
    assert sizes[0] == 2 * MAX_POSITIONS
    engine = engine_of(TARGET, None, **settings)
    planned = sum(engine.memory_plan.terms.values())
    page = PAGE * engine.target.layout.bytes_per_token
    assert 10**7 - page < planned <= 10**7
    assert sizes[1] == engine.config.kv_cache_tokens > 10 * sizes[0]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "model"])
def test_a_chat_that_outgrows_the_budget_names_the_bytes_that_it_lacks(drafts):
    """One position more than the pool has; with so many bytes more, and only then, it is served."""
    target = LlamaForCausalLM(LlamaConfig(**{**TINY_GROUPED, "max_position_embeddings": 4096})).eval()
    settings = {"max_batch_size": 1, "window_size": 1, "num_draft_tokens": 1, "max_prefill_tokens": 1}
    draft = truncated_copy(target, 2) if drafts else None
    make = partial(engine_of, target, draft, **settings)
    budget = 10**6
    engine = make(memory_bytes=budget)
    num_positions = engine.config.kv_cache_tokens
    prompt = [1] * (num_positions - 3)
    fits, too_long = (
        request_of(engine, prompt, sd.SamplingParams(max_new_tokens=num_new, ignore_eos=True)) for num_new in (4, 5)
    )
    engine.core.expect_room(fits)
    with pytest.raises(sd.KVCacheTooSmallError, match=r"raise memory_bytes by (\d+) or more") as refused:
        engine.core.expect_room(too_long)
    missing = int(re.search(r"by (\d+) or more", str(refused.value))[1])
    make(memory_bytes=budget + missing).core.expect_room(too_long)
    page = PAGE * (engine.target.layout.bytes_per_token + engine.drafter.bytes_per_token)
    assert missing == page
    with pytest.raises(sd.KVCacheTooSmallError):
        make(memory_bytes=sum(engine.memory_plan.terms.values()) + page - 1).core.expect_room(too_long)
