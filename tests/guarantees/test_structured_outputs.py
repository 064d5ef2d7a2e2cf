"""Outputs that follow a schema or a grammar: they validate, and have one text with and without speculation."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.request.token_masks import TokenMasks
from specdec_fast.structured_outputs.compiling import Grammars
from specdec_fast.structured_outputs.matcher import GrammarMask
from support.grids import grid
from support.schemas import SCHEMAS

xgrammar = pytest.importorskip("xgrammar")

PROMPT = "One day, a little bird"
GREEDY = sd.SamplingParams(max_new_tokens=200)
SAMPLED = replace(GREEDY, temperature=1.0, seed=7)
DRAFTERS = {
    "draft model": lambda draft: (draft, {"num_draft_tokens": 5}),
    "ngram": lambda draft: ("ngram", {"num_draft_tokens": 3}),
    "trees": lambda draft: (demo_pair() / "eagle3", {"num_draft_tokens": 4}),
    "adaptive": lambda draft: (draft, {"num_draft_tokens": "auto"}),
}
OTHER_KINDS = {
    "regex": {"regex": r"(north|south)-[0-9]{2,3}( east| west)?"},
    "choice": {"choice": ["a bird", "a big bird", "a dog"]},
    "grammar": {"grammar": 'root ::= item ("," item)*\nitem ::= "(" [a-z]+ ")"'},
    "json_object": {"json_object": True},
    "structural_tag": {
        "structural_tag": {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": SCHEMAS["a gas"]},
                "end": "</call>",
            },
        }
    },
}


@pytest.fixture(scope="module")
def plain(target, tokenizer):
    return sd.Engine(target, None, tokenizer=tokenizer, max_batch_size=8)


@pytest.fixture(scope="module")
def drafting(target, draft, tokenizer):
    return sd.Engine(target, draft, tokenizer=tokenizer, num_draft_tokens=5)


def asked(params, **fields):
    return replace(params, structured_outputs=fields)


def generate(engine, params):
    return engine.generate([PROMPT] * len(params), params, progress=False)


@pytest.fixture(scope="module", params=grid({"every 15th schema": 15, "all schemas": 1}, {"every 15th schema"}))
def names(request):
    return list(SCHEMAS)[:: request.param] * 2


@pytest.fixture(scope="module")
def requests(names):
    """Schemas, greedily and then sampled, with free and with fixed whitespace."""
    half = len(names) // 2
    return [
        asked(GREEDY if place < half else SAMPLED, json=SCHEMAS[name], disable_any_whitespace=place % 2 == 0)
        for place, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def expected(plain, requests):
    return generate(plain, requests)


def test_there_are_a_hundred_schemas():
    assert len(SCHEMAS) >= 100


def test_every_finished_output_validates(names, expected):
    finished = 0
    for name, output in zip(names, expected, strict=True):
        assert output.error is None, name
        if output.finish_reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(output.text), SCHEMAS[name])
    assert finished > 0.8 * len(names)


@pytest.mark.parametrize(
    "case", grid({f"{name}, batch {n}": (name, n) for name in DRAFTERS for n in (8, 3, 1)}, {"draft model, batch 8"})
)
def test_speculation_changes_no_text(target, draft, tokenizer, requests, expected, case):
    name, batch_size = case
    drafter, options = DRAFTERS[name](draft)
    engine = sd.Engine(target, drafter, tokenizer=tokenizer, max_batch_size=batch_size, **options)
    for output, other in zip(generate(engine, requests), expected, strict=True):
        assert (output.token_ids, output.text, output.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_other_kinds(plain, drafting, name):
    params = [asked(replace(each, max_new_tokens=60), **OTHER_KINDS[name]) for each in (GREEDY, SAMPLED)]
    outputs = generate(plain, params)
    assert [output.token_ids for output in generate(drafting, params)] == [output.token_ids for output in outputs]
    for output in outputs:
        assert output.error is None
        text = output.text
        if output.finish_reason != "stop":
            continue
        if name == "regex":
            assert re.fullmatch(OTHER_KINDS["regex"]["regex"], text)
        elif name == "choice":
            assert text in OTHER_KINDS["choice"]["choice"]
        elif name == "grammar":
            assert re.fullmatch(r"\([a-z]+\)(,\([a-z]+\))*", text)
        elif name == "json_object":
            assert isinstance(json.loads(text), dict)
        else:
            found = re.fullmatch("<call>(.*)</call>", text, re.DOTALL)
            jsonschema.validate(json.loads(found[1]), SCHEMAS["a gas"])


def masked_greedy(model, tokenizer, prompt, compiled, most):
    """Decode with transformers' forward and xgrammar alone, without anything of this library."""
    eos = model.generation_config.eos_token_id
    matcher = xgrammar.GrammarMatcher(compiled)
    words = xgrammar.allocate_token_bitmask(1, model.config.vocab_size)
    ids = tokenizer(prompt).input_ids
    emitted = []
    while len(emitted) < most and not matcher.is_terminated():
        logits = model(torch.tensor([ids + emitted])).logits[:, -1].float()
        logits[:, tokenizer.all_special_ids] = torch.where(
            torch.tensor(tokenizer.all_special_ids) == eos, logits[:, tokenizer.all_special_ids], -torch.inf
        )
        matcher.fill_next_token_bitmask(words)
        xgrammar.apply_token_bitmask_inplace(logits, words)
        emitted.append(int(logits.argmax()))
        assert matcher.accept_token(emitted[-1])
    return emitted


