"""``sync_weights``: outputs and drafts are those of the present weights after an update in place."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.errors import ConfigError, UnsupportedModelError
from support.experts import tiny_mixture
from support.grids import grid
from support.models import tiny_model
from support.self_draft import codes_of

PROMPTS = [[3, 17, 5, 9, 3, 8, 1, 12, 4] * 3, [41, 4]]
PARAMS = sd.SamplingParams(max_new_tokens=12, logprobs=True)
CACHED = {"prefix_cache": True, "page_size": 4}


def results(engine):
    return [(output.raise_for_error().token_ids, output.logprobs) for output in engine.generate(PROMPTS, PARAMS)]


def trained(model):
    """One step of an optimizer, which is large enough to change texts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model(input_ids=torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def written(model):
    """Change one weight that PyTorch does not count, and that no sample of the tensor has."""
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 40


@pytest.mark.parametrize("architecture", grid(["llama", "qwen3-moe"], ["llama"]))
@pytest.mark.parametrize("draft", grid(["self", "self:int8"], ["self"]))
def test_steps_of_an_optimizer_are_noticed(architecture, draft):
    """With and without ``sync_weights``, because no request runs meanwhile."""
    model = tiny_model(architecture) if architecture == "llama" else tiny_mixture(architecture)
    engine = sd.Engine(model, draft, **CACHED)
    before = results(engine)
    for syncs in (False, True):
        trained(model)
        if syncs:
            engine.sync_weights()
        after = results(engine)
        assert after == results(sd.Engine(model, None)) != before
        assert codes_of(engine) == codes_of(sd.Engine(model, draft))
        before = after


def test_what_nobody_sees_is_dropped():
    model = tiny_model("llama")
    engine = sd.Engine(model, "self", **CACHED)
    results(engine)
    former = codes_of(engine)
    written(model)
    expected = results(sd.Engine(model, None))
    assert results(engine) != expected, "else this test shows nothing"
    assert codes_of(engine) == former
    engine.sync_weights()
    assert results(engine) == expected
    assert codes_of(engine) == codes_of(sd.Engine(model, "self")) != former


def test_while_requests_run():
    """The codes are rounded again before the next draft, and a later request shares no earlier entries."""
    model = tiny_model("llama")
    engine = sd.Engine(model, "self", **CACHED)
    running = engine.stream(PROMPTS[0], sd.SamplingParams(max_new_tokens=40))
    next(running)
    written(model)
    engine.sync_weights()
    next(running)
    assert codes_of(engine) == codes_of(sd.Engine(model, "self"))
    expected = results(sd.Engine(model, None))
    assert results(engine) == expected
    running.close()


def test_the_asynchronous_engine_does_so_too():
    model = tiny_model("llama")
    service = sd.AsyncEngine(model, "self")
    former = codes_of(service.engine)
    written(model)
    service.sync_weights()
    results(service.engine)
    assert codes_of(service.engine) == codes_of(sd.Engine(model, "self")) != former


def replace_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


@pytest.mark.parametrize(("architecture", "change"), [("llama", replace_data), ("gemma2", trained)])
def test_what_a_program_would_not_see_is_refused(architecture, change):
    """Gemma's programs copy 1 + w of its norms."""
    model = tiny_model(architecture)
    engine = sd.Engine(model, None)
    results(engine)
    change(model)
    with pytest.raises(UnsupportedModelError, match="make a new Engine"):
        engine.sync_weights()


def test_weights_that_cannot_be_rounded_are_named():
    model = tiny_model("llama")
    engine = sd.Engine(model, "self")
    before = results(engine)
    weight = model.model.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("inf")
    engine.sync_weights()
    with pytest.raises(ConfigError, match=r"draft='self:int4': .*layers.1.mlp.up_proj.weight cannot be quantised"):
        results(engine)
    with torch.no_grad():
        weight.copy_(kept)
    assert results(engine) == before
