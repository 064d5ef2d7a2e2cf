"""The engine of a model is kept between ``generate`` calls, and made again when its weights are others."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import specdec_fast as sd
from specdec_fast.integrations.transformers import custom_generate
from support.grids import grid
from support.models import tiny_model
from support.padded import padded
from support.self_draft import codes_of

BATCH = padded([[3, 17, 5, 9, 3], [41, 4]], pad=0)
LIMIT = {"max_new_tokens": 12, "pad_token_id": 0}


def decoded(model, **options):
    return model.generate(**BATCH, **LIMIT, **options, custom_generate=custom_generate).tolist()


def engine_of(model):
    return vars(model)["_specdec_fast_engine"]._kept.engine


def replace_data(model):
    """As a trainer that shards, offloads or loads weights does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(1.5)


def replace_parameters(model):
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach() * 1.5)


def assign_state(model):
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def exchange_module(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[1].mlp)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(3)


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


CHANGES = [replace_data, replace_parameters, assign_state, exchange_module, tie]


@pytest.mark.parametrize("change", grid({each.__name__: each for each in CHANGES}, ["replace_data"]))
def test_swapped_tensors_are_never_decoded_with_the_old_ones(change):
    model = tiny_model("llama")
    before = decoded(model)
    first = engine_of(model)
    change(model)
    expected = model.generate(**BATCH, **LIMIT).tolist()
    assert expected != before
    assert decoded(model) == expected
    assert engine_of(model) is not first


@pytest.mark.parametrize("architecture", grid(["llama", "gemma2", "gpt2"], ["gemma2"]))
def test_updates_in_place_take_effect(architecture):
    """Gemma's programs copy 1 + w of its norms, and the engine refuses to go on with the copies; the others read on."""
    model = tiny_model(architecture)
    before = decoded(model)
    first = engine_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.01)
    expected = model.generate(**BATCH, **LIMIT).tolist()
    assert expected != before
    assert decoded(model) == expected
    assert (engine_of(model) is first) == (architecture != "gemma2")


@pytest.mark.grid
def test_steps_of_an_optimizer_take_effect():
    model = tiny_model("llama")
    decoded(model, draft="ngram")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(2):
        model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert decoded(model, draft="ngram") == model.generate(**BATCH, **LIMIT).tolist()


@pytest.mark.grid
def test_rounded_copies_follow_the_weights():
    """Stale copies would still be exact, but their drafts would be of another model."""
    model = tiny_model("llama")
    decoded(model, draft="self")
    first = engine_of(model)
    decoded(model, draft="self")
    assert engine_of(model) is first
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert decoded(model, draft="self") == model.generate(**BATCH, **LIMIT).tolist()
    assert engine_of(model) is first
    assert codes_of(first) == codes_of(sd.Engine(model, "self"))


@pytest.mark.grid
def test_a_draft_model_that_changes_is_noticed():
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    expected = decoded(model, draft=draft)
    first = engine_of(model)
    replace_data(draft)
    assert decoded(model, draft=draft) == expected
    assert engine_of(model) is not first


@pytest.mark.grid
def test_models_that_pytorch_runs_are_watched_too():
    model = tiny_model("llama")
    config = sd.EngineConfig(enforce_eager=True)
    decoded(model, engine_config=config)
    first = engine_of(model)
    assert not first.target.has_program
    model.to(torch.bfloat16)
    found = decoded(model, engine_config=config)
    assert engine_of(model) is not first
    alone = sd.Engine(model, None, config).generate([[41, 4]], sd.SamplingParams(max_new_tokens=12))[0]
    assert found[1][5:] == alone.token_ids  # in 16 bits, `generate` emits other tokens in other batches


@pytest.mark.grid
def test_models_with_hooks_keep_their_engine():
    model = tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    expected = model.generate(**BATCH, **LIMIT).tolist()
    assert decoded(model) == expected
    first = engine_of(model)
    assert decoded(model) == expected
    assert engine_of(model) is first
    replace_data(model)
    assert decoded(model) == model.generate(**BATCH, **LIMIT).tolist() != expected
    assert engine_of(model) is not first


class TestTheEngine:
    def test_is_kept_for_the_same_call(self):
        model = tiny_model("llama")
        decoded(model)
        first = engine_of(model)
        model.generate(BATCH["input_ids"][:1], **LIMIT, custom_generate=custom_generate)
        assert engine_of(model) is first

    @pytest.mark.grid
    def test_is_made_again_for_another_call(self):
        model = tiny_model("llama")
        made = []
        for options in ({}, {"draft": "ngram"}, {"draft": "ngram", "num_draft_tokens": 2}):
            decoded(model, **options)
            made.append(engine_of(model))
        rows = padded([[token] for token in range(20)], pad=0)
        model.generate(**rows, **LIMIT, custom_generate=custom_generate, draft="ngram", num_draft_tokens=2)
        made.append(engine_of(model))
        assert len(set(map(id, made))) == 4
        assert made[-1].config.max_batch_size == 32

    def test_is_freed_with_its_model(self):
        model = tiny_model("llama")
        decoded(model, engine_config=sd.EngineConfig(enforce_eager=True))  # tests keep what programs are recorded of
        alive = weakref.ref(model), weakref.ref(engine_of(model))
        del model
        gc.collect()
        assert [each() for each in alive] == [None, None]

    @pytest.mark.grid
    def test_stays_behind_when_the_model_is_copied(self, tmp_path):
        model = tiny_model("llama")
        expected = decoded(model)
        copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
        for each in copies[::2]:
            assert vars(each)["_specdec_fast_engine"]._kept is None
            assert decoded(each) == expected
        assert decoded(copies[1]) == expected
        model.save_pretrained(tmp_path)
        assert decoded(type(model).from_pretrained(tmp_path).eval()) == expected
