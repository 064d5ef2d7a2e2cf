"""Models whose linears are rounded: what they compute, the promise with these weights, memory, and what is refused."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.models.quantized_linears import PackedExperts, QuantizedLinear, quantized_linears
from specdec_fast.models.replaced_functions import lock_of
from specdec_fast.models.rounded_models import linears_to_keep, linears_to_round, rounded_copy
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.quantization.packed_weight import dequantized, expert_of
from specdec_fast.quantization.rounding import ROUNDINGS, rounded
from specdec_fast.runner.model_memory import bytes_of, weights_of
from support.experts import CONFIGS as MIXTURES
from support.experts import tiny_mixture
from support.grids import combinations, each_value_once, grid
from support.models import CONFIGS, tiny_model
from support.recurrent_models import recurrent_model
from support.scripted_drafter import Scripted

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16]]
PARAMS = [
    sd.SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=True, temperature=0.8 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def results(engine):
    outputs = [output.raise_for_error() for output in engine.generate(PROMPTS, PARAMS)]
    return [(output.token_ids, output.logprobs) for output in outputs]


def with_dequantized_weights(model, quantized):
    """A copy in fp64 with ordinary linears that hold the numbers which the codes stand for."""
    own = copy.deepcopy(model).double()
    for name, module in quantized_linears(quantized).items():
        weight = dequantized(module.packed)
        plain = own.get_submodule(name)
        plain.weight = torch.nn.Parameter(weight.t() if isinstance(plain, Conv1D) else weight)
    return own


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", grid(list(CONFIGS), keep=["llama", "gpt2"]))
def test_logits_are_those_of_the_dequantized_weights(architecture, quantization):
    model = tiny_model(architecture)
    quantized = rounded_copy(model, quantization)
    token_ids = torch.arange(30)[None]
    with torch.inference_mode():
        found = quantized(token_ids).logits.double()
        expected = with_dequantized_weights(model, quantized)(token_ids).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_the_output_layer_keeps_eight_bits_and_embeddings_stay():
    model = tiny_model("llama")
    quantized = rounded_copy(model, "int4")
    kinds = {name: module.kind for name, module in quantized_linears(quantized).items()}
    assert kinds.pop("lm_head") == "int8"
    assert set(kinds.values()) == {"table"}
    assert quantized.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert not quantized_linears(model), "the caller's model stays as it is"


def test_a_linear_whose_weight_the_model_reads_itself_stays():
    """Mamba multiplies the weight of dt_proj by itself, so nothing may replace it."""
    model = recurrent_model("mamba")
    left = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name.rpartition(".")[2] for name in left - set(linears_to_round(model))} == {"dt_proj"}
    engine = sd.Engine(model, None, quantization="int8")
    assert len(engine.generate([[1, 2]], sd.SamplingParams(max_new_tokens=4))[0].token_ids) == 4


def test_a_model_is_copied_and_probed_while_no_other_engine_has_replaced_its_functions():
    """A copy would keep the attention function of an engine that runs the model in another thread."""
    model = tiny_model("llama")
    lock = lock_of(model.config)
    is_free = []

    def try_lock(*_):
        with ThreadPoolExecutor(1) as other:
            is_free.append(other.submit(lock.acquire, blocking=False).result())

    class Copied:
        def __deepcopy__(self, memo):
            try_lock()
            return self

    model.noticed = Copied()
    rounded_copy(model, "int8")
    model.register_forward_pre_hook(try_lock)
    linears_to_round(model)
    assert is_free == [False, False]


def test_a_linear_with_a_hook_stays():
    """The hook belongs to the module, whose replacement would not call it."""
    model = tiny_model("llama")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    first.down_proj.register_forward_hook(lambda module, given, result: result * 3)
    second.up_proj.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    quantized = rounded_copy(model, "int8")
    token_ids = torch.arange(10)[None]
    with torch.inference_mode():
        expected = model(token_ids).logits
        found = quantized(token_ids).logits
    assert float((found - expected).norm() / expected.norm()) < 0.05
    left = {name for name, module in quantized.named_modules() if type(module) is torch.nn.Linear}
    assert left == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"}


def test_a_weight_that_the_model_joins_to_another_stays():
    """torch.cat is given a list of weights."""

    class Joined(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, rows):
            weight = torch.cat([self.mlp.gate_proj.weight, self.mlp.up_proj.weight])
            gate, up = torch.nn.functional.linear(rows, weight).chunk(2, -1)
            return self.mlp.down_proj(self.mlp.act_fn(gate) * up)

    model = tiny_model("llama")
    model.model.layers[0].mlp = Joined(model.model.layers[0].mlp)
    left = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert left - set(linears_to_round(model)) == {f"model.layers.0.mlp.mlp.{name}_proj" for name in ("gate", "up")}


@pytest.fixture(scope="module", params=ROUNDINGS)
def quantization(request):
    return request.param


@pytest.fixture(scope="module", params=DTYPES)
def pair(request):
    """A target, and the same with other weights, which drafts ragged numbers of right tokens."""
    target = tiny_model("llama").to(DTYPES[request.param])
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * 0.1)
    return target, draft


@pytest.fixture(scope="module")
def plain(pair, quantization):
    """Return what plain decoding gives at batch 1, by a program or by PyTorch; both are kept."""
    target, _ = pair
    options = {"quantization": quantization, "max_batch_size": 1}
    return cache(lambda eager: results(sd.Engine(target, None, **options, enforce_eager=eager)))


@each_value_once
@combinations(
    drafter=["model", "scripted"],
    settings={
        "alone-exspec": {"max_batch_size": 1, "num_draft_tokens": 4, "method": "exspec"},
        "all-eqspec-chunks": {"max_batch_size": 8, "num_draft_tokens": 7, "method": "eqspec", "max_prefill_tokens": 3},
    },
    enforce_eager=[False, True],
)
def test_bits_equal_plain_decoding(pair, plain, quantization, drafter, settings, enforce_eager):
    target, draft = pair
    options = {"quantization": quantization, "enforce_eager": enforce_eager}
    if drafter == "model":
        source = draft
        options["draft_quantization"] = quantization
    else:
        source = Scripted(lambda sequence, limit: [(sequence.token_ids[-1] + i) % 97 for i in range(limit)])
    engine = sd.Engine(target, source, **settings, **options)
    assert engine.target.has_program != enforce_eager, engine.target.why_no_program
    assert results(engine) == plain(enforce_eager)
    assert engine.last_run.decoding.num_draft_tokens > engine.last_run.decoding.num_accepted_tokens


@pytest.mark.parametrize("quantization", grid(list(ROUNDINGS), keep=["int8-a8"]), indirect=True)
def test_tokens_are_those_of_generate(quantization):
    """In fp32, of the copy with quantised linears, whose op transformers calls; rows are rounded alike there."""
    target = rounded_copy(tiny_model("llama"), quantization)
    expected = [transformers_greedy(target, prompt, 12) for prompt in PROMPTS]
    outputs = sd.generate(target, "ngram", PROMPTS, sd.SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("quantization", grid(list(ROUNDINGS), keep=["int4-a8"]), indirect=True)
def test_pytorch_serves_the_op_as_well(quantization):
    options = {"quantization": quantization, "backend": "torch"}
    params = sd.SamplingParams(max_new_tokens=2, ignore_eos=True, logprobs=True)
    prompts = [[7, 8, 7, 8, 7], [9, 9, 9]]
    alone, together = (
        [
            (o.token_ids, o.logprobs)
            for o in sd.generate(tiny_model("llama"), draft, prompts, params, **sizes, **options)
        ]
        for draft, sizes in ((None, {"max_batch_size": 1}), ("ngram", {"max_batch_size": 2}))
    )
    assert together == alone


@pytest.mark.parametrize("quantization", grid(list(ROUNDINGS), keep=["int4-a8"]), indirect=True)
def test_bytes_are_known_before_loading(quantization):
    """The planner's number is what the process holds, and describe() names each kind of linear."""
    target = str(demo_pair() / "target")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    engine = sd.Engine(target, None, quantization=quantization, dtype="bfloat16")
    assert checkpoint_sizes(target, torch.bfloat16, quantization).weights == bytes_of(weights_of(engine.target.model))
    assert checkpoint_sizes(model, None, quantization).weights == bytes_of(weights_of(engine.target.model))
    described = engine.describe()["linear_bytes"]
    assert sum(described.values()) == sum(m.packed.nbytes for m in quantized_linears(engine.target.model).values())
    bits = {"int8": {"int8"}, "int4": {"int4", "int8"}, "int8-a8": {"int8-a8"}, "int4-a8": {"int4-a8", "int8-a8"}}
    assert set(described) == bits[quantization]


