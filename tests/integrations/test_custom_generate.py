"""``model.generate(custom_generate=custom_generate)`` returns what ``model.generate()`` returns."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation import BaseStreamer

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.integrations.transformers import custom_generate
from support.grids import grid
from support.models import CONFIGS, tiny_model, truncated_copy
from support.other_tokenizers import permuted
from support.padded import padded
from support.recurrent_models import recurrent_model

LIMIT = {"max_new_tokens": 40, "do_sample": False}


def both(model, batch, **arguments):
    """Return what ``generate`` makes of a call, and what the engine makes of it."""
    own = {name: arguments.pop(name) for name in ("draft", "num_draft_tokens", "assistant_model") if name in arguments}
    return model.generate(**batch, **arguments), model.generate(
        **batch, **arguments, **own, custom_generate=custom_generate
    )


@pytest.mark.parametrize("drafter", grid([None, "model", "ngram", "ngram-trie", "self"], ["model"]))
def test_a_batch_has_the_tokens_of_generate(target, draft, batch, drafter):
    expected, found = both(target, batch, draft=draft if drafter == "model" else drafter, **LIMIT)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_an_assistant_model_drafts_and_so_does_prompt_lookup(target, draft, batch):
    expected = target.generate(**batch, **LIMIT)
    with_model = target.generate(**batch, **LIMIT, custom_generate=custom_generate, assistant_model=draft)
    assert engine_of(target).drafter.model.model is draft
    lookup = target.generate(**batch, **LIMIT, custom_generate=custom_generate, prompt_lookup_num_tokens=3)
    assert engine_of(target).describe()["drafter"] == "ngram"
    assert engine_of(target).config.num_draft_tokens == 3
    assert with_model.tolist() == lookup.tolist() == expected.tolist()


def test_an_assistant_model_may_have_another_tokenizer(target, draft, tokenizer, batch):
    model, other = permuted(draft)
    tokenizers = {"target_tokenizer": tokenizer, "draft_tokenizer": other}
    expected = target.generate(**batch, **LIMIT)
    options = {"custom_generate": custom_generate, "assistant_model": model}
    for _ in range(2):
        assert target.generate(**batch, **LIMIT, **options, **tokenizers).tolist() == expected.tolist()
    engine = engine_of(target)
    assert engine.describe()["draft"]["translation"] == "tokens"
    target.generate(**batch, **LIMIT, **options, target_tokenizer=tokenizer)  # the model alone looks like a sibling
    assert engine_of(target) is not engine
    assert "translation" not in engine_of(target).describe()["draft"]


def engine_of(model):
    return vars(model)["_specdec_fast_engine"]._kept.engine


@pytest.mark.parametrize("architecture", grid(list(CONFIGS), ["gemma2"]))
def test_every_architecture_has_the_tokens_of_generate(architecture):
    model = tiny_model(architecture)
    batch = padded([[3, 17, 5, 9, 3], [41], list(range(20, 40))], pad=0)
    expected, found = both(model, batch, draft=truncated_copy(model, 2), max_new_tokens=16, pad_token_id=0)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("architecture", grid(["qwen3-next", "mamba2"], []))
def test_recurrent_models_have_the_tokens_of_generate(architecture):
    """Of one row, because transformers lets padding pass through some recurrent layers."""
    model = recurrent_model(architecture)
    batch = padded([[3, 17, 5, 9, 3]])
    expected, found = both(model, batch, draft="ngram", max_new_tokens=16, eos_token_id=None)
    assert found.tolist() == expected.tolist()


@pytest.mark.grid
def test_padding_may_be_on_any_side(target, prompt_ids):
    """``generate`` continues padding on the right; the engine reads the mask, and returns ids as they were given."""
    rows = [prompt_ids[i] for i in (0, 2, 5)]
    left, right = padded(rows), padded(rows, side="right")
    expected = target.generate(**left, **LIMIT)
    found = target.generate(**right, **LIMIT, custom_generate=custom_generate)
    width = left["input_ids"].shape[1]
    assert found[:, width:].tolist() == expected[:, width:].tolist()
    assert torch.equal(found[:, :width], right["input_ids"])


@pytest.mark.grid
def test_padding_that_equals_eos_needs_its_mask_only(target, prompt_ids):
    batch = padded([prompt_ids[0], prompt_ids[5]], pad=1)
    expected, found = both(target, batch, pad_token_id=1, **LIMIT)
    assert found.tolist() == expected.tolist()


@pytest.mark.grid
def test_one_row_needs_no_mask_and_no_config(target, prompt_ids):
    ids = torch.tensor([prompt_ids[0]])
    expected, found = both(target, {"inputs": ids})
    assert found.tolist() == expected.tolist()
    assert found.shape[1] == len(prompt_ids[0]) + 20  # the default of transformers


SETTINGS = {
    "several EOS": {"eos_token_id": [1, 14, 16]},
    "no EOS": {"eos_token_id": None, "max_new_tokens": 12},
    "max_length": {"max_length": 50},
    "min_new_tokens": {"min_new_tokens": 30},
    "min_length": {"min_length": 60},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[14], [16, 272]], "suppress_tokens": [269]},
    "a bias of a word": {"sequence_bias": [[[14], -4.0], [[400, 459], 6.0]]},
    "a bias and a penalty": {"sequence_bias": [[[14], -4.0]], "repetition_penalty": 1.2},
    "begin_suppress_tokens": {"begin_suppress_tokens": [482, 14]},
    "forced_eos_token_id": {"forced_eos_token_id": 1, "max_new_tokens": 10},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [14, 16, 269 + row, 400, 459]},
    "no cache": {"use_cache": False, "max_new_tokens": 4},
    "a config": {"generation_config": GenerationConfig(max_new_tokens=17, repetition_penalty=1.1, pad_token_id=7)},
    "max_time": {"max_time": 3600.0},
}
RUN_OFTEN = ("a bias and a penalty",)


@pytest.mark.parametrize("setting", grid(list(SETTINGS), RUN_OFTEN))
def test_settings_of_generate(target, draft, batch, setting):
    asked = {"do_sample": False} | SETTINGS[setting]
    if not {"max_length", "generation_config"} & set(asked):
        asked = {"max_new_tokens": 40} | asked
    expected, found = both(target, batch, draft=draft, **asked)
    assert found.tolist() == expected.tolist()


class Downweight(LogitsProcessor):
    """A processor of the caller's own, whose result depends on the length as well."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 14 + input_ids.shape[1] % 5] -= 5.0
        return scores


