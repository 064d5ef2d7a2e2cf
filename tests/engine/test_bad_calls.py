"""Calls that are wrong as a whole: a typed error before any work says what was passed and what to do."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch

import specdec_fast as sd
from specdec_fast import errors


def test_unknown_method_lists_the_known(target):
    with pytest.raises(sd.ConfigError, match=r"method='fast': expected one of eqspec, exspec"):
        sd.Engine(target, None, method="fast")


def test_unknown_keyword(target):
    with pytest.raises(sd.ConfigError, match=r"unknown keyword 'batch_size'.*max_batch_size"):
        sd.generate(target, None, [[1]], batch_size=4)


def test_unknown_draft(target):
    with pytest.raises(sd.ConfigError, match="draft is a int"):
        sd.Engine(target, 5)


def test_misspelt_drafter_is_not_looked_for_on_a_hub(target):
    with pytest.raises(sd.ConfigError, match=r"draft='n-gram': did you mean 'ngram'"):
        sd.Engine(target, "n-gram")


@pytest.mark.parametrize("wrong", [None, 5, b"model", "", [], {}, torch.zeros(1), torch.nn.Linear], ids=repr)
def test_object_that_is_no_target(wrong):
    with pytest.raises(sd.ConfigError, match=r"target is .*; expected the name or folder"):
        sd.Engine(wrong, None)


@pytest.mark.parametrize("wrong", [b"ngram", 5.0, {}, sd.Drafter, torch.zeros(1)], ids=repr)
def test_draft_is_looked_at_before_the_target_is_loaded(wrong):
    with pytest.raises(sd.ConfigError, match="draft is a "):
        sd.Engine("no/such-model", wrong)


@pytest.mark.parametrize("k", [5, "auto"])
def test_none_by_name_is_plain_decoding(target, k):
    engine = sd.Engine(target, "none", num_draft_tokens=k)
    assert engine.describe()["drafter"] == "none"
    params = sd.SamplingParams(max_new_tokens=4)
    (output,) = engine.generate([[5, 6]], params)
    assert output.token_ids == sd.Engine(target, None).generate([[5, 6]], params)[0].token_ids
    assert output.stats.num_drafts == 0


@pytest.mark.parametrize("config", [5, {"max_batch_size": 2}, sd.SamplingParams()], ids=repr)
def test_config_of_another_type(target, config):
    with pytest.raises(sd.ConfigError, match=r"config is a .*; expected an EngineConfig"):
        sd.Engine(target, None, config)


@pytest.mark.parametrize("wrong", [5, "gpt2", len], ids=repr)
def test_object_that_is_no_tokenizer(wrong):
    with pytest.raises(sd.ConfigError, match=r"tokenizer is a .*; expected a loaded tokenizer"):
        sd.Engine("no/such-model", None, tokenizer=wrong)


def test_every_error_is_exported():
    classes = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, sd.SpecDecError)]
    assert len(classes) > 15
    for error in classes:
        assert getattr(sd, error.__name__) is error
        assert error.__name__ in sd.__all__


class Encoding:
    """The bundled tokenizer, but it raises on one text."""

    def __init__(self, tokenizer, error):
        self.tokenizer, self.error, self.decode = tokenizer, error, tokenizer.decode

    def __call__(self, text):
        if text == "bad":
            raise self.error
        return self.tokenizer(text)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("bad"), ValueError("bad")], ids=repr)
def test_tokenizer_that_raises_on_one_prompt(target, tokenizer, error):
    engine = sd.Engine(target, None, tokenizer=Encoding(tokenizer, error))
    outputs = engine.generate(["Items:", "bad", "One day"], sd.SamplingParams(max_new_tokens=3))
    assert [o.finish_reason == "error" for o in outputs] == [False, True, False]
    assert [o.text for o in outputs] == [tokenizer.decode(o.token_ids, skip_special_tokens=True) for o in outputs]
    with pytest.raises(sd.InvalidPromptError, match=f"cannot encode the prompt: {type(error).__name__}"):
        outputs[1].raise_for_error()


@pytest.mark.parametrize("shown", [None, True])
@pytest.mark.parametrize("closed", [False, True])
def test_process_without_a_console(target, monkeypatch, shown, closed):
    stderr = None
    if closed:
        stderr = io.StringIO()
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    (output,) = sd.Engine(target, None).generate([[5]], sd.SamplingParams(max_new_tokens=2), progress=shown)
    assert output.error is None


@pytest.mark.parametrize("shown", [None, True])
def test_a_stderr_that_can_only_be_written_to(target, monkeypatch, shown):
    class Log:
        written = ""

        def write(self, text):
            self.written += text

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Log())
    (output,) = sd.Engine(target, None).generate([[5]], sd.SamplingParams(max_new_tokens=2), progress=shown)
    assert output.error is None
    assert ("generate" in sys.stderr.written) == bool(shown)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("max_new_tokens", r"'max_new_tokens' belongs to a request; pass params=SamplingParams\(max_new_tokens=...\)"),
        ("add_special_token", r"unknown keyword 'add_special_token'. Did you mean add_special_tokens\?"),
    ],
)
def test_a_keyword_of_another_place(target, keyword, message):
    engine = sd.Engine(target, None)
    for call in (engine.generate, engine.stream, engine.as_completed, engine.encode):
        with pytest.raises(sd.ConfigError, match=message):
            call([5], **{keyword: True})


def test_half_of_a_surrogate_pair_is_named(target, tokenizer):
    (output,) = sd.Engine(target, None, tokenizer=tokenizer).generate("One day, \ud83d")
    with pytest.raises(sd.InvalidPromptError, match=r"character 9, '\\ud83d', is half of a surrogate pair.*remove it"):
        output.raise_for_error()


def test_progress_is_a_flag(target):
    with pytest.raises(sd.ConfigError, match="progress='no'"):
        sd.Engine(target, None).generate([[5]], progress="no")


def test_number_of_params(target):
    with pytest.raises(sd.ConfigError, match="1 params for 2 prompts"):
        sd.Engine(target, None).generate([[5], [6]], [sd.SamplingParams()])


def test_negative_temperature():
    with pytest.raises(sd.InvalidParamsError, match=r"temperature=-0.5: expected"):
        sd.SamplingParams(temperature=-0.5)


def test_field_of_a_request_among_the_engines(target):
    with pytest.raises(sd.ConfigError, match=r"'max_new_tokens' belongs to a request; pass params=SamplingParams"):
        sd.generate(target, None, [[5]], max_new_tokens=3)


def test_pool_larger_than_memory(target):
    engine = sd.Engine(target, None, kv_cache_tokens=10**14)
    with pytest.raises(sd.KVCacheAllocationError, match=r"100000000000000 positions needs .* GiB.*kv_cache_tokens"):
        engine.generate([[5]])


class TestShapesOfPrompts:
    """Other types of prompts: a tokenizer's result, tensors, NumPy integers."""

    PARAMS = sd.SamplingParams(max_new_tokens=4)

    @pytest.fixture
    def engine(self, target):
        return sd.Engine(target, None)

    @pytest.mark.parametrize("tensors", [None, "pt"], ids=["lists", "tensors"])
    def test_tokenizer_result_without_its_padding(self, engine, tokenizer, tensors):
        texts = ["One day, a little bird", "Items: owl"]
        padded = tokenizer(texts, padding=True, return_tensors=tensors)
        outputs = engine.generate(padded, self.PARAMS)
        assert [o.prompt_ids for o in outputs] == [tokenizer(text).input_ids for text in texts]

    def test_one_encoded_text(self, engine, tokenizer):
        (output,) = engine.generate(tokenizer("Items: owl"), self.PARAMS)
        assert output.prompt_ids == tokenizer("Items: owl").input_ids

    def test_mapping_of_something_else(self, engine):
        with pytest.raises(sd.ConfigError, match="mapping of 'prompts'"):
            engine.generate({"prompts": ["a"]})

    @pytest.mark.parametrize(
        ("ids", "mask"),
        [([[5, 6]], [[1]]), ([[5, 6]], [[1, 1], [1, 1]]), ([5, 6], [1]), ([[5, 6]], 1), ([[5, 6]], [["1", "0"]]),
         ([[5, 6]], [[1, 2]]), (None, None), ("ab", None), (5, [[1]]), ([["a"]], [1]),
         (torch.tensor([[5, 6]]), torch.tensor([[1]])), (torch.zeros(1, 1, device="meta"), None)],
        ids=str,
    )  # fmt: skip
    def test_mapping_that_does_not_fit_together(self, engine, ids, mask):
        given = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
        with pytest.raises(sd.ConfigError, match=r"attention_mask|input_ids|cannot be read"):
            engine.generate(given)

    @pytest.mark.parametrize("prompts", [b"abc", bytearray(b"abc"), memoryview(b"abc")], ids=lambda p: type(p).__name__)
    def test_bytes_are_no_prompt(self, engine, prompts):
        with pytest.raises(sd.ConfigError, match=r"prompts is a \w+: decode\(\) it"):
            engine.generate(prompts)
        good, bad = engine.generate([[5], prompts], self.PARAMS)
        assert (good.error, bad.finish_reason) == (None, "error")
        with pytest.raises(sd.InvalidPromptError, match=r"decode\(\) it first"):
            bad.raise_for_error()

    @pytest.mark.parametrize(
        "prompt", [torch.zeros(2, device="meta"), torch.tensor([5, 6]).to_sparse()], ids=["meta", "sparse"]
    )
    def test_a_prompt_that_cannot_be_read_harms_no_other(self, engine, prompt):
        good, bad = engine.generate([[5], prompt], self.PARAMS)
        assert (good.error, bad.finish_reason) == (None, "error")
        with pytest.raises(sd.InvalidPromptError, match="a Tensor among the prompts cannot be read"):
            bad.raise_for_error()

    @pytest.mark.parametrize("kind", [set, frozenset])
    def test_set_has_no_order(self, engine, kind):
        with pytest.raises(sd.ConfigError, match=f"prompts is a {kind.__name__}: it has no order"):
            engine.generate(kind("ab"))

    @pytest.mark.parametrize("view", [dict.keys, dict.values], ids=["keys", "values"])
    def test_the_views_of_a_mapping_have_an_order(self, engine, view):
        texts = ["Items: owl", "One day"]
        outputs = engine.generate(view(dict(zip(texts, texts, strict=True))), self.PARAMS)
        assert [o.raise_for_error().prompt_ids for o in outputs] == [engine.encode(text) for text in texts]

    @pytest.mark.parametrize(
        "prompts",
        [torch.tensor([]), torch.empty(0, dtype=torch.int64), np.array([]), {"input_ids": torch.tensor([])}, [[]]],
        ids=["tensor", "integers", "array", "mapping", "list"],
    )
    def test_a_tensor_without_ids_is_a_prompt_without_tokens(self, engine, prompts):
        (output,) = engine.generate(prompts, self.PARAMS)
        with pytest.raises(sd.InvalidPromptError, match="the prompt has no tokens"):
            output.raise_for_error()

    @pytest.mark.parametrize("prompts", [torch.tensor([5.0, 6.0]), np.array([5.0, 6.0])], ids=["tensor", "array"])
    def test_a_tensor_of_fractions_is_one_wrong_prompt(self, engine, prompts):
        (output,) = engine.generate(prompts, self.PARAMS)
        with pytest.raises(sd.InvalidPromptError, match="neither a string, nor a flat list of token ids"):
            output.raise_for_error()

    @pytest.mark.parametrize("prompts", [[], (), np.array([], dtype=str), {"input_ids": []}], ids=str)
    def test_a_list_without_prompts(self, engine, prompts):
        assert engine.generate(prompts, self.PARAMS) == []

    def test_padded_tensor_without_its_mask(self, engine):
        with pytest.raises(sd.ConfigError, match="does not say which ids are padding"):
            engine.generate(torch.zeros(2, 3, dtype=torch.int64))

    @pytest.mark.parametrize(
        "prompts",
        [torch.tensor([0, 70]), np.array([0, 70]), [[np.int64(0), np.int32(70)]], [torch.tensor([0, 70])], (0, 70),
         [range(0, 71, 70)]],
        ids=["tensor", "array", "NumPy integers", "list of tensors", "tuple", "range"],
    )  # fmt: skip
    def test_integers_of_any_kind(self, engine, prompts):
        (output,) = engine.generate(prompts, self.PARAMS)
        assert output.raise_for_error().prompt_ids == [0, 70]
        assert all(type(token) is int for token in output.prompt_ids)
