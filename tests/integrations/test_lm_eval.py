"""lm-eval's ``specdec_fast`` has the scores and texts of its ``hf``, on local tasks in fp32."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import GenerationConfig

from specdec_fast.assets import demo_pair
from specdec_fast.errors import ConfigError, NotYetSupportedError

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from specdec_fast.integrations.lm_eval import EngineLM
from support.other_tokenizers import byte_level

pytestmark = pytest.mark.grid  # `make test-rest` installs the extra

TARGET = str(demo_pair() / "target")


@pytest.fixture(scope="module")
def theirs(target, tokenizer):
    return HFLM(pretrained=target, tokenizer=tokenizer, device="cpu", batch_size=4)


@pytest.fixture(scope="module", params=[None, "model"])
def ours(request, target, draft):
    return EngineLM(target, draft if request.param else None, batch_size=8)


def instances(kind, *arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def expect_same_scores(found, expected):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    torch.testing.assert_close([score for score, _ in found], [score for score, _ in expected], atol=1e-3, rtol=1e-4)


def test_scores_of_continuations(ours, theirs, prompts):
    """Of one token and of many, behind shared, empty and long contexts; some are what greedy decoding emits."""
    pairs = [
        (prompt, ending)
        for prompt in prompts[:6]
        for ending in (" the", " a little dog.", " named Tim went to the park")
    ]
    pairs += [
        ("", "Once upon a time"),
        ("Once", " upon a time there was a big dog who liked to run in the park all day" * 3),
    ]
    pairs += [("a bird " * 300, " sang"), ("One day, a little bird ", "named Tim")]
    requests = instances("loglikelihood", *pairs)
    expect_same_scores(
        ours.loglikelihood(requests, disable_tqdm=True), theirs.loglikelihood(requests, disable_tqdm=True)
    )


def test_scores_of_whole_texts(ours, theirs, prompts):
    """Some take several windows, whose last token has no position of its own."""
    length = theirs.max_length
    assert ours.max_length == length
    texts = [*prompts[:4], "a", " ".join(prompts)]
    assert len(theirs.tok_encode(texts[-1])) > 2 * length
    requests = instances("loglikelihood_rolling", *((text,) for text in texts))
    found = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    torch.testing.assert_close(found, theirs.loglikelihood_rolling(requests, disable_tqdm=True), atol=1e-3, rtol=1e-4)


def test_generated_texts(ours, theirs, prompts):
    asked = [
        {"until": ["."], "max_gen_toks": 24},
        {"until": ["the", "\n"], "max_gen_toks": 40, "do_sample": False},
        {"max_gen_toks": 12, "temperature": 0.0},
        {"until": [], "max_gen_toks": 16, "repetition_penalty": 1.3},
    ]
    requests = instances("generate_until", *((prompt, each) for prompt in prompts[:5] for each in asked))
    expected = theirs.generate_until(requests, disable_tqdm=True)
    assert ours.generate_until(requests, disable_tqdm=True) == expected
    assert len(set(expected)) > 8


def test_long_contexts_lose_their_beginnings(ours, theirs):
    requests = instances("generate_until", ("a bird sang. " * 200, {"max_gen_toks": 20}))
    assert ours.generate_until(requests) == theirs.generate_until(requests)


def test_the_models_own_config_applies(ours, theirs, target, monkeypatch, prompts):
    monkeypatch.setattr(target, "generation_config", GenerationConfig(repetition_penalty=1.4, eos_token_id=[1, 14]))
    monkeypatch.setattr(ours, "_generation_config", target.generation_config)
    requests = instances("generate_until", *((prompt, {"max_gen_toks": 24}) for prompt in prompts[:4]))
    assert ours.generate_until(requests) == theirs.generate_until(requests)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": p, "choices": [" the", " a dog", " named Tim"], "gold": i % 3} for i, p in enumerate(prompts[:8])]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}},
        "test_split": "test",
    }
    return [
        {
            **source,
            "task": "choose",
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "num_fewshot": 0,
        },
        {
            **source,
            "task": "perplexity",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        {
            **source,
            "task": "write",
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": " the",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def test_an_evaluation_has_the_results_of_hf(ours, theirs, tasks, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    manager = TaskManager(include_defaults=False)  # reading lm-eval's own tasks takes half a minute
    options = {"tasks": tasks, "task_manager": manager, "bootstrap_iters": 0}
    found, expected = (simple_evaluate(model=each, **options) for each in (ours, theirs))
    assert set(found["results"]) == {"choose", "perplexity", "write"}
    for task, results in expected["results"].items():
        for name, value in results.items():
            theirs_is_number = isinstance(value, float)
            assert found["results"][task][name] == (pytest.approx(value, rel=1e-4) if theirs_is_number else value)
    for task, samples in expected["samples"].items():
        assert len(samples) == len(found["samples"][task]) == 8


def test_it_is_made_of_the_arguments_of_the_command(prompts, tmp_path):
    arguments = f"pretrained={TARGET},draft={demo_pair() / 'draft'},dtype=float32,num_draft_tokens=3,max_gen_toks=7"
    byte_level(["one two"], 1024).save_pretrained(tmp_path)
    lm = get_model("specdec_fast").create_from_arg_string(
        f"{arguments},draft_tokenizer={tmp_path}",
        {"batch_size": "auto", "max_batch_size": 4, "device": "cpu"},
    )
    assert lm.engine.describe()["draft"]["translation"] == "text"
    assert lm.engine.config.num_draft_tokens == 3
    assert lm.engine.config.max_batch_size == 16
    (text,) = lm.generate_until(instances("generate_until", (prompts[0], {})))
    assert len(lm.tokenizer(text, add_special_tokens=False).input_ids) <= 7


def test_common_contexts_are_computed_once(ours, prompts):
    context = " ".join(prompts)[:900]
    requests = instances("loglikelihood", *((context, ending) for ending in (" the", " a", " dog", " bird")))
    ours.engine.reset_prefix_cache()
    ours.loglikelihood(requests, disable_tqdm=True)
    num_tokens = len(ours.tok_encode(context))
    assert ours.engine.last_run.num_cached_tokens >= 3 * (num_tokens - 16)
    assert ours.engine.last_run.num_steps <= 4


def test_what_a_task_may_not_ask(ours):
    requests = instances("generate_until", ("Once", {"num_beams": 4}))
    with pytest.raises(NotYetSupportedError, match="num_beams"):
        ours.generate_until(requests)
    with pytest.raises(NotYetSupportedError, match="num_beems"):
        ours.generate_until(instances("generate_until", ("Once", {"num_beems": 4})))
    with pytest.raises(ConfigError, match="lower max_gen_toks"):
        ours.generate_until(instances("generate_until", ("Once", {"max_gen_toks": 100_000})))
    with pytest.raises(ConfigError, match="0 tokens behind 1"):
        ours._loglikelihood_tokens([(None, [3], [])])


def test_an_unknown_setting():
    with pytest.raises(ConfigError, match="num_daft_tokens"):
        EngineLM(TARGET, num_daft_tokens=3)


def test_the_command():
    """It is lm-eval's own, and knows the model."""
    code = """
import atexit, runpy, sys
from lm_eval.api.registry import get_model
atexit.register(lambda: print(get_model("specdec_fast").__module__))
sys.argv[1:] = ["--help"]
runpy.run_module("specdec_fast.integrations.lm_eval", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage" in done.stdout
    assert done.stdout.endswith("specdec_fast.integrations.lm_eval.model\n")
