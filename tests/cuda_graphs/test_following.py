"""Plain steps launched before the tokens of the step before are read, as on a GPU: the same tokens, and no wait."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.errors import InvalidLogitsError, StepError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops.registry import all_ops
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner import verification
from support.grids import grid
from support.hybrid_programs import tiny_hybrid
from support.models import VOCAB_SIZE
from support.recording_drafter import hidden_states_of_text
from support.repeated import waits

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [40, 3, 3, 8]]
GREEDY = [sd.SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (14, 11, 2, 1, 18)]
SAMPLED = [replace(params, temperature=0.9, seed=seed) for seed, params in enumerate(GREEDY)]


@pytest.fixture(autouse=True)
def as_on_a_gpu(graphs_on_cpu, monkeypatch):
    monkeypatch.setattr(EngineCore, "launches_ahead", True)


def plain(model, params, monkeypatch, prompts=PROMPTS):
    """Return outputs of plain decoding whose every step is read before the next is launched."""
    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "launches_ahead", False)
        return sd.Engine(model, None, max_batch_size=1, enforce_eager=True).generate(prompts, params, progress=False)


def tokens_of(outputs):
    return [output.raise_for_error().token_ids for output in outputs]


def watched(engine, monkeypatch, on_launch=lambda is_following: None):
    """Return a list that gets "first" or "following" at every launch, and "read" when the host reads tokens."""
    verify_step = engine.target.verify_step
    to_host = verification.to_host
    noted = []

    def noting(*step, unread=None):
        noted.append("first" if unread is None else "following")
        on_launch(unread is not None)
        return verify_step(*step, unread=unread)

    def reading(results):
        noted.append("read")
        return to_host(results)

    monkeypatch.setattr(engine.target, "verify_step", noting)
    monkeypatch.setattr(verification, "to_host", reading)
    return noted


@pytest.mark.parametrize("eager", grid({"graphs": False, "eager": True}, keep=["graphs", "eager"]))
@pytest.mark.parametrize("params", grid({"greedy": GREEDY, "sampled": SAMPLED}, keep=["sampled"]))
def test_the_tokens_are_those_of_steps_that_wait(hugging_face_model, params, eager, monkeypatch):
    """Sequences end one after the other, and others take their places."""
    expected = tokens_of(plain(hugging_face_model, params, monkeypatch))
    engine = sd.Engine(hugging_face_model, None, max_batch_size=3, enforce_eager=eager)
    noted = watched(engine, monkeypatch)
    for _ in range(3):
        assert tokens_of(engine.generate(PROMPTS, params, progress=False)) == expected
    assert noted.count("following") > noted.count("first")
    assert bool(engine.describe()["graphs_captured"]) != eager


def test_a_step_is_read_when_the_next_has_been_launched(hugging_face_model, monkeypatch):
    """The last token of six is not followed: after it there is nothing to compute."""
    engine = sd.Engine(hugging_face_model, None)
    noted = watched(engine, monkeypatch)
    engine.generate([[5, 9, 2]], replace(GREEDY[0], max_new_tokens=6), progress=False)
    assert noted == ["first", *["following", "read"] * 5, "read"]


@pytest.mark.skipif(all_ops()["linear"].why_unavailable("cpp") is not None, reason="PyTorch's ops wait")
def test_its_launch_does_not_wait(hugging_face_model, monkeypatch):
    engine = sd.Engine(hugging_face_model, None, max_batch_size=3)
    verify_step = engine.target.verify_step
    found = []

    def watched_launch(*step, unread=None):
        with waits(monkeypatch) as waiting:
            launched = verify_step(*step, unread=unread)
        found.append(list(waiting))
        return launched

    monkeypatch.setattr(engine.target, "verify_step", watched_launch)
    engine.generate(PROMPTS, SAMPLED, progress=False)
    assert len(found) > 10
    assert not any(found), found


def test_sequences_that_stop_leave_a_following_step(hugging_face_model, monkeypatch):
    """Each stops at a token of its own, so its row of the step after that is dropped."""
    free = tokens_of(plain(hugging_face_model, SAMPLED, monkeypatch))
    params = [replace(p, stop_token_ids=(own[len(own) // 2],)) for p, own in zip(SAMPLED, free, strict=True)]
    expected = plain(hugging_face_model, params, monkeypatch)
    engine = sd.Engine(hugging_face_model, None, max_batch_size=3, page_size=4, prefix_cache=True)
    noted = watched(engine, monkeypatch)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, params, progress=False)
        assert tokens_of(outputs) == tokens_of(expected)
        assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]
    assert "stop" in {o.finish_reason for o in expected}
    assert "following" in noted
    assert engine.core.pool.is_vacant


def test_requests_join_and_leave_while_steps_follow(hugging_face_model, monkeypatch):
    engine = sd.Engine(hugging_face_model, None, max_batch_size=3, page_size=4)
    noted = watched(engine, monkeypatch)
    build = RequestBuilder(engine.target, None).build
    first, cancelled, late = requests = [build(i, PROMPTS[i], replace(SAMPLED[i], max_new_tokens=16)) for i in range(3)]
    expected = tokens_of(plain(hugging_face_model, [r.params for r in requests], monkeypatch, PROMPTS[:3]))
    core = engine.core
    core.add(first)
    to_cancel = core.add(cancelled)
    for _ in range(4):
        core.step()
    assert noted[-2:] == ["following", "read"]
    assert core.cancel(to_cancel)
    core.add(late)
    while core.has_work:
        assert all(output.request is not cancelled for output in core.step())
    assert [first.emitted_ids, late.emitted_ids] == [expected[0], expected[2]]
    assert cancelled.emitted_ids == expected[1][:4]
    assert core.pool.is_vacant


@pytest.mark.parametrize("name", grid(["qwen3", "qwen3_5"], keep=["qwen3", "qwen3_5"]))
def test_a_larger_request_joins_steps_that_follow(hugging_face_model, name, monkeypatch):
    """The pool, or its number of states, has room for the first request alone, and grows when the core admits it."""
    model = hugging_face_model if name == "qwen3" else tiny_hybrid(name)
    params = [replace(SAMPLED[0], max_new_tokens=12), replace(SAMPLED[1], max_new_tokens=40)]
    expected = tokens_of(plain(model, params, monkeypatch, PROMPTS[:2]))
    engine = sd.Engine(model, None, max_batch_size=3, page_size=4, method="exspec")
    noted = watched(engine, monkeypatch)
    build = RequestBuilder(engine.target, None).build
    first, larger = (build(i, PROMPTS[i], params[i]) for i in range(2))
    core = engine.core
    core.add(first)
    for _ in range(4):
        core.step()
    assert noted[-2:] == ["following", "read"]
    core.add(larger)
    core.step()
    core.step()
    assert larger.emitted_ids
    assert first.finish_reason is None
    while core.has_work:
        core.step()
    assert [first.emitted_ids, larger.emitted_ids] == expected


@pytest.mark.parametrize("name", grid(["qwen3", "qwen3_5"], keep=["qwen3_5"]))
def test_reading_a_following_step_fails_after_one_of_its_sequences_has_ended(hugging_face_model, name, monkeypatch):
    """Only the sequences that are left begin again."""
    model = hugging_face_model if name == "qwen3" else tiny_hybrid(name)
    free = tokens_of(plain(model, SAMPLED, monkeypatch))
    place = next(i for i in range(1, 10) if free[0][i] not in free[0][:i])
    params = [replace(SAMPLED[0], stop_token_ids=(free[0][place],)), SAMPLED[4]]
    prompts = [PROMPTS[0], PROMPTS[4]]
    expected = tokens_of(plain(model, params, monkeypatch, prompts))
    engine = sd.Engine(model, None, max_batch_size=2)
    to_host = verification.to_host
    reads = []

    def reading(results):
        reads.append(None)
        if len(reads) == place + 2:
            raise torch.OutOfMemoryError("no memory")
        return to_host(results)

    monkeypatch.setattr(verification, "to_host", reading)
    assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
    assert engine.last_run.num_out_of_memory == 1


def test_nan_logits_end_their_request_alone(hugging_face_model, monkeypatch):
    free = tokens_of(plain(hugging_face_model, SAMPLED, monkeypatch))
    poisoned = copy.deepcopy(hugging_face_model)
    others = {token for i, own in enumerate(free) if i != 4 for token in (*PROMPTS[i], *own)}
    place, poison = next((j, token) for j, token in enumerate(free[4]) if token not in {*others, *PROMPTS[4]})
    if poisoned.config.tie_word_embeddings:
        poisoned.lm_head.weight = torch.nn.Parameter(poisoned.lm_head.weight.detach().clone())
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[poison] = math.nan
    engine = sd.Engine(poisoned, None, max_batch_size=5)
    noted = watched(engine, monkeypatch)
    *good, bad = engine.generate(PROMPTS, SAMPLED, progress=False)
    assert tokens_of(good) == free[:4]
    assert isinstance(bad.error, InvalidLogitsError)
    assert bad.token_ids == free[4][: place + 1]
    assert "following" in noted


def failing(error, at):
    """Return what raises an error at one of the launches of following steps."""
    launches = []

    def on_launch(is_following):
        launches.extend([None] * is_following)
        if is_following and len(launches) == at:
            raise error

    return on_launch


@pytest.mark.parametrize("name", grid(["qwen3", "qwen3_5"], keep=["qwen3", "qwen3_5"]))
def test_a_following_step_without_memory_is_launched_again(hugging_face_model, name, monkeypatch):
    """States of recurrent layers may have advanced, so these sequences begin again."""
    model = hugging_face_model if name == "qwen3" else tiny_hybrid(name)
    expected = tokens_of(plain(model, SAMPLED, monkeypatch))
    engine = sd.Engine(model, None, max_batch_size=5)
    watched(engine, monkeypatch, failing(torch.OutOfMemoryError("no memory"), at=4))
    assert tokens_of(engine.generate(PROMPTS, SAMPLED, progress=False)) == expected
    assert engine.last_run.num_out_of_memory == 1


def test_another_error_ends_the_requests_after_the_tokens_before_it(hugging_face_model, monkeypatch):
    expected = tokens_of(plain(hugging_face_model, GREEDY, monkeypatch))
    engine = sd.Engine(hugging_face_model, None, max_batch_size=5)
    watched(engine, monkeypatch, failing(ValueError("broken"), at=4))
    with pytest.raises(ValueError, match="broken"):
        engine.generate(PROMPTS[:1], GREEDY[:1], progress=False)
    build = RequestBuilder(engine.target, None).build
    request = build(0, PROMPTS[0], GREEDY[0])
    core = engine.core
    core.add(request)
    watched(engine, monkeypatch, failing(ValueError("broken"), at=4))
    emitted = [token for _ in range(4) for output in core.step() for token in output.token_ids]
    assert emitted == expected[0][:4]
    with pytest.raises(ValueError, match="broken") as raised:
        core.step()
    core.drop_failed(raised.value)
    assert isinstance(request.error, StepError)
    assert core.pool.is_vacant


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@torch.inference_mode()
def test_a_following_step_has_hidden_states_of_its_own_rows(model, eager):
    """Those of prompts were rows of the step before, and their sequences do not have its tokens yet."""
    model.use_taps((1, "final"))
    if eager:
        model.use_these_graphs(None)
    pool = PagePool(model.layout, 64, 4, model.row_padding)
    sequences = [Sequence(i, list(PROMPTS[i]), len(PROMPTS[i]), 20, GREEDY[0], frozenset()) for i in range(2)]
    for sequence in sequences:
        pool.add(sequence)
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    first = model.verify_step(pool, sequences, none, [0, 0])
    following = model.verify_step(pool, sequences, none, [0, 0], unread=first.next_tokens)
    assert len(first.prompt_hidden_states) == len(PROMPTS[0]) - 1
    texts = [[*prompt, *emitted] for prompt, emitted in zip(PROMPTS, first.outcome().emissions, strict=False)]
    expected = torch.stack([hidden_states_of_text(model, text)[-1] for text in texts])
    assert torch.equal(following.hidden_states, expected)


@pytest.mark.parametrize("name", grid(["qwen3_5", "mamba"], keep=["qwen3_5"]))
def test_recurrent_states_follow(name, monkeypatch):
    model = tiny_hybrid(name)
    expected = tokens_of(plain(model, SAMPLED, monkeypatch))
    assert len({token for own in expected for token in own}) > 8
    engine = sd.Engine(model, None, max_batch_size=3)
    noted = watched(engine, monkeypatch)
    for _ in range(3):
        assert tokens_of(engine.generate(PROMPTS, SAMPLED, progress=False)) == expected
    assert noted.count("following") > noted.count("first")


WAITING = {
    "log-probabilities": {"logprobs": True},
    "penalty": {"repetition_penalty": 1.2},
    "mask": {"allowed_token_ids": tuple(range(VOCAB_SIZE // 2))},
    "processor": {"logits_processors": (lambda ids, logits: logits,)},
}


@pytest.mark.parametrize("asked", grid(WAITING, keep=list(WAITING)))
def test_requests_that_need_what_is_read_do_not_follow(hugging_face_model, asked, monkeypatch):
    params = replace(GREEDY[0], **asked)
    (expected,) = plain(hugging_face_model, params, monkeypatch, PROMPTS[:1])
    engine = sd.Engine(hugging_face_model, None)
    noted = watched(engine, monkeypatch)
    (output,) = engine.generate(PROMPTS[:1], params, progress=False)
    assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    assert "following" not in noted
