"""Where texts end, and the cases that other implementations get wrong.

With the target as its own draft every block is accepted whole, so it is known which token falls where: emitted
token i is a draft token unless ``i % (K + 1) == K``, which is the bonus after a full acceptance.
"""

from __future__ import annotations

import copy

import pytest

import specdec_fast as sd
from specdec_fast import oracle
from specdec_fast.equivalence.compare import transformers_greedy
from support.demo import MAX_NEW_TOKENS
from support.grids import each_value_once, grid
from support.models import torch

K = 4


def decode(target, draft, prompts, stop_ids=(), method="eqspec", max_new_tokens=MAX_NEW_TOKENS):
    engine = sd.Engine(target, draft, method=method, num_draft_tokens=K, max_batch_size=4)
    params = sd.SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=tuple(stop_ids))
    outputs = engine.generate(prompts, params)
    assert engine.core.pool.num_free_pages == engine.core.pool.num_pages
    return outputs


def first_new_token_at(tokens, remainder):
    """Return an index i with ``i % (K + 1) == remainder`` whose token did not occur before it."""
    return next(i for i in range(len(tokens)) if i % (K + 1) == remainder and tokens[i] not in tokens[:i])


@pytest.fixture
def prompt(prompt_ids):
    return prompt_ids[6]


@pytest.fixture
def plain(expected):
    """The plain text of ``prompt``: MAX_NEW_TOKENS tokens without EOS."""
    assert len(expected[6]) == MAX_NEW_TOKENS
    return expected[6]


@each_value_once
@pytest.mark.parametrize(
    "remainder", [0, 1, 2, K - 1, K], ids=["first draft", "inside", "middle", "last draft", "bonus after acceptance"]
)
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_stop_anywhere_in_a_block(target, prompt, plain, method, remainder):
    at = first_new_token_at(plain, remainder)
    (output,) = decode(target, target, [prompt], [plain[at]], method)
    assert output.token_ids == plain[: at + 1]  # the stop token belongs to the text, nothing follows it
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("remainder", grid(range(K + 1), keep=[K]))
def test_oracle_stops_anywhere_in_a_block(target, prompt, plain, prompt_ids, remainder):
    at = first_new_token_at(plain, remainder)
    limits = oracle.StopRule(MAX_NEW_TOKENS, frozenset([plain[at]]))
    for run in (
        oracle.eqspec(target, target, [prompt, prompt_ids[7]], limits, K),
        oracle.exspec(target, target, [prompt, prompt_ids[7]], limits, K),
    ):
        assert run.outputs[0] == plain[: at + 1]


def test_stop_at_the_first_token(target, draft, prompt, plain):
    (output,) = decode(target, draft, [prompt], [plain[0]])
    assert (output.token_ids, output.finish_reason) == (plain[:1], "stop")


def test_nothing_follows_an_accepted_eos(target, prompt, plain):
    """EOS as an accepted draft token: the drafts behind it were accepted too, and must not be emitted."""
    at = first_new_token_at(plain, 1)
    (output,) = decode(target, target, [prompt], [plain[at]])
    stats = output.stats
    assert stats.num_accepted_tokens + stats.num_steps > stats.num_emitted_tokens, "tokens behind EOS were accepted"
    assert len(output.token_ids) == stats.num_emitted_tokens == at + 1


def test_several_eos_ids_end_at_the_first(target, draft, prompt, plain):
    late, early = first_new_token_at(plain, 3), first_new_token_at(plain, 2)
    both = [plain[late], plain[early], 1]
    (output,) = decode(target, draft, [prompt], both)
    assert output.token_ids == plain[: min(late, early) + 1]


def test_list_of_eos_ids_in_the_generation_config(target, draft, prompt, plain):
    model = copy.deepcopy(target)
    at = first_new_token_at(plain, 2)
    model.generation_config.eos_token_id = [1, plain[at]]
    assert transformers_greedy(model, prompt, MAX_NEW_TOKENS) == plain[: at + 1]
    assert decode(model, draft, [prompt])[0].token_ids == plain[: at + 1]


def test_no_eos_in_the_generation_config_never_stops(target, draft, prompt_ids, expected):
    """As in ``generate()``, only the generation config says where a text ends, not the model's config."""
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = None
    assert model.config.eos_token_id is not None
    ended = next(i for i, tokens in enumerate(expected) if tokens[-1] == 1)
    want = transformers_greedy(model, prompt_ids[ended], MAX_NEW_TOKENS)
    assert len(want) == MAX_NEW_TOKENS
    assert decode(model, draft, [prompt_ids[ended]])[0].token_ids == want


