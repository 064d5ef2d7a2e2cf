"""K of one request: it bounds what the engine gives, and no token depends on it."""

from __future__ import annotations

import pytest

import specdec_fast as sd


def params_of(k):
    return sd.SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=True, num_draft_tokens=k)


@pytest.mark.parametrize("num_draft_tokens", [4, "auto"])
def test_each_request_of_a_batch_has_a_bound_of_its_own(pair, num_draft_tokens):
    caps = [None, 0, 1, 3, 4, 0]
    prompts, params = [[5 + i, 6] for i in range(6)], [params_of(k) for k in caps]
    plain = sd.Engine(pair[0], None).generate(prompts, params)
    outputs = sd.Engine(*pair, num_draft_tokens=num_draft_tokens).generate(prompts, params)
    for output, expected, cap in zip(outputs, plain, caps, strict=True):
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
        assert len(output.stats.accepted_per_position) <= (4 if cap is None and num_draft_tokens == 4 else cap or 8)
        assert cap != 0 or output.stats.num_draft_tokens == 0
    if num_draft_tokens == 4:
        assert [len(output.stats.accepted_per_position) for output in outputs] == [4, 0, 1, 3, 4, 0]


def test_more_than_any_step_has_concerns_one_request(pair):
    engine = sd.Engine(*pair, num_draft_tokens=3)
    refused, served = engine.generate([[1, 2], [3]], [params_of(4), params_of(3)])
    assert isinstance(refused.error, sd.TooManyDraftTokensError)
    assert "num_draft_tokens=4 of a request: the engine drafts at most 3 per step" in str(refused.error)
    assert served.error is None
    assert len(served.token_ids) == 20


def test_an_engine_that_decodes_plainly_takes_any(pair):
    assert sd.generate(pair[0], None, [[1, 2]], params_of(7))[0].error is None


@pytest.mark.parametrize("k", [-1, 1.5, True, "3"])
def test_it_is_an_integer_from_0_on(k):
    with pytest.raises(sd.InvalidParamsError, match=r"num_draft_tokens=.*expected an integer >= 0"):
        sd.SamplingParams(num_draft_tokens=k)