def test_a_loaded_model_and_its_folder_give_the_same_texts():
    target = str(demo_pair() / "target")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    params = sd.SamplingParams(max_new_tokens=12)
    folder, loaded = (
        sd.generate(source, None, ["Once upon a time"], params, quantization="int4", dtype=dtype)
        for source, dtype in ((target, "float32"), (model, None))
    )
    assert folder[0].token_ids == loaded[0].token_ids


@pytest.mark.grid
def test_a_budget_that_only_quantised_weights_meet():
    target = str(demo_pair() / "target")
    whole = checkpoint_sizes(target, torch.float32).weights
    budget = {"memory_bytes": whole, "dtype": "float32"}
    with pytest.raises(sd.MemoryBudgetError):
        sd.Engine(target, None, **budget)
    engine = sd.Engine(target, None, quantization="int4", **budget)
    assert engine.memory_plan.describe()["planned_bytes"] <= whole


@pytest.mark.parametrize("name", ["quantization", "draft_quantization"])
@pytest.mark.parametrize("value", ["int3", 4, True])
def test_other_names_are_refused(name, value):
    with pytest.raises(
        sd.ConfigError, match=f"{name}={value!r}: expected one of int8, int4, int8-a8, int4-a8, a8, or None"
    ):
        sd.EngineConfig(**{name: value})


