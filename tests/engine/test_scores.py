"""Scores of tokens: their order among equals, what is computed for them, and what can go wrong."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import specdec_fast as sd
from specdec_fast.engine import prefilling as prefilling_module
from specdec_fast.engine.scores import token_scores
from support.models import VOCAB_SIZE
from support.recording_drafter import Recording
from support.scripted import scripted_model

SCORING = sd.SamplingParams(max_new_tokens=0, prompt_logprobs=2)


def by_hand(row, token, count):
    """Return a token's rank, and the most likely tokens, from a sort of Python's."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return order.index(token) + 1, order[:count]


# Few different values, so that most are equal; both zeros; infinities; more rows than are scored at a time.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_logits_are_ordered_by_their_ids(dtype):
    draw = random.Random(0)
    values = [-math.inf, -2.0, -0.0, 0.0, 0.5, 3.0]
    rows = [[draw.choice(values) for _ in range(40)] for _ in range(150)]
    rows += [[-1.5 - 0.25 * draw.randrange(6) for _ in range(40)] for _ in range(5)]
    tokens = [draw.randrange(40) for _ in rows]
    scores = token_scores(torch.tensor(rows, dtype=dtype), list(range(len(rows))), tokens, 30, with_ranks=True)
    for row, token, rank, top in zip(rows, tokens, scores.ranks, scores.top_logprobs, strict=True):
        assert (rank, list(top)) == by_hand(row, token, 30)
        exact = torch.tensor(row, dtype=torch.float32).log_softmax(dim=0)
        assert list(top.values()) == [float(exact[i]) for i in top]


def test_more_tokens_than_there_are(pair):
    params = sd.SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=10**6, prompt_logprobs=10**6)
    (output,) = sd.Engine(*pair).generate([[1, 2]], params)
    assert [len(top) for top in output.top_logprobs] == [VOCAB_SIZE] * 3
    assert len(output.prompt_top_logprobs[1]) == VOCAB_SIZE
    assert sum(math.exp(value) for value in output.top_logprobs[0].values()) == pytest.approx(1, abs=1e-5)


