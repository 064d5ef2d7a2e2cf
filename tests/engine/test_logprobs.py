"""Log-probabilities: the target's own, one per emitted token, the same with and without speculation."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import specdec_fast as sd
from specdec_fast.engine import scores as scoring
from specdec_fast.engine.scores import token_scores
from support.demo import MAX_NEW_TOKENS
from support.grids import each_value_once, grid
from support.scripted import ByteTokenizer, scripted_model

PARAMS = sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, logprobs=True)


@torch.inference_mode()
def dense_logprobs(model, prompt, tokens):
    """Return the log-probabilities that ``transformers`` computes in one forward, in the model's dtype."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].double()


@pytest.fixture(scope="module")
def reference(target, prompt_ids, expected):
    """Return each prompt's log-probabilities in float64, and the largest error of ``transformers`` in float32."""
    exact_target = copy.deepcopy(target).double()
    texts = list(zip(prompt_ids, expected, strict=True))
    exact = [dense_logprobs(exact_target, *text) for text in texts]
    error = max(float((dense_logprobs(target, *t) - e).abs().max()) for t, e in zip(texts, exact, strict=True))
    assert error > 0
    return exact, error


# Plain decoding and every kind of drafter: the bound is on the distance to float64, so on that between them too.
@pytest.mark.parametrize(
    ("drafter", "num_draft_tokens", "method"),
    grid(
        [("none", 0, "eqspec"), ("model", 1, "exspec"), ("model", 5, "eqspec"), ("model", 5, "exspec"),
         ("ngram", 4, "exspec"), ("itself", 3, "eqspec")],
        keep=[("none", 0, "eqspec"), ("model", 5, "exspec"), ("itself", 3, "eqspec")],
    ),
)  # fmt: skip
def test_as_exact_as_transformers(target, draft, prompt_ids, expected, reference, drafter, num_draft_tokens, method):
    exact, error = reference
    drafts = {"none": None, "model": draft, "ngram": "ngram", "itself": target}
    options = {"num_draft_tokens": num_draft_tokens, "method": method, "max_batch_size": 4}
    outputs = sd.Engine(target, drafts[drafter], **options).generate(prompt_ids, PARAMS)
    assert [o.token_ids for o in outputs] == expected
    for output, logprobs in zip(outputs, exact, strict=True):
        assert len(output.logprobs) == len(output.token_ids)
        assert float((torch.tensor(output.logprobs, dtype=torch.float64) - logprobs).abs().max()) <= 2 * error


# Every id once, so that a row's logits have the same bits whatever rows are computed with it (see scripted_model).
NUM_TOKENS = 24
SCRIPT = list(range(1, NUM_TOKENS + 1))
VOCAB_SIZE = NUM_TOKENS + 1
TOKENIZER = ByteTokenizer([b"-", *(bytes([ord("a") + i]) for i in range(NUM_TOKENS))])


@pytest.fixture(scope="module")
def models():
    wrong_at_times = [0 if p % 3 == 2 else token for p, token in enumerate(SCRIPT)]
    return scripted_model(SCRIPT, VOCAB_SIZE), scripted_model(wrong_at_times, VOCAB_SIZE)


def run(models, params, draft=None, num_draft_tokens=4, method="exspec"):
    target, sometimes_wrong = models
    drafts = {None: None, "itself": target, "draft": sometimes_wrong, "ngram": "ngram"}
    options = {"num_draft_tokens": num_draft_tokens, "method": method, "max_batch_size": 3, "tokenizer": TOKENIZER}
    engine = sd.Engine(target, drafts[draft], **options)
    prompts = [[0] * n for n in (1, 4, 2, 9)]
    outputs, chunks = engine.generate(prompts, params), list(engine.stream(prompts, params))
    for output in outputs:
        own = [chunk for chunk in chunks if chunk.index == output.index]
        assert [t for chunk in own for t in chunk.token_ids] == output.token_ids
        if output.logprobs is None:
            assert all(chunk.logprobs is None for chunk in own)
        else:
            assert [p for chunk in own for p in chunk.logprobs] == output.logprobs
            assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in own)
            assert len(output.logprobs) == len(output.token_ids)
    return outputs


@each_value_once
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
@pytest.mark.parametrize("draft", ["itself", "draft", "ngram"])
@pytest.mark.parametrize("num_draft_tokens", range(1, 6))
def test_equal_logits_give_equal_bits(models, draft, num_draft_tokens, method):
    """Outputs end by length, a stop string or a stop id, for some K in the middle of a draft."""
    params = [
        sd.SamplingParams(max_new_tokens=15, logprobs=True),
        sd.SamplingParams(max_new_tokens=15, logprobs=True, stop="jk"),
        sd.SamplingParams(max_new_tokens=15, logprobs=True, stop_token_ids=[7]),
        sd.SamplingParams(max_new_tokens=3, logprobs=True),
    ]
    plain = run(models, params)
    assert [o.token_ids for o in plain] == [SCRIPT[:15], SCRIPT[3:11], SCRIPT[1:7], SCRIPT[8:11]]
    assert len(set(plain[0].logprobs)) == 15, "all differ, so that confused rows would be seen"
    assert plain[1].logprobs == plain[0].logprobs[3:11]
    outputs = run(models, params, draft, num_draft_tokens, method)
    assert [(o.token_ids, o.logprobs) for o in outputs] == [(o.token_ids, o.logprobs) for o in plain]


