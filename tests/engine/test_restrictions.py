"""Requests whose restrictions, biases or processors are wrong end alone; what transformers generates is reproduced."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TopKLogitsWarper

import specdec_fast as sd
from specdec_fast.batch import sampling_batch
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.request.token_masks import TokenMask
from specdec_fast.runner import eager, mask_rows
from support.grids import grid
from support.models import VOCAB_SIZE, tiny_model, truncated_copy
from support.scripted import ByteTokenizer

PROMPTS = [[3, 4], [5, 6, 7], [8], [9, 10, 11, 12]]
FREE = sd.SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True)
DRAFTERS = ["model", "ngram", None]


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("llama")
    plain = sd.Engine(target, None, max_batch_size=1).generate(PROMPTS, FREE, progress=False)
    return SimpleNamespace(target=target, draft=truncated_copy(target, 2), plain=plain)


def outputs_beside(pair, drafter, **wrong):
    """Decode a request with such parameters in the middle of the others, which must keep their bits; return it."""
    engine = sd.Engine(pair.target, pair.draft if drafter == "model" else drafter, max_batch_size=3)
    params = sd.SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, "logprobs": True} | wrong)
    outputs = engine.generate([*PROMPTS[:2], [1, 2], *PROMPTS[2:]], [FREE, FREE, params, FREE, FREE], progress=False)
    bad = outputs.pop(2)
    assert [(o.token_ids, o.logprobs) for o in outputs] == [(o.token_ids, o.logprobs) for o in pair.plain]
    assert engine.core.pool.is_vacant
    return bad


def raises(token_ids, logits):
    if len(token_ids) >= 6:
        raise ZeroDivisionError("by the caller")
    return logits


def nan(token_ids, logits):
    return logits * float("nan") if len(token_ids) >= 6 else logits


def nothing(token_ids, logits):
    return torch.full_like(logits, float("-inf")) if len(token_ids) >= 6 else logits


def wrong_shape(token_ids, logits):
    return logits[1:] if len(token_ids) >= 6 else logits


def no_tensor(token_ids, logits):
    return logits.tolist() if len(token_ids) >= 6 else logits


WRONG = {
    "raises": ([raises], sd.LogitsProcessorError, "'raises' raised ZeroDivisionError: by the caller"),
    "nan": ([nan], sd.LogitsProcessorError, "returned a NaN"),
    "nothing": ([nothing], sd.NoAllowedTokenError, "left no token"),
    "wrong_shape": ([wrong_shape], sd.LogitsProcessorError, rf"returned torch.float32 \[{VOCAB_SIZE - 1}\]"),
    "no_tensor": ([no_tensor], sd.LogitsProcessorError, "returned list; expected logits of shape"),
}


@pytest.mark.parametrize(
    ("kind", "drafter"), grid(product(WRONG, DRAFTERS), keep=lambda case: case[1] == "model" or case[0] == "raises")
)
def test_a_wrong_processor_ends_its_own_request(pair, kind, drafter):
    """After four tokens, whatever was drafted: a draft that calls it earlier, and is rejected, changes nothing."""
    processors, error, message = WRONG[kind]
    bad = outputs_beside(pair, drafter, logits_processors=processors)
    with pytest.raises(error, match=message):
        bad.raise_for_error()
    (same,) = sd.Engine(pair.target, None).generate([[1, 2]], FREE, progress=False)
    assert (bad.token_ids, bad.logprobs) == (same.token_ids[:4], same.logprobs[:4])
    if kind == "raises":
        assert isinstance(bad.error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_restrictions_that_leave_nothing_end_their_request(pair, drafter):
    """Two tokens are allowed, and each is forbidden behind the other."""
    words = [(5, 5), (5, 6), (6, 5), (6, 6)]
    bad = outputs_beside(pair, drafter, allowed_token_ids=[5, 6], bad_words=words)
    assert isinstance(bad.error, sd.NoAllowedTokenError)
    assert len(bad.token_ids) == len(bad.logprobs) == 1
    assert "after 1 emitted tokens" in str(bad.error)


class Broken(TokenMask):
    """Raises behind a number of tokens."""

    reads_tokens = True

    def __init__(self, most):
        self.missing = most

    def advance(self, token):
        self.missing -= 1
        return True

    def rollback(self, count):
        self.missing += count

    def fill(self, row):
        if self.missing <= 0:
            raise KeyError("broken")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_mask_that_raises_ends_its_own_request(pair, drafter, monkeypatch):
    monkeypatch.setattr("specdec_fast.engine.input.masks_of", lambda params, *_: [Broken(4)] * bool(params.min_tokens))
    bad = outputs_beside(pair, drafter, min_tokens=1)
    assert isinstance(bad.error, sd.TokenMaskError)
    assert isinstance(bad.error.__cause__, KeyError)
    assert len(bad.token_ids) <= 4


TOKENIZER = ByteTokenizer([bytes([32 + i]) for i in range(VOCAB_SIZE)])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, sd.UnknownTokenError, f"logit_bias: token id {VOCAB_SIZE} is outside"),
        ({"allowed_token_ids": [1, 10**9]}, sd.UnknownTokenError, "allowed_token_ids: token id 1000000000"),
        ({"bad_words": [[1], [2, 500]]}, sd.UnknownTokenError, "bad_words: token id 500 is outside"),
        ({"bad_words": ["word"]}, sd.MissingTokenizerError, "bad_words has 'word', but no tokenizer"),
    ],
)
def test_ids_and_words_that_the_target_lacks(pair, wrong, error, message):
    bad = outputs_beside(pair, None, **wrong)
    with pytest.raises(error, match=message):
        bad.raise_for_error()
    assert bad.token_ids == []


def test_words_that_are_strings(target, tokenizer, prompts):
    """Forbidden as they stand at the beginning of a text and behind a space, and only then."""
    engine = sd.Engine(target, "ngram", tokenizer=tokenizer)
    params = sd.SamplingParams(max_new_tokens=30)
    (free,) = engine.generate([prompts[3]], params, progress=False)
    word = max(free.text.split(), key=len).strip(".,!?\"'")
    (output,) = engine.generate([prompts[3]], sd.SamplingParams(max_new_tokens=30, bad_words=[word]), progress=False)
    assert f" {word}" in free.text
    assert f" {word}" not in output.raise_for_error().text
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (word, " " + word)]
    by_ids = sd.SamplingParams(max_new_tokens=30, bad_words=ids)
    assert engine.generate([prompts[3]], by_ids, progress=False)[0].token_ids == output.token_ids


class Scores(LogitsProcessor):
    """Notes the shapes that it is called with."""

    def __init__(self):
        self.shapes = set()

    def __call__(self, input_ids, scores):
        self.shapes.add((input_ids.dtype, tuple(input_ids.shape), scores.dtype, tuple(scores.shape)))
        return scores


def test_processors_of_transformers_get_tensors_of_one_row(pair):
    seen = Scores()
    params = sd.SamplingParams(max_new_tokens=3, ignore_eos=True, logits_processors=[LogitsProcessorList([seen])])
    (output,) = sd.Engine(pair.target, None).generate([[5, 6, 7]], params, progress=False)
    assert output.token_ids == pair.plain[1].token_ids[:3]
    row = (torch.float32, (1, VOCAB_SIZE))
    assert seen.shapes == {(torch.int64, (1, length), *row) for length in (3, 4, 5)}


def test_processors_see_the_path_of_every_row_and_change_no_logprob(pair):
    """Plain functions get lists; the draft tokens in front of a row are among them."""
    paths = []

    def noting(token_ids, logits):
        paths.append(token_ids)
        return logits - 5

    params = sd.SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True, logits_processors=[noting])
    engine = sd.Engine(pair.target, pair.draft, num_draft_tokens=4)
    (output,) = engine.generate([[3, 4]], params, progress=False)
    assert (output.token_ids, output.logprobs) == (pair.plain[0].token_ids, pair.plain[0].logprobs)
    assert all([3, 4, *output.token_ids[:n]] in paths for n in range(12))
    drafted = engine.last_run.decoding.num_draft_tokens
    assert len(paths) == drafted + engine.last_run.decoding.num_steps


# Whole configs, greedily: the tokens of transformers' generate().
CONFIGS = {
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, VOCAB_SIZE, 3))},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(0, 40)] + [[a, a + 1] for a in range(96)]},
    "suppress_tokens": {"suppress_tokens": list(range(0, VOCAB_SIZE, 2))},
    "sequence_bias": {"sequence_bias": {(token,): 2.0 for token in range(0, VOCAB_SIZE, 5)}},
    "sequences_bias": {"sequence_bias": {(7, 8): 2.0, (9,): 3.0}, "no_repeat_ngram_size": 1},
    "together": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [50], "min_new_tokens": 4},
}


@pytest.mark.parametrize("fields", grid(CONFIGS, keep=["min_new_tokens", "sequences_bias"]))
@pytest.mark.filterwarnings("ignore")
def test_a_generation_config_gives_the_tokens_of_transformers(pair, fields):
    config = GenerationConfig(**{"max_new_tokens": 12, "do_sample": False, "eos_token_id": 0} | fields)
    params = sd.SamplingParams.from_generation_config(config)
    outputs = sd.Engine(pair.target, pair.draft, max_batch_size=2).generate(PROMPTS, params, progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = pair.target.generate(torch.tensor([prompt]), generation_config=config, pad_token_id=0)
        assert output.raise_for_error().token_ids == expected[0, len(prompt) :].tolist()


def test_a_filter_of_transformers_as_a_processor(pair):
    given = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12, "ignore_eos": True}
    own = sd.SamplingParams(top_k=3, **given)
    theirs = sd.SamplingParams(logits_processors=[TopKLogitsWarper(3)], **given)
    first, second = sd.Engine(pair.target, "ngram").generate([[3, 4]] * 2, [own, theirs], progress=False)
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_min_tokens_beside_a_stop_id_that_the_target_never_emits(pair, drafter):
    """Checkpoints name ids beyond their logits, too: an EOS that was added to the tokenizer alone, for example."""
    stop_ids = (VOCAB_SIZE, 10**12, *range(0, VOCAB_SIZE, 2))
    known = stop_ids[2:]
    expected = outputs_beside(pair, drafter, min_tokens=5, stop_token_ids=known)
    bad = outputs_beside(pair, drafter, min_tokens=5, stop_token_ids=stop_ids)
    assert bad.error is None
    assert len(bad.token_ids) >= 5
    assert not set(bad.token_ids[:5]) & set(known)
    assert (bad.token_ids, bad.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_batch_without_restrictions_pays_nothing(pair, monkeypatch):
    """No copies, no arrays, no passes over logits: the same calls as if there were no restrictions."""

    def never(*args, **keywords):
        raise AssertionError("called for a batch without restrictions")

    monkeypatch.setattr(mask_rows, "num_words", never)
    monkeypatch.setattr(eager, "processed_logits", never)
    monkeypatch.setattr(sampling_batch, "_adjustment_columns", never)
    for drafter in (pair.draft, "ngram"):
        params = [FREE, sd.SamplingParams(max_new_tokens=12, temperature=0.7, repetition_penalty=1.2)]
        outputs = sd.Engine(pair.target, drafter).generate(PROMPTS[:2], params, progress=False)
        assert all(output.error is None for output in outputs)


def test_a_request_without_restrictions_has_no_mask(pair):
    builder = RequestBuilder(sd.Engine(pair.target, None).target, TOKENIZER)
    free = builder.build(0, [1], sd.SamplingParams())
    assert free.masks is None
    assert not free.samples
    assert builder.build(0, [1], sd.SamplingParams(min_tokens=3)).masks is not None
