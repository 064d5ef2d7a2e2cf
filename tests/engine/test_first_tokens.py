"""First tokens: the forward of a step computes the rows of prompts, and nothing is drafted before a first token."""

from __future__ import annotations

from dataclasses import replace

import pytest

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from support.grids import grid
from support.models import VOCAB_SIZE, tiny_model
from support.recurrent_models import recurrent_model
from support.scripted_drafter import Scripted
from support.scripted_trees import RandomTrees

PROMPTS = [[(5 * i + j * j) % VOCAB_SIZE for j in range(n)] for i, n in enumerate((7, 1, 19, 2, 30))]
PARAMS = [
    sd.SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=True),
    sd.SamplingParams(max_new_tokens=9, ignore_eos=True, temperature=0.9, seed=3),
    sd.SamplingParams(max_new_tokens=9, ignore_eos=True, frequency_penalty=0.7, allowed_token_ids=range(40)),
    sd.SamplingParams(max_new_tokens=9, ignore_eos=True, logits_processors=[lambda ids, logits: -logits]),
    sd.SamplingParams(max_new_tokens=1),
]


def results(outputs):
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def one_by_one(model, prompts=PROMPTS, params=PARAMS, **settings):
    engine = sd.Engine(model, None, max_batch_size=1, **settings)
    return [results(engine.generate([p], [q]))[0] for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("executor", grid(["program", "pytorch"], keep=["program"]))
@pytest.mark.parametrize(
    "make",
    grid(
        {
            "llama": lambda: tiny_model("llama"),
            "gemma2": lambda: tiny_model("gemma2"),
            "gpt2": lambda: tiny_model("gpt2"),
            "qwen3-next": lambda: recurrent_model("qwen3-next"),
            "mamba2": lambda: recurrent_model("mamba2"),
        },
        keep=["llama", "qwen3-next"],
    ),
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "ahead"])
def test_prompts_that_fit_need_one_forward(make, executor, overlap, forwards, monkeypatch):
    """All kinds of choices; tokens and log-probabilities are those of each request alone."""
    monkeypatch.setattr(EngineCore, "launches_ahead", overlap)
    model = make()
    vocab_size = model.config.vocab_size
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    settings = {"enforce_eager": executor == "pytorch"}
    expected = one_by_one(model, prompts, **settings)
    for draft in (None, model):
        engine = sd.Engine(model, draft, num_draft_tokens=2, **settings)
        forwards.clear()
        assert results(engine.generate(prompts, PARAMS)) == expected
        assert forwards[0] == (sum(map(len, prompts)), len(prompts))
        assert engine.core.pool.is_vacant


def test_a_prompt_joins_beside_draft_tokens(forwards):
    """Its rows and those of draft tokens have one forward; the drafter does not see it before its first token."""
    model = tiny_model("llama")
    params = sd.SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = [tokens for tokens, _ in one_by_one(model, PROMPTS[::2], [params] * 3)]
    seen = []

    def script(sequence, limit):
        seen.append(sequence.index)
        assert limit == 0 or sequence.length > sequence.prompt_length
        done = len(sequence.emitted_ids)
        return expected[sequence.index][done : done + limit]

    engine = sd.Engine(model, Scripted(script), num_draft_tokens=3, max_batch_size=4)
    core, build = engine.core, RequestBuilder(engine.target, None).build
    requests = [build(i, prompt, params) for i, prompt in enumerate(PROMPTS[::2])]
    core.add(requests[0])
    core.step()
    core.step()
    assert seen == [0]
    forwards.clear()
    for request in requests[1:]:
        core.add(request)
    outputs = core.step()
    assert forwards == [(4 + len(PROMPTS[2]) + len(PROMPTS[4]), 4 + 1 + 1)]
    assert {output.request.index: len(output.token_ids) for output in outputs} == {0: 4, 1: 1, 2: 1}
    assert seen == [0, 0]
    while core.has_work:
        core.step()
    assert [request.emitted_ids for request in requests] == expected


def test_beside_trees_prompts_are_prefilled(forwards):
    model = tiny_model("llama")
    params = sd.SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = one_by_one(model, PROMPTS[::2], [params] * 3)
    engine = sd.Engine(model, RandomTrees([tokens for tokens, _ in expected]), num_draft_tokens=3, max_batch_size=4)
    core, build = engine.core, RequestBuilder(engine.target, None).build
    requests = [build(i, prompt, params) for i, prompt in enumerate(PROMPTS[::2])]
    core.add(requests[0])
    core.step()
    for request in requests[1:]:
        core.add(request)
    forwards.clear()
    core.step()
    assert forwards[0] == (len(PROMPTS[2]) - 1 + len(PROMPTS[4]) - 1, 1)
    while core.has_work:
        core.step()
    assert [request.emitted_ids for request in requests] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("most_prefilled", [None, 40, 5])
def test_forwards_of_long_prompts_are_full(most_prefilled, forwards):
    """What does not fit into the forward of the step is prefilled in as few forwards as it can be."""
    model = tiny_model("llama")
    params = sd.SamplingParams(max_new_tokens=3, ignore_eos=True)
    expected = one_by_one(model, PROMPTS, [params] * len(PROMPTS))
    engine = sd.Engine(model, None, max_prefill_tokens=most_prefilled)
    engine.target.row_padding = replace(engine.target.row_padding, largest=16)
    forwards.clear()
    assert results(engine.generate(PROMPTS, params)) == expected
    num_rows = sum(map(len, PROMPTS))
    of_prompts = [rows for rows, wanted in forwards if rows > wanted]
    assert max(of_prompts) <= 16
    if most_prefilled is None:
        assert len(of_prompts) == -(-num_rows // 16)
    else:
        assert max(of_prompts) <= most_prefilled + len(PROMPTS)


def test_statistics_do_not_depend_on_the_batch():
    """Whether a prompt's rows were in the forward of a step or not."""
    model = tiny_model("llama")
    params = sd.SamplingParams(max_new_tokens=12, ignore_eos=True)
    drafter = Scripted(lambda sequence, limit: [sequence.length % VOCAB_SIZE] * limit)
    found = []
    for settings in ({}, {"max_batch_size": 1}, {"max_prefill_tokens": 3}, {"max_batch_size": 2, "method": "eqspec"}):
        outputs = sd.Engine(model, drafter, num_draft_tokens=3, **settings).generate(PROMPTS, params)
        found.append([output.stats for output in outputs])
    assert all(each == found[0] for each in found)


def test_a_policy_that_learns_observes_steps_although_prompts_come(forwards):
    """While a sequence may have draft tokens, prompts are prefilled, and the step is like others."""

    class Learning(sd.LengthPolicy):
        max_draft_tokens = 2

        def __init__(self):
            self.steps = []

        def limits(self, batch):
            return [min(2, sequence.num_remaining - 1) for sequence in batch]

        def observe(self, step):
            self.steps.append((len(step.batch), step.limits))

    model = tiny_model("llama")
    policy = Learning()
    engine = sd.Engine(model, Scripted(lambda sequence, limit: [0] * limit), num_draft_tokens=policy)
    core, build = engine.core, RequestBuilder(engine.target, None).build
    params = sd.SamplingParams(max_new_tokens=30, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS[:3]):
        core.add(build(i, prompt, params))
        core.step()
    assert policy.steps == [(2, [2, 0]), (3, [2, 2, 0])], "all but the first"
    assert (len(PROMPTS[2]) - 1, 1) in forwards