@pytest.mark.parametrize("draft", grid(["ngram", "ngram-trie"], ["ngram-trie"]))
@pytest.mark.parametrize(
    "others", grid({"alone": {}, "both": {"repetition_penalty": 1.2, "bad_words_ids": [[16]]}}, ["both"])
)
def test_processors_of_the_caller_apply_behind_those_of_generate(target, batch, others, draft):
    processors = LogitsProcessorList([Downweight()])
    expected, found = both(target, batch, draft=draft, logits_processor=processors, **others, **LIMIT)
    assert found.tolist() == expected.tolist()


def test_stop_strings_are_criteria(target, draft, batch, tokenizer):
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, ["the", "."])])
    expected, found = both(target, batch, draft=draft, stopping_criteria=criteria, **LIMIT)
    assert found.tolist() == expected.tolist()
    assert (found[:, -1] == 2).any()


class EveryThird(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids.shape[1] % 7 == 0) & (input_ids[:, -1] % 3 == 0)


@pytest.mark.parametrize("draft", grid(["ngram", "ngram-trie"], []))
def test_criteria_of_the_caller(target, batch, draft):
    criteria = StoppingCriteriaList([EveryThird()])
    expected, found = both(target, batch, draft=draft, stopping_criteria=criteria, **LIMIT)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("draft", grid(["ngram", "ngram-trie"], ["ngram-trie"]))