def test_each_request_gets_what_it_asks_for(pair):
    asked = [
        {"logprobs": 2},
        {"logprobs": True, "prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {},
        {"logprobs": 0},
        {"logprobs": 5, "prompt_logprobs": 4},
    ]
    params = [sd.SamplingParams(max_new_tokens=4, ignore_eos=True, **each) for each in asked]
    outputs = sd.Engine(*pair, max_batch_size=6).generate([[5, 6, 7]] * len(asked), params)
    assert [o.logprobs is not None for o in outputs] == [True, True, False, False, True, True]
    assert [o.top_logprobs and [len(t) for t in o.top_logprobs] for o in outputs] == [[2] * 4, *[None] * 4, [5] * 4]
    assert [list(t) for t in outputs[0].top_logprobs] == [list(t)[:2] for t in outputs[5].top_logprobs]
    assert outputs[1].prompt_logprobs == outputs[2].prompt_logprobs
    tops = [o.prompt_top_logprobs and [top and len(top) for top in o.prompt_top_logprobs] for o in outputs]
    assert tops == [None, [None, 1, 1], None, None, None, [None, 4, 4]]
    assert [o.prompt_ranks is not None for o in outputs] == [False, True, True, False, False, True]
    assert outputs[1].prompt_logprobs[0] is None


def test_logits_only_where_they_are_wanted(pair, forwards, monkeypatch):
    """Forwards whose logits are wanted have few rows, because a row of logits is large."""
    monkeypatch.setattr(prefilling_module, "_LOGIT_ROWS", 8)
    engine = sd.Engine(pair[0], None, max_batch_size=2)
    prompts = [list(range(30)), list(range(21))]
    forwards.clear()
    engine.generate(prompts, sd.SamplingParams(max_new_tokens=1))
    assert forwards == [(51, 2)], "the first tokens' logits, in the forward of the prompts"
    forwards.clear()
    params = [sd.SamplingParams(max_new_tokens=1, prompt_logprobs=0), sd.SamplingParams(max_new_tokens=1)]
    engine.generate(prompts, params)
    *scored, last = forwards
    assert sum(rows for rows, _ in scored) == 29
    assert max(rows for rows, _ in scored) == 8
    assert [wanted for _, wanted in scored] == [8, 8, 8, 5]
    assert last == (22, 2)


def test_a_budget_bounds_the_logits(pair, forwards):
    """It has planned memory for those of a verification."""
    engine = sd.Engine(*pair, max_batch_size=2, num_draft_tokens=2, memory_bytes=4 << 20)
    forwards.clear()
    engine.score([list(range(30))])
    assert sum(wanted for _, wanted in forwards) == 29
    assert max(wanted for _, wanted in forwards) <= 6


@pytest.mark.parametrize("tapped", [False, True])
def test_rows_are_shared_only_where_no_score_needs_them(pair, tapped):
    """Of a prefix that another request has computed; chunks are smaller than a page."""
    drafter = Recording((1,), lambda sequence, limit: [1] * limit) if tapped else pair[1]
    options = {"num_draft_tokens": 2, "max_prefill_tokens": 3, "page_size": 8, "prefix_cache": True}
    engine = sd.Engine(pair[0], drafter, **options)
    text = list(range(30))
    decoding = sd.SamplingParams(max_new_tokens=6, ignore_eos=True)
    expected = sd.Engine(pair[0], None).generate([text], replace(decoding, prompt_logprobs=2))[0]
    engine.generate([text], decoding)
    outputs = engine.generate([text] * 3, [replace(decoding, prompt_logprobs=2), decoding, SCORING])
    assert [output.token_ids for output in outputs] == [expected.token_ids, expected.token_ids, []]
    for output in (outputs[0], outputs[2]):
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert output.prompt_top_logprobs == expected.prompt_top_logprobs
    assert tapped or outputs[1].num_cached_tokens > 0


def test_a_drafter_never_sees_what_is_only_scored(pair):
    def script(sequence, limit):
        assert sequence.length > 0
        return [1] * limit

    drafter = Recording((1,), script)
    engine = sd.Engine(pair[0], drafter, num_draft_tokens=2, max_prefill_tokens=7)
    decoding = sd.SamplingParams(max_new_tokens=6, ignore_eos=True, prompt_logprobs=1)
    scoring = sd.SamplingParams(max_new_tokens=0, prompt_logprobs=1)
    text = list(range(20))
    outputs = engine.generate([text, text, text[:5]], [decoding, scoring, decoding])
    assert len(drafter.released) == 2
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
    assert outputs[2].prompt_logprobs == outputs[0].prompt_logprobs[:5]
    assert engine.last_run.decoding.num_emitted_tokens == 12


def test_memory_runs_out_while_prompts_are_scored(pair, monkeypatch):
    """The rows are scored again in smaller forwards, and no score is there twice."""
    engine = sd.Engine(*pair, max_batch_size=2)
    texts = [list(range(40)), list(range(7, 30))]
    expected = [score.logprobs for score in engine.score(texts)]
    forward = engine.target.forward
    num_rows = []

    def failing(batch, *rest):
        num_rows.append(len(batch.token_ids))
        if num_rows[-1] > 9:
            raise torch.OutOfMemoryError("out of memory")
        return forward(batch, *rest)

    monkeypatch.setattr(engine.target, "forward", failing)
    assert [score.raise_for_error().logprobs for score in engine.score(texts)] == expected
    assert engine.last_run.num_out_of_memory > 0
    assert num_rows[0] == 61


def test_a_prompt_with_nan_logits_fails_alone():
    script = list(range(1, 25))
    target = scripted_model(script, 25)
    with torch.no_grad():
        target.transformer.wpe.weight[12] = math.nan
    engine = sd.Engine(target, None, max_prefill_tokens=5)
    good, bad = [0] * 12, [0] * 20
    scores = engine.score([good, bad, good])
    assert scores[0].error is scores[2].error is None
    assert len(scores[0].logprobs) == 11
    assert isinstance(scores[1].error, sd.InvalidLogitsError)
    assert "after 13 tokens hold a NaN" in str(scores[1].error)
    assert scores[1].logprobs == scores[0].logprobs + scores[1].logprobs[11:]
    assert len(scores[1].logprobs) == 12
    params = sd.SamplingParams(max_new_tokens=3, prompt_logprobs=0)
    output = engine.generate([bad], params)[0]
    assert (output.token_ids, type(output.error)) == ([], sd.InvalidLogitsError)
    assert engine.core.pool.is_vacant


def test_texts_without_scores_are_not_forgotten(pair):
    """One token has none; a wrong text has an error; and a stream says that it has ended."""
    engine = sd.Engine(*pair)
    scores = engine.score([[5], [VOCAB_SIZE], [5, 6]])
    assert [(score.index, score.logprobs == []) for score in scores] == [(0, True), (1, True), (2, False)]
    assert [type(score.error) for score in scores] == [type(None), sd.InvalidPromptError, type(None)]
    (chunk,) = engine.stream([[5]], sd.SamplingParams(max_new_tokens=0, prompt_logprobs=2))
    assert (chunk.token_ids, chunk.finish_reason) == ([], "length")
    assert (chunk.prompt_logprobs, chunk.prompt_top_logprobs, chunk.prompt_ranks) == ([None], [None], [None])
    assert engine.score([]) == []


def test_a_prompt_is_preempted_while_it_is_scored(pair):
    """It begins again, but no position is scored twice: there would be more log-probabilities than tokens."""
    engine = sd.Engine(pair[0], None, max_batch_size=2, page_size=4, kv_cache_tokens=64, max_prefill_tokens=1)
    prompts = [[3], list(range(40))]
    params = [sd.SamplingParams(max_new_tokens=60, ignore_eos=True, prompt_logprobs=k) for k in (None, 2)]
    params[1] = sd.SamplingParams(max_new_tokens=4, ignore_eos=True, prompt_logprobs=2)
    outputs = engine.generate(prompts, params)
    assert engine.last_run.num_preemptions == 1
    (alone,) = sd.Engine(pair[0], None).generate(prompts[1:], params[1])
    assert outputs[1].prompt_logprobs == alone.prompt_logprobs
    assert outputs[1].prompt_top_logprobs == alone.prompt_top_logprobs
    assert outputs[1].token_ids == alone.token_ids


def test_a_text_as_large_as_the_pool(pair):
    """The last token needs no position."""
    engine = sd.Engine(pair[0], None, page_size=4, kv_cache_tokens=16)
    scored, too_large = engine.score([list(range(17)), list(range(18))])
    assert len(scored.raise_for_error().logprobs) == 16
    assert isinstance(too_large.error, sd.KVCacheTooSmallError)


def test_texts_leave_in_the_step_that_ends_their_prefill(pair):
    engine = sd.Engine(*pair, max_batch_size=2, method="eqspec", max_prefill_tokens=2)
    texts = [list(range(n)) for n in (5, 1, 9, 2, 1)]
    found = [
        output.index for output in engine.as_completed(texts, sd.SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    ]
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert engine.last_run.num_steps == 0
    assert engine.core.pool.is_vacant
    assert not engine.core.has_work


@pytest.mark.parametrize("value", [-1, True, None, 2.0, "3"])
def test_a_wrong_number_of_most_likely_tokens(pair, value):
    with pytest.raises(sd.InvalidParamsError, match=f"top_logprobs={value!r}: expected an integer >= 0"):
        sd.Engine(*pair).score([[1, 2]], top_logprobs=value)
