"""``draft="auto"`` is the target's own 4-bit copy where that pays, else n-grams; outputs stay the same."""

from __future__ import annotations

import re

import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.drafters import auto
from specdec_fast.drafters.self_draft.drafter import SelfDrafter
from support.models import tiny_model
from support.recurrent_models import recurrent_model
from support.sharded import take_for_sharded

PROMPTS = [[5, 9, 23, 5, 9], [7, 7, 8]]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def seconds(monkeypatch):
    """Give forwards these times: of the target by rows, of the copy by sequences."""

    def replace(target, copy):
        monkeypatch.setattr(auto, "forward_seconds", lambda _, counts, **__: {n: target(n) for n in counts})
        monkeypatch.setattr(SelfDrafter, "forward_seconds", lambda _, counts: {n: copy(n) for n in counts})

    return replace


def waits_for_weights(rows):
    return 0.01 + 1e-5 * rows


def computes(rows):
    return 0.001 + 0.001 * rows


def test_a_copy_that_pays_drafts(model, seconds):
    seconds(waits_for_weights, lambda n: 0.003)
    engine = sd.Engine(model, "auto", num_draft_tokens=4, max_batch_size=2)
    described = engine.describe()
    assert described["drafter"] == "self:int4"
    # 1 + .9 + .81 + .729 + .6561 tokens in 10.1 + 4 * 3 ms, instead of one in 10.02 ms
    assert described["why_drafter"] == (
        "with a copy of the target in 4 bits, at batch size 2, the planner expects 1.86 times the speed of plain "
        "decoding (a step takes 10 ms, one with 4 draft tokens 22.1 ms)"
    )
    plain = sd.Engine(model, None).generate(PROMPTS, sd.SamplingParams(max_new_tokens=12))
    outputs = engine.generate(PROMPTS, sd.SamplingParams(max_new_tokens=12))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.num_draft_tokens for output in outputs) > 0


def test_no_copy_is_made_if_reading_fewer_bytes_cannot_pay(model, seconds, monkeypatch):
    monkeypatch.setattr(SelfDrafter, "__init__", None)
    seconds(computes, None)
    described = sd.Engine(model, "auto", max_batch_size=32).describe()
    assert described["drafter"] == "ngram"
    assert "at batch size 32, the planner expects at best 0." in described["why_drafter"]


def test_a_copy_that_is_slow_here_does_not_draft(model, seconds):
    seconds(waits_for_weights, waits_for_weights)
    described = sd.Engine(model, "auto").describe()
    assert described["drafter"] == "ngram"
    assert "the planner expects 0." in described["why_drafter"]


def test_a_policy_is_expected_to_choose_the_best_number_of_draft_tokens(model, seconds):
    seconds(lambda rows: 0.01 if rows <= 3 else 0.06, lambda n: 0.002)
    engine = sd.Engine(model, "auto", num_draft_tokens="auto", max_batch_size=1)
    assert engine.drafter.name == "self:int4"
    assert "one with 2 draft tokens 14 ms" in engine.draft_choice.why
    assert sd.Engine(model, "auto", num_draft_tokens=8, max_batch_size=1).drafter.name == "ngram"


def with_recurrent_layers():
    return recurrent_model("qwen3.5"), {}


def quantised_here():
    return tiny_model("llama"), {"quantization": "int8"}


def without_room():
    target = tiny_model("llama")
    settings = {"kv_cache_tokens": 64, "max_batch_size": 1, "max_prefill_tokens": 1}
    terms = sd.Engine(target, None, memory_bytes=10**7, **settings).memory_plan.terms
    return target, {**settings, "memory_bytes": sum(terms.values()) + 1000}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (with_recurrent_layers, "advance the states of its recurrent layers"),
        (quantised_here, r"the target is quantised already \(int8\)"),
        (without_room, r"memory_bytes=\d+ has no room for a copy"),
    ],
)
def test_a_target_that_no_copy_drafts_for_is_not_timed(make, why, monkeypatch):
    target, settings = make()
    monkeypatch.setattr(auto, "forward_seconds", None)
    choice = sd.Engine(target, "auto", **settings).draft_choice
    assert choice.name == "ngram"
    assert re.search(why, choice.why)


def test_processes_that_share_a_target_choose_alike(model, monkeypatch):
    take_for_sharded(monkeypatch)
    monkeypatch.setattr(auto, "forward_seconds", None)
    assert sd.Engine(model, "auto").drafter.name == "ngram"


def test_no_draft_tokens_are_no_drafter(model):
    engine = sd.Engine(model, "auto", num_draft_tokens=0)
    assert engine.drafter.name == "none"
    assert engine.describe()["why_drafter"] is None


def test_settings_of_drafters_are_refused(model):
    with pytest.raises(sd.ConfigError, match="draft_quantization='int4' has no effect with draft='auto'"):
        sd.Engine(model, "auto", draft_quantization="int4")


def test_a_misspelt_word_is_compared_with_it(model):
    with pytest.raises(sd.ConfigError, match="did you mean 'auto'"):
        sd.Engine(model, "atuo")


def test_generate_plans_for_as_many_sequences_as_it_has_texts(seconds, tmp_path, capsys):
    seconds(waits_for_weights, lambda n: 0.003)
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "One day"}\n{"prompt": "A bird"}\n')
    target = str(demo_pair() / "target")
    out = str(tmp_path / "out.jsonl")
    options = ["--draft", "auto", "--prompts", str(prompts), "--output", out, "--max-new-tokens", "4"]
    assert main(["generate", "--target", target, *options]) == 0
    printed = capsys.readouterr().err
    assert "--draft auto: self:int4, because with a copy of the target in 4 bits, at batch size 2" in printed