@pytest.mark.parametrize(
    "asked", grid({"alone": {}, "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}}, ["both"])
)
def test_scores_and_logits_are_those_of_generate(target, batch, asked, draft):
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, found = both(target, batch, draft=draft, **wanted, **asked, **LIMIT)
    assert type(found) is type(expected)
    assert found.sequences.tolist() == expected.sequences.tolist()
    width = batch["input_ids"].shape[1]
    ended = torch.zeros(len(found.sequences), dtype=torch.bool)
    assert len(found.scores) == len(expected.scores) == len(found.logits) == found.sequences.shape[1] - width
    for step in range(len(found.scores)):
        for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
            torch.testing.assert_close(ours[step][~ended], theirs[step][~ended], atol=1e-3, rtol=1e-3)
            assert not ours[step][ended].any()
        ended |= found.sequences[:, width + step] == 1
    assert ended.any()
    transitions = target.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    assert torch.isfinite(transitions).all()


@pytest.mark.grid
def test_a_dictionary_without_scores(target, batch):
    expected, found = both(target, batch, return_dict_in_generate=True, **LIMIT)
    assert type(found) is type(expected)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.scores is None
    assert found.past_key_values is None


class Noting(BaseStreamer):
    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.puts.append("end")


def test_a_streamer_receives_what_generate_puts(target, draft, batch):
    streamers = Noting(), Noting()
    expected = target.generate(**batch, **LIMIT, streamer=streamers[0])
    arguments = {**batch, **LIMIT, "streamer": streamers[1], "assistant_model": draft}
    found = target.generate(**arguments, custom_generate=custom_generate)
    assert found.tolist() == expected.tolist()
    assert streamers[1].puts == streamers[0].puts


@pytest.mark.grid
def test_text_is_streamed(target, draft, prompt_ids, tokenizer, capsys):
    batch = padded([prompt_ids[0]])
    texts = []
    for options in ({}, {"custom_generate": custom_generate, "draft": draft}):
        target.generate(**batch, **LIMIT, **options, streamer=TextStreamer(tokenizer))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


class TestSampling:
    ASKED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 12}  # noqa: RUF012

    def sampled(self, target, batch, **options):
        return target.generate(**batch, **self.ASKED, **options, custom_generate=custom_generate).tolist()

    @pytest.mark.grid
    def test_the_global_seed_draws_the_same_tokens_with_every_drafter(self, target, draft, batch):
        found = []
        for drafter in (None, draft, "ngram"):
            torch.manual_seed(7)
            found.append(self.sampled(target, batch, draft=drafter))
        assert found[0] == found[1] == found[2]
        assert self.sampled(target, batch) != found[0]

    @pytest.mark.grid
    def test_a_generator_draws_the_seeds(self, target, batch):
        one, again = (self.sampled(target, batch, generator=torch.Generator().manual_seed(3)) for _ in range(2))
        assert one == again

    @pytest.mark.grid
    def test_rows_of_one_prompt_differ(self, target):
        rows = self.sampled(target, padded([[0, 472, 379, 14]]), num_return_sequences=8)
        assert len(set(map(tuple, rows))) > 1

    @pytest.mark.grid
    def test_processors_that_are_called_give_the_law_of_parameters(self, target, batch):
        """With scores, transformers' own warpers make the distribution; the noise is the same."""
        found = []
        for wanted in ({}, {"return_dict_in_generate": True, "output_scores": True}):
            arguments = {**batch, **self.ASKED, **wanted, "generator": torch.Generator().manual_seed(5)}
            output = target.generate(**arguments, custom_generate=custom_generate)
            found.append((output.sequences if wanted else output).tolist())
        assert found[0] == found[1]


@pytest.mark.grid
def test_seeds_follow_the_law_of_generate(target):
    """2,000 draws of one token each, against the probabilities that ``generate`` would sample from."""
    prompt = torch.tensor([[0, 472, 379, 14, 261]])
    asked = {"do_sample": True, "top_k": 4, "temperature": 1.5, "max_new_tokens": 1}
    torch.manual_seed(0)
    drawn = target.generate(prompt, **asked, num_return_sequences=2000, custom_generate=custom_generate)[:, -1]
    scores = target.generate(prompt, **asked, return_dict_in_generate=True, output_scores=True).scores[0][0]
    expected = 2000 * scores.softmax(dim=0)
    counts = drawn.bincount(minlength=len(scores))
    assert not counts[expected == 0].any()
    likely = expected > 0
    statistic = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert statistic < 21.1  # of chi-squared with 3 degrees of freedom, exceeded once in 10,000 times


FOLDER = "examples/custom_generate"


class TestFolder:
    """The layout of transformers' hub: ``examples/custom_generate/custom_generate/generate.py``."""

    @pytest.fixture(autouse=True)
    def _modules(self, monkeypatch, tmp_path):
        from transformers import dynamic_module_utils

        from support.source_tree import ROOT

        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", "")
        self.folder = str(ROOT / FOLDER)

    def test_it_decodes(self, target, draft, batch):
        expected = target.generate(**batch, **LIMIT)
        found = target.generate(
            **batch, **LIMIT, assistant_model=draft, custom_generate=self.folder, trust_remote_code=True
        )
        assert found.tolist() == expected.tolist()

    def test_it_serves_an_assistant_with_another_tokenizer(self, target, draft, tokenizer, batch):
        model, other = permuted(draft)
        tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": other}
        options = {"custom_generate": self.folder, "trust_remote_code": True}
        expected = target.generate(**batch, **LIMIT)
        found = target.generate(**batch, **LIMIT, assistant_model=model, **tokenizers, **options)
        assert found.tolist() == expected.tolist()
        assert engine_of(target).describe()["draft"]["translation"] == "tokens"

    @pytest.mark.grid
    def test_it_serves_stop_strings(self, target, batch, tokenizer):
        asked = {**batch, **LIMIT, "stop_strings": ["the"], "tokenizer": tokenizer}
        expected = target.generate(**asked)
        options = {"custom_generate": self.folder, "trust_remote_code": True, "draft": "ngram"}
        assert target.generate(**asked, **options).tolist() == expected.tolist()
        config = GenerationConfig(max_new_tokens=40, stop_strings=["the"])
        found = target.generate(**batch, generation_config=config, tokenizer=tokenizer, **options)
        assert found.tolist() == expected.tolist()
        assert config.stop_strings == ["the"]

    @pytest.mark.grid
    def test_streams_put_the_prompt_once(self, target, batch):
        streamers = Noting(), Noting()
        target.generate(**batch, **LIMIT, streamer=streamers[0])
        options = {"custom_generate": self.folder, "trust_remote_code": True}
        target.generate(**batch, **LIMIT, streamer=streamers[1], **options)
        assert streamers[1].puts == streamers[0].puts

    @pytest.mark.grid
    def test_it_is_the_generate_of_a_model_whose_folder_has_it(self, target, batch):
        """``from_pretrained(trust_remote_code=True)`` replaces ``model.generate`` by it."""
        model = AutoModelForCausalLM.from_pretrained(demo_pair() / "target", dtype=torch.float32).eval()
        model.generate = partial(model.load_custom_generate(self.folder, trust_remote_code=True), model=model)
        expected = target.generate(**batch, **LIMIT)
        assert model.generate(**batch, **LIMIT, draft="ngram").tolist() == expected.tolist()
        assert model.generate(batch["input_ids"], **LIMIT).tolist() == expected.tolist()


@pytest.mark.grid
def test_long_texts_end_at_the_last_position():
    """As an engine does; ``generate`` warns, and computes positions that the model was not made for."""
    model = tiny_model("llama")
    batch = padded([[3, 17, 5]])
    found = model.generate(**batch, max_new_tokens=400, custom_generate=custom_generate)
    assert found.shape[1] == model.config.max_position_embeddings + 1


@pytest.mark.grid
def test_threads_share_the_engine(target, draft, prompt_ids):
    from concurrent.futures import ThreadPoolExecutor

    batches = [padded([prompt_ids[i], prompt_ids[i + 1]]) for i in range(6)]
    expected = [target.generate(**each, **LIMIT).tolist() for each in batches]
    options = {**LIMIT, "custom_generate": custom_generate, "draft": draft}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda each: target.generate(**each, **options).tolist(), batches))
    assert found == expected


@pytest.mark.grid
def test_settings_of_the_engine(target, draft, batch):
    expected = target.generate(**batch, **LIMIT)
    config = sd.EngineConfig(max_batch_size=2, num_draft_tokens=2, prefix_cache=True)
    found = target.generate(**batch, **LIMIT, custom_generate=custom_generate, draft=draft, engine_config=config)
    assert found.tolist() == expected.tolist()
    assert engine_of(target).config.max_batch_size == 2
