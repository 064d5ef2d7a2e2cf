"""Models with recurrent layers: the promise, and what could break it.

A state cannot be cut back as a KV cache can. So what matters are rejected drafts, prompts in chunks, sequences that
begin again (preemption, lack of memory), slots that change their owner, and numbers that no sequence owns.
"""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, RecurrentGemmaConfig

import specdec_fast as sd
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.kv_cache.state_pool import StatePool
from support.eagle3 import write_checkpoint
from support.grids import combinations, each_value_once, grid
from support.invariants import patched
from support.memory_errors import ERRORS
from support.recurrent_models import FAMILIES, KINDS, noisy_copy, prompts_of, recurrent_model
from support.services import read

NEW_TOKENS = 16
PROMPTS = prompts_of((1, 3, 16, 9, 30))
PARAMS = [
    sd.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=True, temperature=0.9 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def results(engine, prompts=PROMPTS, params=PARAMS):
    """Return tokens and log-probabilities; every page must be free afterwards."""
    outputs = [output.raise_for_error() for output in engine.generate(prompts, params)]
    assert engine.core.pool.is_vacant
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize("family", grid(FAMILIES, keep=["qwen3.5", "mamba"]))
def test_tokens_equal_transformers(family):
    """In fp32 and greedily: from the unmodified model, with drafts of a model of the same family."""
    target = recurrent_model(family)
    prompts = PROMPTS[:4]
    expected = [transformers_greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 5, "texts should vary"
    engine = sd.Engine(target, noisy_copy(target), max_batch_size=3)
    outputs = engine.generate(prompts, sd.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert [output.token_ids for output in outputs] == expected
    decoding = engine.last_run.decoding
    assert 0 < decoding.num_accepted_tokens < decoding.num_draft_tokens, "acceptance should be ragged"
    assert engine.target.has_program == (family != "zamba"), engine.target.why_no_program


@pytest.mark.parametrize("activation", grid(["swish", "gelu", "relu"], keep=["swish", "gelu"]))
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_any_activation_behind_a_convolution(family, activation):
    target = recurrent_model(family, hidden_act=activation)
    expected = [transformers_greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS[:3]]
    engine = sd.Engine(target, noisy_copy(target), max_batch_size=3)
    outputs = engine.generate(PROMPTS[:3], sd.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert [output.token_ids for output in outputs] == expected
    assert engine.target.has_program, engine.target.why_no_program


def test_a_limit_of_time_steps_holds_for_every_token():
    """As in a forward over the whole text; generate() applies it to the prompt alone, so its tokens are others."""
    target = recurrent_model("mamba2", time_step_limit=(0.01, 0.5))
    expected = []
    for prompt in PROMPTS[:3]:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                logits = target(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    engine = sd.Engine(target, noisy_copy(target), max_batch_size=3)
    outputs = engine.generate(PROMPTS[:3], sd.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert [output.token_ids for output in outputs] == expected
    assert expected != [transformers_greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS[:3]]


PAIRS = {f"{family}-{dtype}": (family, dtype) for family in KINDS for dtype in DTYPES}


@pytest.fixture(scope="module", params=grid(PAIRS, keep=["qwen3.5-fp32", "mamba-fp32", "lfm2-fp32"]))
def pair(request):
    """A target, a draft model, and what plain decoding gives at batch 1."""
    family, dtype = request.param
    target = recurrent_model(family, DTYPES[dtype])
    return target, noisy_copy(target), results(sd.Engine(target, None, max_batch_size=1))


SIZES = {
    "alone": {"max_batch_size": 1, "num_draft_tokens": 4},
    "three": {"max_batch_size": 3, "num_draft_tokens": 1},
    "all": {"max_batch_size": 8, "num_draft_tokens": 7},
}
SCHEDULES = {"exspec": {"method": "exspec"}, "eqspec-chunks": {"method": "eqspec", "max_prefill_tokens": 5}}


@each_value_once("pair")
@combinations(
    drafter=["model", "ngram"],
    settings={
        "alone-exspec": SIZES["alone"] | SCHEDULES["exspec"],
        "three-eqspec-chunks": SIZES["three"] | SCHEDULES["eqspec-chunks"],
        "all-exspec": SIZES["all"] | SCHEDULES["exspec"],
    },
    enforce_eager=[False, True],
)
def test_bits_equal_plain_decoding(pair, drafter, settings, enforce_eager):
    target, draft, expected = pair
    source = draft if drafter == "model" else drafter
    engine = sd.Engine(target, source, **settings, enforce_eager=enforce_eager)
    if enforce_eager:  # programs and PyTorch round differently
        expected = results(sd.Engine(target, None, max_batch_size=1, enforce_eager=True))
    assert results(engine) == expected


def test_preempted_sequences_begin_again(pair):
    target, draft, expected = pair
    engine = sd.Engine(target, draft, max_batch_size=4, page_size=4, kv_cache_tokens=60)
    assert results(engine) == expected
    assert engine.last_run.num_preemptions > 0 or not engine.target.layout.shapes


@each_value_once
@pytest.mark.parametrize("place", ["verify_step", "prefill", "draft_step"])
def test_a_forward_that_fails_half_way_is_forgotten(pair, monkeypatch, place):
    """States of the first layers have advanced then, and must not advance twice."""
    target, draft, expected = pair
    engine = sd.Engine(target, draft, max_batch_size=4, max_prefill_tokens=7)
    model = engine.drafter.model if place == "draft_step" else engine.target
    name = "forward" if place == "prefill" else place
    original = getattr(model, name)
    calls = []

    def failing(*args, **kwargs):
        calls.append(place)
        result = original(*args, **kwargs)
        if len(calls) in (2, 5):
            raise ERRORS["cpu"]
        return result

    monkeypatch.setattr(model, name, failing)
    assert results(engine) == expected
    assert engine.last_run.num_out_of_memory > 0


def test_slots_of_cancelled_sequences_serve_others(pair):
    target, draft, expected = pair
    engine = sd.Engine(target, draft, max_batch_size=4)
    for number in range(1, 5):  # the stream is closed after so many chunks
        stream = engine.stream(PROMPTS, PARAMS)
        for _ in range(number):
            next(stream)
        stream.close()
    assert results(engine) == expected


class _Poisoned:
    """Fills, before each step, every number of the state slots that no sequence owns with NaN."""

    def __init__(self, engine):
        self.engine = engine
        self._launch = engine.core._launch
        engine.core._launch = self.launch

    def launch(self, *args):
        drafter = self.engine.drafter
        _poison(self.engine.core.pool, lambda s: s.target_kv_length)
        _poison(drafter.pool, lambda s: drafter.draft_kv_length[s])
        return self._launch(*args)


def _poison(pool, kv_length):
    states = pool.states
    owned = {pool.place(owner): (int(states.lengths[pool.place(owner)]), kv_length(owner)) for owner in pool._pages_of}
    for shape, tensors in zip(pool.layout.states, states.tensors, strict=True):
        for slot in range(states.num_slots):
            length, stop = owned.get(slot, (0, 0))
            before = shape.shape[0] if shape.is_ring else 0  # inputs of a convolution before the kept rows
            kept = {p % tensors[-1].shape[1] for p in range(max(0, length - before), stop)}
            for place in set(range(tensors[-1].shape[1])) - kept:
                tensors[-1][slot, place] = float("nan")
            if not shape.is_ring and not length:
                tensors[0][slot] = float("nan")


def test_numbers_without_owner_are_never_read(pair):
    target, draft, expected = pair
    engine = sd.Engine(target, draft, max_batch_size=3, num_draft_tokens=3)
    _Poisoned(engine)
    assert results(engine) == expected


def one_row_too_many(original, states, rows, slots):
    """A state advances over a draft row, which may be rejected."""
    found = original(states, rows, slots)
    more = [row.num_drafts for row in rows]
    wrong = found._replace(num_stored=found.num_stored + [min(1, drafts) for drafts in more])
    return wrong._replace(num_stored=wrong.num_stored.astype(found.num_stored.dtype))


def rows_not_replayed(original, states, rows, slots):
    """Accepted draft rows are missing from the state."""
    found = original(states, rows, slots)
    return found._replace(num_replayed=found.num_replayed * 0, num_stored=found.num_stored - found.num_replayed)


@each_value_once
@pytest.mark.parametrize("mistake", [one_row_too_many, rows_not_replayed])
# A ring of inputs needs no replay.
@pytest.mark.parametrize("family", grid([kind for kind in KINDS if kind != "lfm2"], keep=["qwen3.5", "mamba"]))
def test_a_state_that_lost_step_is_noticed(family, mistake):
    target = recurrent_model(family)
    expected = results(sd.Engine(target, None, max_batch_size=1))
    engine = sd.Engine(target, noisy_copy(target), max_batch_size=3, num_draft_tokens=3)
    with patched(StatePool, "advance", mistake):
        outputs = [(output.token_ids, output.logprobs) for output in engine.generate(PROMPTS, PARAMS)]
    assert outputs != expected


@pytest.mark.parametrize("enforce_eager", grid([False, True], keep=[False]))
def test_one_model_recurrent_and_the_other_not(enforce_eager):
    """A recurrent draft of a target that attends, and the other way round."""
    recurrent = recurrent_model("qwen3.5")
    other = _attending(recurrent.config.vocab_size)
    for pair in ((recurrent, other), (other, recurrent)):
        plain, fast = (
            results(sd.Engine(pair[0], each, max_batch_size=3, enforce_eager=enforce_eager)) for each in (None, pair[1])
        )
        assert fast == plain


def _attending(vocab_size):
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.3, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_trees_are_refused_by_name():
    target = recurrent_model("qwen3.5")
    engine = sd.Engine(target, "ngram")
    with pytest.raises(sd.NotYetSupportedError, match=r"one state of a sequence, .* use a drafter of chains"):
        engine.target.expect_trees()


def test_slots_for_as_many_sequences_as_are_resident():
    target = recurrent_model("mamba")
    engine = sd.Engine(target, noisy_copy(target), max_batch_size=2, method="eqspec")
    results(engine)
    assert engine.core.pool.states.num_slots == 2 + 1
    assert engine.drafter.pool.states.num_slots == 2 + 1
    assert engine.describe()["state_bytes_per_sequence"] == target_bytes(engine) > 0


def target_bytes(engine):
    tensors = [tensor for each in engine.core.pool.states.tensors for tensor in each]
    return sum(tensor[0].nbytes for tensor in tensors)


def test_states_of_other_shapes_are_named(tmp_path):
    target = recurrent_model("qwen3.5")
    target.config.linear_conv_kernel_dim = 3
    target.save_pretrained(tmp_path)
    with pytest.raises(sd.ConfigError, match=r"conv1d.weight is \[64, 1, 4\], expected \[64, 1, 3\]"):
        sd.Engine(tmp_path, None)


def test_a_recurrence_of_its_own_is_refused():
    """RecurrentGemma keeps its state in its modules."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = RecurrentGemmaConfig(vocab_size=64, head_dim=16, lru_width=32, attention_window_size=8, **sizes)
    with pytest.raises(sd.UnsupportedModelError, match="linear_attention, but a recurrence of its own: it calls none"):
        sd.Engine(AutoModelForCausalLM.from_config(config).eval(), None)


def test_a_function_of_one_token_is_refused(monkeypatch):
    """A layer that asks its cache for a state gets none; one that computes with it anyway is noticed."""
    model = recurrent_model("qwen3.5")
    module = sys.modules[type(model).__module__]

    def one_token(self, hidden_states, *args, **kwargs):
        return module.torch_recurrent_gated_delta_rule(*5 * [hidden_states])

    monkeypatch.setattr(module.Qwen3_5GatedDeltaNet, "forward", one_token)
    with pytest.raises(sd.UnsupportedModelError, match="torch_recurrent_gated_delta_rule, which computes one token"):
        sd.Engine(model, None)


def test_clients_of_a_service_get_the_same_bits(pair):
    """Requests join and leave between steps, and some are abandoned."""
    target, draft, expected = pair
    engine = sd.AsyncEngine(target, draft, max_batch_size=3)

    async def serve(i, most):
        stream = engine.stream(PROMPTS[i], PARAMS[i])
        tokens, logprobs, _ = await read(stream, most)
        return tokens, logprobs

    async def main():
        whole = [serve(i, NEW_TOKENS) for i in range(len(PROMPTS))]
        abandoned = [serve(i, 2) for i in range(len(PROMPTS))]
        found = await asyncio.gather(*abandoned, *whole)
        await engine.close()
        return found[len(PROMPTS) :]

    assert asyncio.run(main()) == expected


@each_value_once("pair")
@combinations(sizes=SIZES, schedule=SCHEDULES)
def test_eagle3_reads_the_hidden_states_of_a_recurrent_target(pair, sizes, schedule, tmp_path):
    """Layers of any kind have taps; with trees the engine refuses it."""
    target, _, expected = pair
    write_checkpoint(tmp_path, target)
    if getattr(target.config, "residual_in_fp32", False) and target.dtype != torch.float32:
        with pytest.raises(sd.UnsupportedModelError, match=r"do not pass on hidden states .* of one dtype"):
            sd.Engine(target, f"eagle3:{tmp_path}")
        return
    engine = sd.Engine(target, f"eagle3:{tmp_path}", **sizes, **schedule)
    assert results(engine) == expected
    assert engine.last_run.decoding.num_draft_tokens > 0
    with pytest.raises(sd.NotYetSupportedError, match="use a drafter of chains"):
        sd.Engine(target, f"eagle3:{tmp_path}", draft_tree=8)