REFERENCES = {
    "a league": ("json", {**SCHEMAS["a vote"]}),
    "a route": ("json", SCHEMAS["a route"]),
    "a tree": ("json", SCHEMAS["a tree"]),
    "regex": ("regex", OTHER_KINDS["regex"]["regex"]),
    "grammar": ("grammar", OTHER_KINDS["grammar"]["grammar"]),
}


@torch.inference_mode()
def reference(model, tokenizer, kind, value):
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=model.config.vocab_size, stop_token_ids=[model.generation_config.eos_token_id]
    )
    compiler = xgrammar.GrammarCompiler(info)
    if kind == "json":
        compiled = compiler.compile_json_schema(json.dumps(value), any_whitespace=False)
    else:
        compiled = compiler.compile_regex(value) if kind == "regex" else compiler.compile_grammar(value)
    return masked_greedy(model, tokenizer, PROMPT, compiled, 40)


@pytest.mark.parametrize("name", REFERENCES)
def test_tokens_are_those_of_masked_logits(target, drafting, tokenizer, name):
    kind, value = REFERENCES[name]
    params = asked(replace(GREEDY, max_new_tokens=40), **{kind: value, "disable_any_whitespace": True})
    (output,) = generate(drafting, [params])
    assert output.token_ids == reference(target, tokenizer, kind, value)


def test_a_matcher_that_is_not_rolled_back_is_caught(target, drafting, tokenizer, monkeypatch):
    """A negative control of the tests above."""
    kind, value = REFERENCES["a route"]
    params = asked(replace(GREEDY, max_new_tokens=40), **{kind: value, "disable_any_whitespace": True})
    expected = reference(target, tokenizer, kind, value)
    monkeypatch.setattr(GrammarMask, "rollback", lambda self, count: None)
    (output,) = generate(drafting, [params])
    assert output.token_ids != expected


def test_a_text_ends_only_where_it_is_complete(plain):
    """EOS is the only token there, and is allowed nowhere before."""
    eos = min(plain.target.eos_token_ids)
    (output,) = generate(plain, [asked(GREEDY, regex="[ab]{5}")])
    assert re.fullmatch("[ab]{5}", output.text)
    assert output.token_ids[-1] == eos
    assert eos not in output.token_ids[:-1]
    (cut,) = generate(plain, [asked(replace(GREEDY, max_new_tokens=2), regex="[ab]{50}")])
    assert cut.finish_reason == "length"
    (stopped,) = generate(plain, [asked(replace(GREEDY, stop=("b",)), regex="a{3}b{50}")])
    assert (stopped.text, stopped.finish_reason) == ("aaa", "stop")


def test_one_wrong_request_ends_alone(plain):
    params = [
        asked(GREEDY, regex="a{3}"),
        asked(GREEDY, regex="(a"),
        asked(replace(GREEDY, ignore_eos=True), regex="a"),
        asked(replace(GREEDY, min_tokens=30), choice=["yes", "no"]),
        replace(GREEDY, max_new_tokens=5),
    ]
    good, wrong, endless, too_short, free = generate(plain, params)
    assert good.text == "aaa"
    assert isinstance(wrong.error, sd.GrammarError)
    assert isinstance(endless.error, sd.GrammarError)
    assert isinstance(too_short.error, sd.NoAllowedTokenError)
    assert free.error is None
    assert free.token_ids == generate(plain, params[-1:])[0].token_ids