@pytest.mark.parametrize("max_new_tokens", grid([1, 2, K, K + 1, K + 2], keep=[K + 1]))
def test_max_new_tokens_around_a_block(target, draft, prompt_ids, expected, max_new_tokens):
    outputs = decode(target, draft, prompt_ids, max_new_tokens=max_new_tokens)
    assert [o.token_ids for o in outputs] == [tokens[:max_new_tokens] for tokens in expected]
    limits = oracle.StopRule(max_new_tokens, frozenset([1]))
    assert oracle.eqspec(target, draft, prompt_ids, limits, K).outputs == [o.token_ids for o in outputs]


def test_ignore_eos(target, draft, prompt_ids, expected):
    ended = next(i for i, tokens in enumerate(expected) if tokens[-1] == 1)
    params = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)
    (output,) = sd.Engine(target, draft).generate([prompt_ids[ended]], params)
    assert len(output.token_ids) == MAX_NEW_TOKENS
    assert output.token_ids[: len(expected[ended])] == expected[ended]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_draft_equal_to_target_is_accepted_whole(target, prompt, num_draft_tokens):
    """K + 1 tokens per draft, for K = 1 too: 2.0. (Counting the bonus as a draft, or dropping it, gives less.)"""
    engine = sd.Engine(target, target, num_draft_tokens=num_draft_tokens)
    params = sd.SamplingParams(max_new_tokens=1 + 6 * (num_draft_tokens + 1), ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    assert output.stats.mean_acceptance_length == num_draft_tokens + 1
    assert output.stats.num_steps == 1 + 6
    assert output.stats.accepted_per_position == [6] * num_draft_tokens


class TestSpecialTokensAreNotRecognisedByValue:
    """Padding is known by counting: the pad or EOS id may stand anywhere."""

    @pytest.fixture(params=["pad is eos", "pad is content", "no pad"])
    def model(self, request, target, plain):
        pad = {"pad is eos": 1, "pad is content": plain[3], "no pad": None}[request.param]
        model = copy.deepcopy(target)
        model.config.pad_token_id = model.generation_config.pad_token_id = pad
        return model

    @each_value_once
    @pytest.mark.parametrize("method", ["eqspec", "exspec"])
    def test_engine(self, model, draft, prompt_ids, expected, method):
        outputs = decode(model, draft, prompt_ids, method=method)
        assert [o.token_ids for o in outputs] == expected

    @pytest.mark.grid
    def test_oracle(self, model, draft, prompt_ids, expected):
        limits = oracle.StopRule(MAX_NEW_TOKENS, frozenset([1]))
        assert oracle.eqspec(model, draft, prompt_ids, limits, K).outputs == expected
        assert oracle.exspec(model, draft, prompt_ids, limits, K, batch_size=4).outputs == expected


@pytest.mark.parametrize("special", grid({"bos": 0, "eos": 1, "pad": 2}, keep=["eos"]))
def test_special_tokens_inside_the_prompt(target, draft, prompt_ids, special):
    """As chat templates have them: at the end of a turn, at the beginning, several in a row."""
    base = prompt_ids[6][:20]
    prompts = [[*base, special, *base[:5]], [special, special, *base], [*base, special], [special]]
    want = [transformers_greedy(target, prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert [o.token_ids for o in decode(target, draft, prompts)] == want
    limits = oracle.StopRule(MAX_NEW_TOKENS, frozenset([1]))
    assert oracle.eqspec(target, draft, prompts, limits, K).outputs == want


def test_repeated_prompt_of_one_token_of_many_pages(target, draft):
    prompt = [70] * 300
    want = transformers_greedy(target, prompt, MAX_NEW_TOKENS)
    assert decode(target, draft, [prompt, [70], prompt])[2].token_ids == want


def test_text_ends_at_the_models_last_position(target, draft, prompt_ids):
    """512 positions, and the last token emitted needs none: a prompt of 500 leaves 13 tokens, one of 512 leaves 1."""
    prompt = (prompt_ids[1] * 5)[:500]
    params = sd.SamplingParams(max_new_tokens=100, ignore_eos=True)
    (output,) = sd.Engine(target, draft, num_draft_tokens=8).generate([prompt], params)
    assert (len(output.token_ids), output.finish_reason) == (13, "length")
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + output.token_ids[:-1]])).logits[0, -13:]
    assert output.token_ids == logits.argmax(dim=-1).tolist()
    full = prompt + output.token_ids[:12]
    (last,) = sd.Engine(target, draft, num_draft_tokens=8).generate([full], params)
    assert (last.token_ids, last.finish_reason) == (output.token_ids[12:], "length")
