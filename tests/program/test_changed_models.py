"""Models that change after their program was made: weights are read where they are, all else is noticed."""

from __future__ import annotations

import copy
from functools import partialmethod

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import specdec_fast as sd
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.model_watch import Watch
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.models import tiny_model
from support.programs import CPU, needs_programs, ragged_logits

pytestmark = needs_programs


@pytest.mark.parametrize(
    ("architecture", "name"), [("llama", "mlp.up_proj.weight"), ("granite-swa", "self_attn.sinks")]
)
def test_weights_are_read_where_they_are(architecture, name):
    model = RaggedModel(tiny_model(architecture), resolve(CPU))
    assert model.program is not None, model.why_no_program
    before, weight = ragged_logits(model), model.model.model.layers[0].get_parameter(name)
    with torch.no_grad():
        weight.mul_(1.5)
    assert not torch.equal(ragged_logits(model), before)
    with torch.no_grad():
        weight.div_(1.5)
    torch.testing.assert_close(ragged_logits(model), before)


@torch.inference_mode()
def test_transposed_weights_are_read_where_they_are():
    """GPT-2 keeps its linears as ``[in_features, out_features]``; a copy would not see them change."""
    model = RaggedModel(tiny_model("gpt2"), resolve(CPU))
    before = ragged_logits(model)
    model.model.transformer.h[1].mlp.c_fc.weight.mul_(1.5)
    changed = ragged_logits(model)
    assert not torch.equal(changed, before)
    assert torch.equal(ragged_logits(RaggedModel(model.model, resolve(CPU))), changed)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt-neox"])
def test_a_program_keeps_numbers_of_little(architecture):
    """Matrices are read where they are; a change of one in place must not be refused."""
    model = RaggedModel(tiny_model(architecture), resolve(CPU))
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.5)
    model.expect_same_weights()


@pytest.mark.parametrize("which", ["target", "draft"])
def test_weights_that_have_been_moved_are_noticed(which):
    """A program would still read the old ones."""
    models = {"target": tiny_model("llama"), "draft": tiny_model("llama", seed=1)}
    engine = sd.Engine(models["target"], models["draft"])
    expected = engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].token_ids
    weight = models[which].model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(UnsupportedModelError, match="make a new Engine"):
        engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))
    again = sd.Engine(models["target"], models["draft"])
    assert again.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].token_ids == expected


class Scaled(torch.nn.Module):
    """Multiplies by a scalar of its own, as some architectures scale residuals."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, torch.nn.Parameter(torch.tensor(1.25))

    def forward(self, x):
        return self.inner(x) * self.scale


def scaled_llama():
    model = tiny_model("llama")
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    return model


def change_scalar(model):
    with torch.no_grad():
        model.model.layers[0].mlp.scale.mul_(2)


def change_scalar_behind_the_counter(model):
    model.model.layers[0].mlp.scale.data.mul_(2)


def change_norm(model):
    model.model.layers[0].input_layernorm.weight.data.add_(0.5)  # Gemma computes with 1 + weight


def exchange_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def exchange_module(model):
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)


class Adapted(torch.nn.Module):
    """Adds adapters to a linear, with the attributes by which PEFT says which are active, and how strong they are."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self._disable_adapters = inner, False
        self._active_adapter, self.scaling = ["a"], {"a": 0.5, "b": -0.5}
        torch.manual_seed(7)
        self.adapters = torch.nn.ModuleDict({name: torch.nn.Linear(32, 64, bias=False) for name in "ab"}).eval()

    def forward(self, x):
        active = [] if self._disable_adapters else self._active_adapter
        return sum((self.scaling[name] * self.adapters[name](x) for name in active), self.inner(x))


def adapted_llama():
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = Adapted(model.model.layers[1].mlp.up_proj)
    return model.eval()


def switch_adapter(model):
    model.model.layers[1].mlp.up_proj._active_adapter[:] = ["b"]


def disable_adapters(model):
    model.model.layers[1].mlp.up_proj._disable_adapters = True


def strengthen_adapter(model):
    model.model.layers[1].mlp.up_proj.scaling["a"] = 4.0


def add_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0)


def add_pre_hook(model):
    model.model.layers[1].register_forward_pre_hook(lambda module, args: None)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        pytest.param(scaled_llama, change_scalar, "in place", marks=pytest.mark.grid),
        (scaled_llama, change_scalar_behind_the_counter, "in place"),
        pytest.param(lambda: tiny_model("gemma2"), change_norm, "in place", marks=pytest.mark.grid),
        (lambda: tiny_model("llama"), exchange_buffer, "replaced"),
        (lambda: tiny_model("llama"), exchange_module, "replaced"),
        (adapted_llama, switch_adapter, "_active_adapter of a Adapted has another value"),
        (adapted_llama, disable_adapters, "_disable_adapters of a Adapted"),
        (adapted_llama, strengthen_adapter, "scaling of a Adapted"),
        pytest.param(lambda: tiny_model("llama"), add_hook, "hooks", marks=pytest.mark.grid),
        (lambda: tiny_model("llama"), add_pre_hook, "hooks"),
    ],
)
def test_what_a_program_would_not_see_is_noticed(make, change, message):
    model, params = make(), sd.SamplingParams(max_new_tokens=4, logprobs=True)
    engine = sd.Engine(model, None)
    assert engine.target.program is not None, engine.target.why_no_program
    engine.generate([[1, 2, 3]], params)
    change(model)
    with pytest.raises(UnsupportedModelError, match=message):
        engine.generate([[1, 2, 3]], params)
    eager = sd.Engine(model, None, enforce_eager=True).generate([[1, 2, 3]], params)[0]
    again = sd.Engine(model, None).generate([[1, 2, 3]], params)[0]
    assert again.token_ids == eager.token_ids


