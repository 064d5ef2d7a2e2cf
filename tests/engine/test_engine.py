"""``Engine``: order of outputs, queueing, pages, streams, failures of single requests."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

import specdec_fast as sd
from specdec_fast.engine.input import RequestBuilder
from support.demo import MAX_NEW_TOKENS
from support.grids import grid
from support.models import tiny_model

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS)


@pytest.fixture(scope="module", params=["eqspec", "exspec"])
def engine(request, target, draft, tokenizer):
    return sd.Engine(target, draft, method=request.param, max_batch_size=4, tokenizer=tokenizer)


class TestScheduling:
    def test_outputs_come_in_input_order(self, engine, prompt_ids, expected):
        order = sorted(range(len(prompt_ids)), key=lambda i: -len(prompt_ids[i]))
        outputs = engine.generate([prompt_ids[i] for i in order], PARAMS)
        assert [o.index for o in outputs] == list(range(len(order)))
        assert [o.prompt_ids for o in outputs] == [prompt_ids[i] for i in order]
        assert [o.token_ids for o in outputs] == [expected[i] for i in order]

    @pytest.mark.parametrize("method", ["eqspec", "exspec"])
    def test_small_pool_makes_sequences_wait(self, target, draft, prompt_ids, expected, method):
        largest = max(map(len, prompt_ids)) + MAX_NEW_TOKENS
        engine = sd.Engine(target, draft, method=method, max_batch_size=8, kv_cache_tokens=largest)
        outputs = engine.generate(prompt_ids, PARAMS)
        assert [o.token_ids for o in outputs] == expected
        assert engine.last_run.num_sequence_steps < 8 * engine.last_run.num_steps, "no sequence had to wait"
        assert engine.core.pool.num_free_pages == engine.core.pool.num_pages
        assert engine.drafter.pool.num_free_pages == engine.drafter.pool.num_pages

    def test_finished_sequences_leave_the_batch_at_once(self, target, draft, prompt_ids):
        params = [sd.SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (1, 1, 1, 30)]
        engine = sd.Engine(target, draft, method="eqspec", max_batch_size=4)
        engine.generate(prompt_ids[:4], params)
        assert engine.last_run.num_sequence_steps == engine.last_run.num_steps + 3

    @pytest.mark.parametrize("draft_name", grid(["model", "ngram"], keep=["model"]))
    def test_every_prompt_token_is_computed_once(self, target, draft, prompt_ids, draft_name, monkeypatch):
        """A sequence that joins late makes no other prefill again, neither in the target nor in the draft model."""
        engine = sd.Engine(target, draft if draft_name == "model" else "ngram", max_batch_size=2, num_draft_tokens=3)
        models = [engine.target] + ([engine.drafter.model] if draft_name == "model" else [])
        computed = {model: [] for model in models}
        for model in models:

            def forward(batch, *rest, model=model, original=model.forward):
                computed[model] += batch.positions.tolist()[: len(batch.token_ids)]  # padding is no sequence's token
                return original(batch, *rest)

            def verify(spans, *rest, model=model, original=model.program and model.program.verify):
                computed[model] += [start + i for _, start, count, *_ in spans.spans for i in range(count)]
                return original(spans, *rest)

            def draft_tokens(spans, ids, counts, *rest, model=model, original=model.program and model.program.draft):
                both = zip(spans.spans, counts, strict=True)
                computed[model] += [start + i for (_, start, count, *_), k in both for i in range(count + k - 1)]
                return original(spans, ids, counts, *rest)

            monkeypatch.setattr(model, "forward", forward)
            if model.program:
                monkeypatch.setattr(model.program, "verify", verify)
                monkeypatch.setattr(model.program, "draft", draft_tokens)
        outputs = engine.generate(prompt_ids, PARAMS)
        for model in models:
            # position 0 belongs to prompts only: as many rows there as there are sequences
            assert computed[model].count(0) == len(prompt_ids)
        stats = engine.last_run.decoding
        prompt_rows = sum(len(o.prompt_ids) - 1 for o in outputs)
        assert len(computed[engine.target]) == prompt_rows + stats.num_steps + stats.num_draft_tokens
        if draft_name == "model":
            # one row per draft token, and per full acceptance one more to catch up
            assert len(computed[engine.drafter.model]) <= prompt_rows + stats.num_draft_tokens + stats.num_steps

    def test_engine_is_reusable_and_grows_its_pool(self, target, draft, prompt_ids, expected):
        engine = sd.Engine(target, draft)
        engine.generate(prompt_ids[2:4], PARAMS)
        small = engine.core.pool.num_pages
        assert [o.token_ids for o in engine.generate(prompt_ids, PARAMS)] == expected
        assert engine.core.pool.num_pages > small

    def test_one_params_each(self, engine, prompt_ids, expected):
        lengths = [3, 1, 9, 5]
        outputs = engine.generate(prompt_ids[:4], [sd.SamplingParams(max_new_tokens=n) for n in lengths])
        assert [o.token_ids for o in outputs] == [tokens[:n] for tokens, n in zip(expected, lengths, strict=False)]

    def test_no_prompts(self, engine):
        assert engine.generate([]) == []

    def test_models_are_left_as_they_were(self, target, engine, prompt_ids):
        before = target.config._attn_implementation
        engine.generate(prompt_ids[:2], PARAMS)
        assert target.config._attn_implementation == before


class TestStream:
    def test_chunks_add_up_to_outputs(self, engine, prompts):
        whole = engine.generate(prompts[:6], PARAMS)
        tokens, texts, reasons = [[] for _ in whole], ["" for _ in whole], [None for _ in whole]
        for chunk in engine.stream(prompts[:6], PARAMS):
            assert reasons[chunk.index] is None, "a chunk after the last"
            tokens[chunk.index] += chunk.token_ids
            texts[chunk.index] += chunk.text
            reasons[chunk.index] = chunk.finish_reason
        assert tokens == [o.token_ids for o in whole]
        assert texts == [o.text for o in whole]
        assert reasons == [o.finish_reason for o in whole]

    def test_outputs_come_as_they_are_completed(self, engine, prompt_ids):
        lengths = [30, 1, 12, 4]
        params = [sd.SamplingParams(max_new_tokens=length, ignore_eos=True, logprobs=True) for length in lengths]
        whole = engine.generate(prompt_ids[:4], params)
        found = list(engine.as_completed(prompt_ids[:4], params))
        assert [o.index for o in found] == [1, 3, 2, 0]
        for output in found:
            expected = whole[output.index]
            assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
            assert output.logprobs == expected.logprobs
        outputs = engine.as_completed([[5], [], [6]], PARAMS)
        assert next(outputs).index == 1, "a prompt that cannot be served has ended at once"
        outputs.close()
        assert engine.core.pool.num_free_pages == engine.core.pool.num_pages

    def test_prompts_are_encoded_shortly_before_their_turn(self, engine, prompts, monkeypatch):
        """Whatever their number; so the first output of many prompts comes at once, and outputs stay the same."""
        params = [sd.SamplingParams(max_new_tokens=3 + i % 4, temperature=0.8) for i in range(60)]
        many, encoded = (prompts * 3)[:60], []
        torch.manual_seed(5)
        whole = engine.generate(many, params)
        run, build = engine.last_run, RequestBuilder.build

        def noted(self, index, *args):
            encoded.append(index)
            return build(self, index, *args)

        monkeypatch.setattr(RequestBuilder, "build", noted)
        torch.manual_seed(5)
        outputs, found, ahead = engine.as_completed(many, params), [], 2 * engine.core.scheduler.max_resident
        assert not encoded
        for output in outputs:
            torch.rand(1)  # the caller's own draws do not change seeds
            found.append(output)
            assert len(encoded) <= len(found) + ahead + engine.config.max_batch_size
        assert encoded == list(range(60))
        found.sort(key=lambda output: output.index)
        assert [(o.token_ids, o.text, o.seed) for o in found] == [(o.token_ids, o.text, o.seed) for o in whole]
        assert engine.last_run.decoding.num_emitted_tokens == run.decoding.num_emitted_tokens

    def test_closing_returns_pages(self, engine, prompt_ids):
        stream = engine.stream(prompt_ids, PARAMS)
        next(stream)
        assert engine.core.pool.num_free_pages < engine.core.pool.num_pages
        stream.close()
        assert engine.core.pool.num_free_pages == engine.core.pool.num_pages
        assert engine.generate(prompt_ids[:1], PARAMS)[0].error is None

    def test_arguments_are_checked_at_the_call(self, engine):
        with pytest.raises(sd.ConfigError):
            engine.stream(5)


class TestOneBadRequest:
    """It gets a typed error; the other requests get the same outputs as without it."""

    @pytest.mark.parametrize(
        ("bad", "error", "message"),
        [
            ([], sd.InvalidPromptError, "no tokens"),
            ("", sd.InvalidPromptError, "empty string"),
            ([5, 1024], sd.InvalidPromptError, "token id 1024 is outside .* 0 to 1023"),
            ([5, -1], sd.InvalidPromptError, "token id -1"),
            ([5, "a"], sd.InvalidPromptError, "neither a string, nor a flat list of token ids"),
            ([7] * 513, sd.PromptTooLongError, "513 tokens.*512 positions.*at most 512"),
        ],
        ids=["no ids", "empty string", "id too large", "negative id", "not an id", "too long"],
    )
    def test_bad_prompt(self, engine, prompt_ids, expected, bad, error, message):
        outputs = engine.generate([prompt_ids[0], bad, prompt_ids[1]], PARAMS)
        assert [outputs[i].token_ids for i in (0, 2)] == expected[:2]
        assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
        with pytest.raises(error, match=message):
            outputs[1].raise_for_error()
        assert outputs[0].raise_for_error() is outputs[0]
        chunks = [c for c in engine.stream([prompt_ids[0], bad], PARAMS) if c.index == 1]
        assert [(c.finish_reason, type(c.error)) for c in chunks] == [("error", error)]

    def test_larger_than_the_pool(self, target, draft, prompt_ids, expected):
        engine = sd.Engine(target, draft, kv_cache_tokens=96)
        outputs = engine.generate([prompt_ids[4], prompt_ids[1], prompt_ids[5]], PARAMS)
        assert [outputs[i].token_ids for i in (0, 2)] == expected[4:6]
        with pytest.raises(
            sd.KVCacheTooSmallError, match=r"needs 240 KV positions.*whole pool has 96.*kv_cache_tokens"
        ):
            outputs[1].raise_for_error()

    @pytest.mark.parametrize(
        ("draft_name", "backend"),
        grid(product(["model", "ngram"], ["auto", "torch"]), keep=[("model", "auto"), ("ngram", "auto")]),
    )
    def test_nan_logits(self, target, draft, prompt_ids, expected, draft_name, backend):
        """One token's embedding is NaN: the one text with this token fails there, and no other text fails.

        The drafter may propose this token for other sequences too; the target rejects it there.
        """
        texts = [set(p + e) for p, e in zip(prompt_ids, expected, strict=True)]
        alone, victim = next(
            (i, token)
            for i, tokens in enumerate(expected)
            for token in tokens[2:]
            if token not in prompt_ids[i] and sum(token in text for text in texts) == 1
        )
        poisoned = copy.deepcopy(target)
        poisoned.lm_head.weight = torch.nn.Parameter(poisoned.lm_head.weight.detach().clone())  # no longer tied
        with torch.no_grad():
            poisoned.model.embed_tokens.weight[victim] = float("nan")
        engine = sd.Engine(poisoned, draft if draft_name == "model" else "ngram", max_batch_size=4, backend=backend)
        outputs = engine.generate(prompt_ids, PARAMS)
        failed = outputs[alone]
        assert [o.token_ids for o in outputs if o is not failed] == [
            tokens for i, tokens in enumerate(expected) if i != alone
        ]
        assert failed.token_ids == expected[alone][: expected[alone].index(victim) + 1]
        assert failed.finish_reason == "error"
        with pytest.raises(sd.InvalidLogitsError, match="NaN"):
            failed.raise_for_error()
        assert engine.core.pool.num_free_pages == engine.core.pool.num_pages

    def test_string_without_a_tokenizer(self):
        engine = sd.Engine(tiny_model("llama"), None)
        text, ids = engine.generate(["hello", [5]], sd.SamplingParams(max_new_tokens=2))
        assert isinstance(text.error, sd.InvalidPromptError)
        assert "pass tokenizer=" in str(text.error)
        assert (ids.text, len(ids.token_ids)) == (None, 2)
