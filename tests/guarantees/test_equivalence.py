"""The promise in fp32: every token equals ``transformers`` greedy ``generate()`` at batch 1.

Batch sizes: alone, small, and more than one window of prompts. K: 1 (the smallest block), 3, 5 (the default), 8 (a
block longer than most acceptances). Both implementations, both schedulers, both drafters.
"""

from __future__ import annotations

from itertools import product

import pytest

import specdec_fast as sd
from specdec_fast import oracle
from specdec_fast.equivalence.compare import transformers_greedy
from support.demo import MAX_NEW_TOKENS
from support.grids import combinations, each_value_once, grid
from support.models import VOCAB_SIZE, WITH_CHUNKS, tiny_model, torch, truncated_copy

BATCH_SIZES = (1, 2, 4, 8, 16)
NUM_DRAFT_TOKENS = (1, 3, 5, 8)
LIMITS = oracle.StopRule(MAX_NEW_TOKENS, frozenset([1]))


def run_engine(target, draft, prompts, **config):
    engine = sd.Engine(target, draft, **config)
    outputs = engine.generate(prompts, sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages
    return [output.token_ids for output in outputs]


def run_oracle(method, target, draft, prompts, batch_size, num_draft_tokens, limits=LIMITS):
    if method == "exspec":
        return oracle.exspec(target, draft, prompts, limits, num_draft_tokens, batch_size).outputs
    starts = range(0, len(prompts), batch_size)
    runs = (oracle.eqspec(target, draft, prompts[i : i + batch_size], limits, num_draft_tokens) for i in starts)
    return [tokens for run in runs for tokens in run.outputs]


def test_reference_is_not_trivial(expected):
    lengths = {len(tokens) for tokens in expected}
    assert len(lengths) > 3, "sequences should end at different steps"
    assert any(tokens[-1] == 1 for tokens in expected), "some should end by EOS"
    assert any(len(tokens) == MAX_NEW_TOKENS for tokens in expected), "some by length"


@pytest.fixture
def demo(target, draft, prompt_ids, expected):
    """The bundled pair, prompts, and the reference, as ``pair`` below."""
    return target, draft, prompt_ids, expected


# A few of all pairs; the rest has every one.
SIZES = grid(product(BATCH_SIZES, NUM_DRAFT_TOKENS), keep=[(1, 5), (16, 8)])


@pytest.mark.parametrize("drafter", grid(["model", "ngram", "ngram-trie", "self", "suffix"], keep=["model", "ngram"]))
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
class TestDemoPair:
    @each_value_once
    @pytest.mark.parametrize(("batch_size", "num_draft_tokens"), SIZES)
    def test_engine(self, demo, method, drafter, batch_size, num_draft_tokens):
        target, draft, prompt_ids, expected = demo
        source = draft if drafter == "model" else drafter
        config = {"method": method, "max_batch_size": batch_size, "num_draft_tokens": num_draft_tokens}
        assert run_engine(target, source, prompt_ids, **config) == expected


# The oracle is slow, and decodes batches of any size with the same loop.
@each_value_once
@pytest.mark.parametrize(("batch_size", "num_draft_tokens"), grid(product((1, 4, 16), NUM_DRAFT_TOKENS), keep=[(4, 3)]))
@combinations(method=["eqspec", "exspec"], drafter=["model", "ngram"])
def test_oracle(demo, method, drafter, batch_size, num_draft_tokens):
    target, draft, prompt_ids, expected = demo
    source = draft if drafter == "model" else None
    assert run_oracle(method, target, source, prompt_ids, batch_size, num_draft_tokens) == expected


def test_oracle_autoregressive(target, prompt_ids, expected):
    outputs = [oracle.autoregressive(target, ids, MAX_NEW_TOKENS, frozenset([1])) for ids in prompt_ids[:8]]
    assert outputs == expected[:8]


@pytest.mark.parametrize("batch_size", grid(BATCH_SIZES, keep=[1, 8]))
def test_plain_decoding_in_the_engine(target, prompt_ids, expected, batch_size):
    assert run_engine(target, None, prompt_ids, max_batch_size=batch_size) == expected


@pytest.mark.parametrize("page_size", grid({"tiny": 1, "odd": 7, "large": 64}, keep=["tiny"]))
def test_page_sizes(target, draft, prompt_ids, expected, page_size):
    assert run_engine(target, draft, prompt_ids, page_size=page_size, max_batch_size=4) == expected


@pytest.mark.grid
def test_torch_backend(target, draft, prompt_ids, expected):
    assert run_engine(target, draft, prompt_ids, backend="torch", max_batch_size=8) == expected


# one token; less than, just, and more than a page of 16; several pages
ARCHITECTURE_PROMPT_LENGTHS = (1, 3, 16, 17, 8, 70)
NEW_TOKENS = 24  # of random models: more than a page


@pytest.fixture(scope="module", params=grid(list(WITH_CHUNKS), keep=list(WITH_CHUNKS)[::2]))
def pair(request):
    """A random model; its first two layers as the draft, so that acceptance is ragged; prompts; the reference."""
    target = tiny_model(request.param)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in ARCHITECTURE_PROMPT_LENGTHS]
    expected = [transformers_greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
    return target, truncated_copy(target, 2), prompts, expected


class TestArchitectures:
    @combinations(method=["eqspec", "exspec"], drafter=["model", "ngram", "ngram-trie", "self", "suffix"])
    def test_engine(self, pair, method, drafter):
        target, draft, prompts, expected = pair
        engine = sd.Engine(target, draft if drafter == "model" else drafter, method=method, max_batch_size=3)
        outputs = engine.generate(prompts, sd.SamplingParams(max_new_tokens=NEW_TOKENS))
        assert [output.token_ids for output in outputs] == expected
        accepted = engine.last_run.decoding.accepted_per_position
        assert drafter != "model" or accepted[0] > accepted[1] > 0, "acceptance should be ragged"

    @pytest.mark.grid
    @each_value_once
    @combinations(method=["exspec", "eqspec"], drafter=["model", "ngram"])
    def test_oracle(self, pair, method, drafter):
        target, draft, prompts, expected = pair
        if getattr(target.config, "attn_temperature_tuning", False):
            pytest.skip("transformers scales queries of a padded batch by the columns of its cache, not by positions")
        source = draft if drafter == "model" else None
        assert run_oracle(method, target, source, prompts, 3, 5, oracle.StopRule(NEW_TOKENS)) == expected


def test_architectures_vary_enough(pair):
    """A random model that repeats one token would test nothing."""
    _, _, prompts, expected = pair
    assert sum(len(set(tokens)) > 5 for tokens in expected) > len(prompts) / 2