def test_a_weight_that_cannot_be_rounded_is_named():
    target = tiny_model("llama")
    target.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    with pytest.raises(
        sd.ConfigError, match=r"model.layers.1.mlp.up_proj.weight cannot be quantised: the weight has numbers"
    ):
        sd.Engine(target, None, quantization="int4")


def test_modules_say_what_they_are():
    quantized = rounded_copy(tiny_model("llama"), "int4-a8")
    shown = repr(quantized.model.layers[0].mlp.up_proj)
    assert shown == (
        "QuantizedLinear(in_features=32, out_features=64, bias=False, table of 4 bits in groups of 32, rows of int8)"
    )
    assert isinstance(quantized.lm_head, QuantizedLinear)


def test_a_model_that_is_quantised_already_is_refused():
    """By this library, by a method that its config names, or by weights of another type than PyTorch's."""
    by_us = rounded_copy(tiny_model("llama"), "int4-a8")
    named = copy.deepcopy(tiny_model("llama"))
    named.config.quantization_config = {"quant_method": "bitsandbytes"}
    typed = copy.deepcopy(tiny_model("llama"))
    typed.lm_head.weight = torch.nn.Parameter(typed.lm_head.weight.data.to(torch.uint8), requires_grad=False)
    for model, how in ((by_us, "int4-a8 and int8-a8"), (named, "bitsandbytes"), (typed, "Parameter of uint8")):
        with pytest.raises(sd.ConfigError, match=rf"quantization='int8' .* are quantised already \({how}\); leave"):
            sd.Engine(model, None, quantization="int8")


def test_rows_are_rounded_for_codes_that_a_model_has():
    """The result is the model that is rounded together with its rows; it shares every tensor with the model."""
    model = tiny_model("llama")
    quantized = rounded_copy(model, "int4")
    engine = sd.Engine(quantized, "ngram", quantization="a8")
    assert results(engine) == results(sd.Engine(model, None, quantization="int4-a8"))
    assert set(engine.describe()["linear_bytes"]) == {"int4-a8", "int8-a8"}
    assert not any(module.rounds_rows for module in quantized_linears(quantized).values())
    assert engine.target.model.lm_head.codes is quantized.lm_head.codes
    assert checkpoint_sizes(quantized, None, "a8") == checkpoint_sizes(quantized, None)


