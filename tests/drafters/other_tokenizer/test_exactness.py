"""Draft models with another tokenizer: outputs are those of plain decoding, and what they compute is what they read."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_fast as sd
from specdec_fast.drafters.draft_model.joint_vocabulary import JointVocabulary
from support.grids import combinations, grid
from support.invariants import dense_kv, slots_of
from support.other_tokenizers import byte_level, permuted, sentencepiece

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
GREEDY = sd.SamplingParams(max_new_tokens=24)
REQUESTS = {
    "greedy": GREEDY,
    "sampled": sd.SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=5),
    "edited": sd.SamplingParams(
        max_new_tokens=24,
        temperature=0.7,
        seed=6,
        repetition_penalty=1.2,
        logit_bias={5: 1.0},
        allowed_token_ids=[*range(3, 900)],
    ),
}


@pytest.fixture(scope="module")
def drafts(draft, prompts):
    """Draft models and their tokenizers, by name."""

    def random_model(tokenizer):
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **TINY)).eval()
        return model, tokenizer

    return {
        "permuted": permuted(draft),
        "byte-level": random_model(byte_level(prompts)),
        "sentencepiece": random_model(sentencepiece(prompts)),
    }


@pytest.fixture
def make(monkeypatch, target, tokenizer, drafts):
    """Make an engine with a draft model that translates in a given way."""

    def made(kind, translation, **config):
        monkeypatch.setattr(JointVocabulary, "translation", translation)
        model, draft_tokenizer = drafts[kind]
        return sd.Engine(target, model, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer, **config)

    return made


@pytest.fixture(scope="module")
def plain(target, tokenizer, prompts):
    """What plain decoding emits for the first prompts, by kind of request."""
    engine = sd.Engine(target, None, tokenizer=tokenizer)
    return {name: tokens_of(engine.generate(prompts[:6], params)) for name, params in REQUESTS.items()}


def tokens_of(outputs):
    return [output.raise_for_error().token_ids for output in outputs]


@combinations(
    kind=["permuted", "byte-level", "sentencepiece"],
    translation=["tokens", "text"],
    num_rows=[(1, 3), (4, 3), (4, "auto")],
    request_kind=list(REQUESTS),
)
def test_outputs_are_those_of_plain_decoding(make, prompts, plain, kind, translation, num_rows, request_kind):
    batch_size, num_draft_tokens = num_rows
    engine = make(kind, translation, max_batch_size=batch_size, num_draft_tokens=num_draft_tokens)
    assert engine.describe()["draft"]["translation"] == translation
    assert tokens_of(engine.generate(prompts[:6], REQUESTS[request_kind])) == plain[request_kind]
    assert engine.last_run.decoding.num_draft_tokens > 0 or num_draft_tokens == "auto"


@pytest.mark.parametrize("translation", ["tokens", "text"])
def test_other_ids_for_the_same_texts_draft_the_same(make, target, tokenizer, draft, prompts, translation):
    """By token exactly; text that the target did not encode canonically is read otherwise."""
    config = {"num_draft_tokens": 4, "max_batch_size": 4}
    same = sd.Engine(target, draft, tokenizer=tokenizer, **config)
    other = make("permuted", translation, **config)
    for params in (REQUESTS["greedy"], REQUESTS["sampled"]):
        expected = [output.stats.num_accepted_tokens for output in same.generate(prompts[:6], params)]
        found = [output.stats.num_accepted_tokens for output in other.generate(prompts[:6], params)]
        assert found == expected if translation == "tokens" else sum(found) > sum(expected) / 2 > 0


@pytest.mark.parametrize(
    ("kind", "translation"),
    grid(
        [(kind, by) for kind in ("permuted", "byte-level", "sentencepiece") for by in ("tokens", "text")],
        [("byte-level", "text"), ("permuted", "tokens")],
    ),
)
@pytest.mark.parametrize("enforce_eager", grid([False, True], [False]))
def test_its_kv_entries_are_those_of_its_context(make, prompts, plain, kind, translation, enforce_eager):
    """Also where the end of a context was encoded otherwise: entries behind the first changed token are made anew."""
    config = {"num_draft_tokens": 3, "max_batch_size": 3, "page_size": 4, "enforce_eager": enforce_eager}
    engine = make(kind, translation, **config)
    drafter = engine.drafter
    compute = drafter._chosen
    checked = []

    def noted(drafting):
        for sequence in drafting:
            known = drafter.draft_kv_length[sequence]
            own = drafter._tokens(sequence)
            assert known < len(own)
            slots = slots_of(drafter.pool, sequence, known)
            for cached, expected in zip(drafter.pool.layers, dense_kv(drafter.model.model, own[:known]), strict=True):
                for entries, right in zip(cached, expected, strict=True):
                    assert (entries.flatten(0, 1)[slots] - right).abs().max() < 1e-4
            checked.append(known)
        return compute(drafting)

    drafter._chosen = noted
    outputs = engine.generate(prompts[:3], GREEDY)
    assert len(checked) > 3
    assert tokens_of(outputs) == plain["greedy"][:3]


@pytest.mark.parametrize("translation", grid(["tokens", "text"], ["text"]))
def test_preempted_and_cancelled_requests_leave_nothing(make, prompts, plain, translation):
    config = {
        "max_batch_size": 4,
        "num_draft_tokens": 3,
        "page_size": 4,
        "prefix_cache": True,
        "max_prefill_tokens": 16,
    }
    engine = make("permuted", translation, kv_cache_tokens=320, **config)
    chunks = engine.stream(prompts[:6], GREEDY)
    next(chunks)
    chunks.close()
    assert not engine.drafter._contexts
    assert tokens_of(engine.generate(prompts[:6], GREEDY)) == plain["greedy"]
    assert engine.last_run.num_preemptions > 0
    assert not engine.drafter._contexts
    assert not engine.drafter._drafted
    assert engine.drafter.pool.is_vacant


def test_a_tokenizer_may_have_more_ids_than_its_model(target, tokenizer, prompts, plain):
    """Those of words that were added to the tokenizer alone are no rows of the embedding."""
    torch.manual_seed(3)
    other = byte_level(prompts)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(other), **TINY)).eval()
    other.add_tokens(["One", " the", " a"])
    assert any(max(other(prompt).input_ids) >= model.config.vocab_size for prompt in prompts[:6])
    engine = sd.Engine(target, model, tokenizer=tokenizer, draft_tokenizer=other, max_batch_size=4, num_draft_tokens=3)
    assert tokens_of(engine.generate(prompts[:6], GREEDY)) == plain["greedy"]
    assert engine.last_run.decoding.num_draft_tokens > 0


def test_a_text_with_far_more_draft_tokens_is_decoded_plainly(target, tokenizer, prompts, drafts):
    """Its pages would not fit: the draft model's tokenizer splits these words into single bytes."""
    longest = sorted(prompts, key=len)[-3:]
    config = {"num_draft_tokens": 3, "page_size": 4, "max_batch_size": 3, "kv_cache_tokens": 800}
    model, _ = drafts["byte-level"]
    tokenizers = {"tokenizer": tokenizer, "draft_tokenizer": byte_level(["zq"], 257)}
    engine = sd.Engine(target, model, **tokenizers, **config)
    expected = sd.Engine(target, None, tokenizer=tokenizer).generate(longest, GREEDY)
    assert tokens_of(engine.generate(longest, GREEDY)) == tokens_of(expected)
    assert engine.last_run.decoding.num_draft_tokens == 0
