"""Pages that others computed change no bit: outputs and KV entries are those of an engine that computes every row."""

from __future__ import annotations

from array import array
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specdec_fast as sd
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.kv_cache.prefix_pages import PrefixPages
from specdec_fast.request.page_keys import PageKeys
from specdec_fast.request.sequence import Sequence
from support import clover, dflash, eagle3, medusa, specblock
from support.grids import each_value_once, grid
from support.invariants import CheckedEngine, patched
from support.models import VOCAB_SIZE, WITH_CHUNKS, tiny_model, truncated_copy
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


def write_clover(folder, target):
    clover.write_clover(folder, clover.random_clover(), VOCAB_SIZE)


def write_medusa(folder, target):
    hidden = target.config.hidden_size
    medusa.write_heads(folder, medusa.named(medusa.random_heads(VOCAB_SIZE, hidden), "safetensors"))


CHECKPOINTS = {
    "eagle3": partial(eagle3.write_checkpoint, draft_vocab_size=60),
    "dflash": dflash.write_checkpoint,
    "specblock": specblock.write_checkpoint,
    "clover": write_clover,
    "medusa": write_medusa,
}
DRAFTS = ["none", "model", "ngram", "ngram-trie", "self", "suffix", *CHECKPOINTS]
CONFIGS = {
    "window": {},
    "chunks": {"max_prefill_tokens": 7, "kv_cache_tokens": 72},
    "batch": {"method": "eqspec", "max_batch_size": 3, "num_draft_tokens": 2},
    "auto": {"num_draft_tokens": "auto", "max_batch_size": 8},
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """A function from a name of ``DRAFTS`` and a target to what an engine takes as ``draft``."""

    def draft_of(name, target):
        if name not in CHECKPOINTS:
            return {"none": None, "model": truncated_copy(target, 2)}.get(name, name)
        folder = tmp_path_factory.mktemp(name)
        CHECKPOINTS[name](folder, target)
        return f"{name}:{folder}"

    return draft_of


@pytest.fixture(scope="module")
def expected():
    """A function from dtype and settings of the weights to what plain decoding makes of the requests."""
    found = {}

    def expected_of(dtype, **config):
        key = (dtype, *config.items())
        if key not in found:
            found[key] = plain_results(tiny_model("llama").to(dtype), **config)
        return found[key]

    return expected_of


@each_value_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", grid(DRAFTS, keep=["none", "model", "self", "eagle3", "dflash", "medusa"]))
def test_outputs_are_those_of_plain_decoding(drafts, expected, name, config, dtype):
    """Greedy, sampled and penalised requests with prefixes in common: at first in one call, then in another one."""
    target = tiny_model("llama").to(dtype)
    engine = engine_of(target, drafts(name, target), **config)
    for least in (100, 150):  # of the 278 prompt tokens
        outputs = engine.generate(PROMPTS, PARAMS)
        assert results(outputs) == expected(dtype)
        assert engine.last_run.num_cached_tokens == sum(output.num_cached_tokens for output in outputs) >= least
        assert_vacant(engine)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization": "int4"},
        pytest.param({"quantization": "int8-a8"}, marks=pytest.mark.grid),
        pytest.param({"enforce_eager": True}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_outputs_with_other_weights_and_without_a_program(drafts, expected, config):
    target = partial(tiny_model, "llama")
    engine = engine_of(target(), drafts("model", target()), **config)
    for _ in range(2):
        assert results(engine.generate(PROMPTS, PARAMS)) == expected(torch.float32, **config)
    assert engine.last_run.num_cached_tokens >= 150


@pytest.mark.parametrize("architecture", grid([*WITH_CHUNKS], ["mistral-window"]))
def test_outputs_of_other_architectures(architecture):
    """Windows, chunks of positions and layers of several shapes read entries of kept pages like their own."""
    target = tiny_model(architecture)
    expected = plain_results(target)
    engine = engine_of(target, "ngram")
    for _ in range(2):
        assert results(engine.generate(PROMPTS, PARAMS)) == expected
    assert engine.last_run.num_cached_tokens >= 150


@pytest.mark.parametrize(
    "tree",
    [pytest.param(12, marks=pytest.mark.grid), [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]],
    ids=["growing", "static"],
)
def test_outputs_with_trees(drafts, expected, tree):
    target = tiny_model("llama")
    engine = engine_of(target, drafts("eagle3", target), draft_tree=tree)
    for _ in range(2):
        assert results(engine.generate(PROMPTS, PARAMS)) == expected(torch.float32)
    assert engine.last_run.num_cached_tokens >= 150
    assert engine.last_run.decoding.num_draft_tokens > 5 * engine.last_run.decoding.num_drafts


@pytest.mark.parametrize(
    "name", grid(["none", "model", "eagle3", "dflash", "specblock", "clover"], ["model", "eagle3", "specblock"])
)
def test_entries_have_the_same_bits(drafts, name):
    """Of a prompt and an answer: found in part, or computed whole."""
    target = tiny_model("llama")
    draft = drafts(name, target)
    found = []
    for is_warm in (True, False):
        engine = engine_of(target, draft, num_draft_tokens=3)
        if is_warm:
            engine.generate([[*PREFIX[:39], 1], [*PREFIX[:24], 4, 4]], sd.SamplingParams(max_new_tokens=6))
        request = request_of(engine, PREFIX)
        engine.core.add(request)
        while request.length < 60:
            engine.core.step()
        assert request.num_cached_tokens == (36 if is_warm else 0)
        bits = [entries(engine.core.pool, request, request.target_kv_length)]
        pool = getattr(engine.drafter, "pool", None)
        if pool is not None:
            bits.append(entries(pool, request, pool.page_size * (request.length // PAGE - 1)))
        found.append((request.token_ids, bits))
    assert found[0][0] == found[1][0]
    assert all(same_bits(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


TEXTS = [*PREFIX[:9], 1], [*PREFIX[:12]], [*PREFIX[:13]], [*PREFIX[:8], 2, 2], [*PREFIX[:22]], [3], [3] * 9, PREFIX[:17]
schedules = st.fixed_dictionaries(
    {
        "calls": st.lists(
            st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(1, 12)), min_size=1, max_size=6),
            min_size=2,
            max_size=3,
        ),
        "method": st.sampled_from(["eqspec", "exspec"]),
        "draft": st.sampled_from(["none", "model", "ngram-trie", "self", "eagle3"]),
        "max_batch_size": st.integers(1, 5),
        "num_draft_tokens": st.integers(0, 5),
        "max_prefill_tokens": st.sampled_from([None, None, 3, 11]),
        "spare_pages": st.integers(0, 10),
        "page_size": st.sampled_from([2, 4]),
    }
)
PAIR = tiny_model("llama"), truncated_copy(tiny_model("llama"), 2)
EXPECTED: dict = {}


def assert_invariants_hold(drafts, schedule):
    """Every step leaves every kept page as it was, and no step reads what is neither kept nor committed."""
    options = dict(schedule)
    calls = options.pop("calls")
    size = options["page_size"]
    largest = max(len(text) + new for call in calls for text, new in call)
    tokens = largest + size * options.pop("spare_pages")
    name = options.pop("draft")
    draft = PAIR[1] if name == "model" else drafts(name, PAIR[0])
    engine = CheckedEngine(engine_of(PAIR[0], draft, kv_cache_tokens=tokens, **options), expected=EXPECTED)
    for call in calls:
        params = [sd.SamplingParams(max_new_tokens=new, ignore_eos=True) for _, new in call]
        outputs = engine.generate([text for text, _ in call], params)
        assert all(output.error is None for output in outputs)
        assert_vacant(engine.engine)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules)
def test_invariants_hold_over_random_schedules(drafts, schedule):
    assert_invariants_hold(drafts, schedule)


@pytest.mark.grid
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules)
def test_invariants_hold_over_random_schedules_at_length(drafts, schedule):
    assert_invariants_hold(drafts, schedule)


def keys_of_pages_alone(original, keys, token_ids, num_pages):
    """Two pages with the same tokens have one key, whatever comes before them."""
    size = keys._page_size
    return [array("q", token_ids[i * size : (i + 1) * size]).tobytes() for i in range(num_pages)]


def incomplete_page(original, pool, owner, keys):
    """The page behind the last full one is kept as well: rows still to come are written to it."""
    pages, start = pool._pages_of[owner], pool.prefixes.num_kept[owner]
    original(pool, owner, keys)
    if len(keys) > start and len(keys) < len(pages):
        pool.prefixes.name(pages[len(keys)], (keys[-1], "next"))


def page_of_another(original, pool, owner, keys):
    """A page that somebody has is given to a sequence for its answer."""
    num_new = original(pool, owner, keys)
    kept = [page for page in pool.prefixes.key_of if page not in pool._pages_of[owner]]
    if kept and num_new:
        pool._free.append(kept[0])
    return num_new


def lost_owner(original, prefixes, page):
    """An owner is not counted, so a page is free while somebody has it."""
    original(prefixes, page)
    if prefixes.num_owners[page] == 2:
        prefixes.num_owners[page] = 1


def late_rollback(original, drafter, sequences, result):
    """The draft model keeps pages with the entries of rejected tokens."""
    drafter._keep(sequences)
    original(drafter, sequences, result)


def written_page(original, sequence, *args):
    """A step writes an entry of its sequence's first page."""
    tokens = original(sequence, *args)
    pool = WRITTEN[0].engine.core.pool
    pool.layers[0][0][pool.block_table(sequence)[0], 0] += 1
    return tokens


WRITTEN: list[CheckedEngine] = []


# Each is one way to share what must not be shared; some check must see it.
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (PageKeys, "first", keys_of_pages_alone),
        (PagePool, "keep", incomplete_page),
        (PagePool, "share", page_of_another),
        (PrefixPages, "take", lost_owner),
        (ModelDrafter, "commit", late_rollback),
        (Sequence, "append_emission", written_page),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_are_seen(owner, name, fault):
    engine = CheckedEngine(engine_of(*PAIR, num_draft_tokens=3), expected=EXPECTED)
    WRITTEN[:] = [engine]
    prompts = [[*PREFIX[:9], *PREFIX[:4], *PREFIX[4:9], 6], [*PREFIX[:21], 5], [*PREFIX[4:8], *PREFIX[4:9], 7]]
    params = sd.SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine.generate(prompts[:2], params)
    with patched(owner, name, fault), pytest.raises((AssertionError, RuntimeError)):
        engine.generate(3 * prompts, params)