def test_special_tokens_are_no_part_of_a_text(plain):
    """They have no text, so a text with one would not be what was asked for."""
    (output,) = generate(
        plain, [asked(replace(GREEDY, max_new_tokens=8, logit_bias={0: 100.0, 2: 100.0}), regex=".{9,}")]
    )
    assert not {0, 2} & set(output.token_ids)
    kept = asked(replace(GREEDY, skip_special_tokens=False, logit_bias={2: 100.0}), regex="(<pad>)+|a")
    (output,) = generate(plain, [kept])
    assert output.text.startswith("<pad>")


@pytest.mark.parametrize("stop", [(), "never written"], ids=["no stop strings", "a stop string"])
def test_the_token_that_ends_a_text_is_no_part_of_it(plain, drafting, tokenizer, stop):
    """Some tokenizers have an EOS that is no special token; here an ordinary token ends the text."""
    (end,) = tokenizer(" the", add_special_tokens=False).input_ids
    params = asked(replace(GREEDY, stop_token_ids=(end,), ignore_eos=True, stop=stop), choice=["yes", "no"])
    for engine in (plain, drafting):
        (output,) = generate(engine, [params])
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == end
        assert output.text in ("yes", "no")
        assert "".join(chunk.text for chunk in engine.stream(["x"], params)) in ("yes", "no")
    (free,) = plain.generate(["x"], replace(GREEDY, stop_token_ids=(end,), allowed_token_ids=(end,)), progress=False)
    assert free.text == " the", "a text without a grammar has it"


def test_what_is_forced_is_drafted_without_the_drafter(target, tokenizer):
    """Fewer steps, the same tokens; the n-gram drafter does not know the names of the properties."""
    schema = {"type": "object", "required": ["temperature_in_celsius", "is_available"], "properties": {
        "temperature_in_celsius": {"enum": [1, 2]}, "is_available": {"type": "boolean"},
    }}  # fmt: skip
    params = asked(GREEDY, json=schema, disable_any_whitespace=True)
    outputs = []
    for drafts_forced in (True, False):
        engine = sd.Engine(target, "ngram", tokenizer=tokenizer, num_draft_tokens=4)
        engine.core.drafting.drafts_forced = drafts_forced
        outputs += generate(engine, [params])
    forced, other = outputs
    assert forced.token_ids == other.token_ids
    assert forced.stats.num_steps < 0.7 * other.stats.num_steps
    (limited,) = generate(engine, [replace(params, num_draft_tokens=0)])
    assert limited.stats.num_draft_tokens == 0


def test_a_forced_text_is_drafted_with_its_end(tokenizer):
    """What must follow, in the tokenizer's tokens, and EOS after it; at most as many tokens as are asked for."""
    grammars = Grammars(tokenizer, 1024, [1])
    (mask,) = grammars.masks(sd.StructuredOutputs(regex="a bird( sings|)"), [1])
    words = tokenizer("a bird", add_special_tokens=False).input_ids
    assert mask.forced(9) == words
    assert mask.forced(1) == words[:1]
    (mask,) = grammars.masks(sd.StructuredOutputs(regex="a bird"), [1])
    assert mask.forced(9) == [*words, 1]
    assert all(mask.advance(token) for token in [*words, 1])
    assert mask.forced(9) == []


def test_masks_follow_the_emitted_tokens(plain):
    """A request whose pages are taken is prefilled again; its matcher goes on where it was."""
    params = [asked(replace(GREEDY, max_new_tokens=90), json=SCHEMAS["a route"])] * 6
    small = sd.Engine(plain.target.model, "ngram", tokenizer=plain.tokenizer, kv_cache_tokens=160, max_batch_size=6)
    outputs = generate(small, params)
    assert small.last_run.num_preemptions > 0
    assert {output.text for output in outputs} == {generate(plain, params[:1])[0].text}


def test_rows_are_those_of_the_path():
    """Every row of a chain and of a tree is the one of a matcher that has taken exactly its path."""
    vocabulary = [bytes([code]) for code in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("(ab|ac|b[xy]z)+")

    def row(path):
        mask = GrammarMask(compiled, [256], 257)
        assert all(mask.advance(token) for token in path)
        found = np.full(9, -1, np.int32)
        mask.fill(found)
        return found.tolist()

    masks = TokenMasks([GrammarMask(compiled, [256], 257)], 257)
    rows = np.full((7, 9), -1, np.int32)
    # a -> (b -> a, c), b -> x -> (not allowed)
    masks.fill_rows([*b"ab"], [*b"abacbx"], [-1, 0, 1, 0, -1, 4], rows)
    paths = [b"ab", b"aba", b"abab", b"ababa", b"abac", b"abb", b"abbx"]
    assert rows.tolist() == [row(path) for path in paths]