def test_models_with_hooks_stay_with_pytorch():
    """A program would not call them, so a model that has some stays with PyTorch."""
    model = tiny_model("llama")
    calls = []
    model.model.layers[1].register_forward_hook(lambda *args: calls.append(args))
    ragged = RaggedModel(model, resolve(CPU))
    assert "hooks" in ragged.why_no_program
    calls.clear()
    ragged_logits(ragged)
    assert len(calls) == 2


def test_hooks_that_collect_hidden_states_for_a_caller_change_nothing():
    """transformers adds them when a caller first asks for hidden states, and never takes them away."""
    model = tiny_model("llama")
    before = sd.Engine(model, None)
    params = sd.SamplingParams(max_new_tokens=4)
    (wanted,) = before.generate([[1, 2, 3]], params)
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    (found,) = before.generate([[1, 2, 3]], params)
    assert found.token_ids == wanted.token_ids
    assert sd.Engine(model, None).describe()["forward_program"]
    model.model.layers[1].register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedModelError, match="forward hooks have been added"):
        before.generate([[1, 2, 3]], params)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_of_every_module_are_called(register):
    called = []
    handle = register(lambda module, *args: called.append(module))
    try:
        engine = sd.Engine(tiny_model("llama"), None)
        assert engine.describe()["why_no_program"] == "a Module has forward hooks, which a program would not call"
        called.clear()
        engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))
    finally:
        handle.remove()
    assert engine.target.model.model.layers[1].mlp in called


def test_a_forward_that_has_been_replaced_is_noticed():
    """A program would still compute what the module's class computes."""
    model = tiny_model("llama")
    engine = sd.Engine(model, None)
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda hidden: hidden * 0
    with pytest.raises(UnsupportedModelError, match="a forward of one of its modules has been replaced"):
        engine.generate([[1, 2, 3]], progress=False)
    del mlp.forward
    assert engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4), progress=False)[0].error is None


def test_a_forward_of_a_class_that_has_been_replaced_is_noticed(monkeypatch):
    model = tiny_model("llama")
    engine = sd.Engine(model, None)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, hidden: hidden * 0)
    with pytest.raises(UnsupportedModelError, match="a forward of one of its modules has been replaced"):
        engine.generate([[1, 2, 3]], progress=False)


class Partial(torch.nn.Module):
    def scaled(self, x, factor: float):
        return x * factor

    forward = partialmethod(scaled, factor=2.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("make", [Partial, lambda: torch.jit.script(torch.nn.SiLU())], ids=["partial", "TorchScript"])
def test_a_class_whose_forward_is_no_function_is_watched(make, enforce_eager):
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = make().eval()
    engine = sd.Engine(model, None, enforce_eager=enforce_eager, prefix_cache=True)
    for _ in range(2):
        assert engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].error is None
    assert Watch(model, ()).change() is None


PROMPT = [[7 * i % 97 for i in range(40)]]  # more than a page


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_engine_serves_its_adapter_again_when_it_is_active_again(enforce_eager):
    """Each engine keeps the forward of one adapter; without a program, one engine computes what is active."""
    model, params = adapted_llama(), sd.SamplingParams(max_new_tokens=8, logprobs=True)
    adapted = model.model.layers[1].mlp.up_proj
    engines, wanted = {}, {}
    for name in "ab":
        adapted._active_adapter = [name]
        engines[name] = sd.Engine(model, "ngram", enforce_eager=enforce_eager, prefix_cache=True)
        wanted[name] = engines[name].generate(PROMPT, params)[0].logprobs
    assert wanted["a"] != wanted["b"]
    for name in "abba":
        adapted._active_adapter = [name]
        assert engines[name].generate(PROMPT, params)[0].logprobs == wanted[name]
        if enforce_eager:
            assert engines["a"].generate(PROMPT, params)[0].logprobs == wanted[name]


def test_settings_of_training_change_nothing():
    model = tiny_model("llama")
    engine = sd.Engine(model, None)
    model.train()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    model.eval()
    assert engine.generate([[1, 2, 3]], sd.SamplingParams(max_new_tokens=4))[0].error is None


def test_notes_on_a_model_may_change():
    """Those of trainers and users: steps, losses, names, dropout."""
    model, params = tiny_model("llama"), sd.SamplingParams(max_new_tokens=4)
    model.step, model.losses, model.model.layers[0].mlp.calls = 1, [], 0
    engine = sd.Engine(model, None)
    (wanted,) = engine.generate([[1, 2, 3]], params)
    model.step, model.name_or_path, model.model.layers[0].mlp.calls = 2, "another", 9
    model.losses.append(0.5)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    assert engine.generate([[1, 2, 3]], params)[0].token_ids == wanted.token_ids


@pytest.mark.parametrize(("value", "again"), [(["a"], "a"), ("a", ["a"])])
def test_one_active_adapter_is_a_name_or_a_list(value, again):
    """A model of PEFT has a list when it is loaded, and a name after ``set_adapter``."""
    module = torch.nn.Identity()
    module.active_adapter = value
    watch = Watch(module, ())
    module.active_adapter = "b"
    assert watch.change().startswith("active_adapter of a Identity has another value")
    module.active_adapter = again
    assert watch.change() is None