def test_rows_are_not_rounded_where_there_are_no_whole_numbers():
    with pytest.raises(sd.ConfigError, match=r"quantization='a8' rounds .* LlamaForCausalLM has none .* 'int4-a8'"):
        sd.Engine(tiny_model("llama"), None, quantization="a8")
    quantized = rounded_copy(tiny_model("llama"), "int4")
    fractions = rounded(torch.randn(quantized.lm_head.out_features, quantized.lm_head.in_features), ROUNDINGS["int4"])
    quantized.lm_head = QuantizedLinear(replace(fractions, table=torch.linspace(-1, 1, 16)), None, torch.float32)
    with pytest.raises(sd.ConfigError, match="'a8' does not serve lm_head: its codes are of 4 bits for fractions"):
        sd.Engine(quantized, None, quantization="a8")
    with pytest.raises(sd.ConfigError, match="does not serve lm_head"):
        checkpoint_sizes(quantized, None, "a8")


@each_value_once
@pytest.mark.parametrize("name", grid(list(MIXTURES), keep=list(MIXTURES)[1::16]))
@pytest.mark.parametrize("quantization", ["int4", "int8-a8"])
def test_experts_are_rounded_as_well(name, quantization):
    """Their engine decodes as plain decoding does and as transformers does, which calls the same op."""
    quantized = rounded_copy(tiny_mixture(name), quantization)
    assert any(isinstance(module, PackedExperts) for module in quantized.modules())
    assert all(parameter.dim() < 3 for parameter in quantized.parameters())
    expected = [transformers_greedy(quantized, prompt, 10) for prompt in PROMPTS]
    engine = sd.Engine(quantized, "ngram", max_batch_size=3)
    assert engine.describe()["why_no_program"] is None
    outputs = engine.generate(PROMPTS, sd.SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("name", "kept"),
    [("qwen2-moe", "mlp.shared_expert_gate"), ("gemma4-moe", "router.proj"), ("hunyuan-moe", "mlp.gate.wg")],
)
def test_what_chooses_or_weighs_experts_stays(name, kept):
    """It has few bytes, and describe() counts it under its dtype."""
    model = tiny_mixture(name, torch.bfloat16)
    quantized = rounded_copy(model, "int4")
    left = [name for name, module in quantized.named_modules() if type(module) is torch.nn.Linear]
    assert left == [f"model.layers.{i}.{kept}" for i in range(2)]
    held = [quantized.get_submodule(name).weight for name in left]
    assert all(weight is model.get_submodule(name).weight for name, weight in zip(left, held, strict=True))
    described = sd.Engine(model, None, quantization="int4").describe()["linear_bytes"]
    kind = str(held[0].dtype).removeprefix("torch.")  # the router of Hunyuan has fp32
    assert described[kind] == sum(weight.nbytes for weight in held)
    assert checkpoint_sizes(model, None, "int4").weights == bytes_of(weights_of(quantized))


def test_a_linear_with_a_32nd_of_its_inputs_as_outputs_stays():
    model = tiny_model("llama")
    wide = model.model.layers[0].mlp.up_proj
    for outputs, stays in ((1, True), (2, False)):
        linears = {"narrow": torch.nn.Linear(wide.in_features, outputs), "conv": Conv1D(outputs, wide.in_features)}
        assert linears_to_keep(model, linears) == (set(linears) if stays else set())


def test_sizes_of_rounded_experts_are_known_before_loading(tmp_path):
    model = tiny_mixture("qwen3-moe")
    model.save_pretrained(tmp_path)
    expected = bytes_of(weights_of(rounded_copy(model, "int4")))
    assert checkpoint_sizes(tmp_path, None, "int4").weights == expected


def test_logits_of_rounded_experts_are_those_of_the_dequantized_weights():
    model = tiny_mixture("gpt-oss")
    quantized = rounded_copy(model, "int4")
    own = with_dequantized_weights(model, quantized)
    own.set_experts_implementation("batched_mm")  # which computes in fp64
    for name, module in quantized.named_modules():
        if isinstance(module, PackedExperts):
            parent, _, attribute = name.rpartition(".")
            experts = own.get_submodule(parent)
            each = [dequantized(expert_of(module.packed, e)) for e in range(len(module.codes))]
            weights = torch.stack([weight.t() if experts.is_transposed else weight for weight in each])
            setattr(experts, attribute, torch.nn.Parameter(weights))
    token_ids = torch.arange(30)[None]
    with torch.inference_mode():
        found = quantized(token_ids).logits.double()
        expected = own(token_ids).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5