def test_only_requests_that_ask_get_them(models):
    params = [sd.SamplingParams(max_new_tokens=6, logprobs=asks) for asks in (False, True, False, True)]
    outputs = run(models, params, "draft")
    assert [o.logprobs is None for o in outputs] == [True, False, True, False]
    together = run(models, PARAMS, "draft")
    assert [outputs[i].logprobs for i in (1, 3)] == [together[i].logprobs[:6] for i in (1, 3)]


@pytest.mark.parametrize("most", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**63, 10**30])
def test_as_many_most_likely_tokens_as_there_are(models, most):
    """Beside it, a request that asks for few keeps them: none fails because another asks for more than there are."""
    params = [sd.SamplingParams(max_new_tokens=6, logprobs=k, prompt_logprobs=k) for k in (2, 2, most, most)]
    outputs = run(models, params, "draft")
    assert [output.error for output in outputs] == [None] * 4
    _, few, all_of_them, _ = outputs
    assert [len(top) for top in few.top_logprobs] == [2] * 6
    assert [len(top) for top in all_of_them.top_logprobs] == [VOCAB_SIZE] * 6
    assert [top and len(top) for top in all_of_them.prompt_top_logprobs] == [None, VOCAB_SIZE]
    assert [top and len(top) for top in few.prompt_top_logprobs] == [None, 2, 2, 2]


def test_one_look_up_per_step_and_none_where_no_request_asks(models, monkeypatch):
    num_rows = []

    def counted(logits, rows, tokens, *options):
        num_rows.append(len(rows))
        return token_scores(logits, rows, tokens, *options)

    monkeypatch.setattr(scoring, "token_scores", counted)
    engine = sd.Engine(*models, tokenizer=TOKENIZER)
    prompts = [[0] * 3] * 5
    (first, *_) = engine.generate(prompts, sd.SamplingParams(max_new_tokens=12, logprobs=True))
    assert len(num_rows) == engine.last_run.num_steps == first.stats.num_steps
    assert sum(num_rows) == len(prompts) * 12, "only rows of emitted tokens are looked at"
    num_rows.clear()
    engine.generate(prompts, sd.SamplingParams(max_new_tokens=12))
    assert not num_rows


@pytest.mark.parametrize("draft", [None, "itself", "draft"])
def test_no_logprob_for_a_token_that_could_not_be_chosen(models, draft):
    target, sometimes_wrong = copy.deepcopy(models[0]), models[1]
    with torch.no_grad():
        target.transformer.wpe.weight[12] = math.nan  # its logits there, and so the fifth row of this prompt
    (failed,) = sd.Engine(target, {None: None, "itself": models[0], "draft": sometimes_wrong}[draft]).generate(
        [[0] * 9], PARAMS
    )
    assert isinstance(failed.error, sd.InvalidLogitsError)
    assert failed.token_ids == SCRIPT[8:12]
    (whole,) = sd.Engine(models[0], None).generate([[0] * 9], PARAMS)
    assert failed.logprobs == whole.logprobs[:4]


def test_failed_before_its_first_token(models):
    (output,) = sd.Engine(models[0], None).generate([[-1]], PARAMS)
    assert (output.token_ids, output.logprobs, output.finish_reason) == ([], [], "error")


# A vocabulary below and above one vector block, and one of a size in use; rows of the dtypes models have.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 1000, 50_257])
def test_a_row_alone_has_the_bits_it_has_among_others(vocab_size, dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (8 * torch.randn(13, vocab_size, generator=generator)).to(dtype)
    tokens = torch.randint(0, vocab_size, (13,), generator=generator).tolist()
    together = token_scores(logits, list(range(13)), tokens).logprobs
    for i, token in enumerate(tokens):
        assert token_scores(logits[i : i + 1].clone(), [0], [token]).logprobs == together[i : i + 1]
    some = [11, 3, 4]
    assert token_scores(logits, some, [tokens[i] for i in some]).logprobs == [together[i] for i in some]
    assert len(set(together)) > 10
    exact = logits.double().log_softmax(dim=-1)[range(13), tokens]
    theirs = logits.float().log_softmax(dim=-1)[range(13), tokens].double()
    error = float((theirs - exact).abs().max())
    assert float((torch.tensor(together, dtype=torch.float64) - exact).abs().max()) <= 2 * error
