"""Linear layers on the op ``linear``: each row's bits are its own, and the caller's model is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import specdec_fast as sd
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.model_watch import Watch
from specdec_fast.models.replaced_linears import Linears
from specdec_fast.ops import all_ops, resolve
from support.grids import each_value_once, grid
from support.models import tiny_model, truncated_copy
from support.op_cases import DTYPES, each_dtype
from support.row_bits import Alone, assert_same_bits

CPU = torch.device("cpu")
_C = pytest.importorskip("specdec_fast._C", reason="built without C++")
linear = all_ops()["linear"].load("cpp")


@pytest.fixture(params=_C.linear_versions())
def version(request):
    _C.choose_linear_version(request.param)
    yield request.param
    _C.choose_linear_version(_C.linear_versions()[-1])


# Features and outputs that fill vectors, chunks and blocks, and that do not; rows below, at and above a block's height.
SHAPES = [(33, 7), (128, 40), (1000, 130), (2100, 65), (1, 1)]


def assert_rows_are_independent(function, dtype, shape):
    generator = torch.Generator().manual_seed(0)
    in_features, out_features = shape
    rows = torch.randn(29, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    whole = function(rows, weight)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 28):
        assert torch.equal(function(rows[:count], weight), whole[:count])
        assert torch.equal(function(rows[29 - count :], weight), whole[29 - count :])
    few = max(1, out_features // 3)  # an output's bits do not depend on the outputs beside it either
    assert torch.equal(function(rows, weight[:few]), whole[:, :few])


@each_value_once("version", "dtype")
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_at_any_count(version, dtype, shape):
    assert_rows_are_independent(linear, dtype, shape)


# Many rows: several passes of prepared rows (the first); several groups of outputs and of inputs; few inputs.
MANY = [(1030, 2100, 9), (90, 600, 300), (1024, 70, 45)]


@each_value_once("version", "dtype")
@each_dtype
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_rows_have_the_same_bits_among_many(version, dtype, shape, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # which share outputs, or rows where outputs are few
    generator = torch.Generator().manual_seed(0)
    num_rows, in_features, out_features = shape
    rows = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    whole = linear(rows, weight, bias)
    for first, count in ((0, 1), (num_rows // 2, 1), (num_rows - 1, 1), (3, 7), (num_rows - 40, 33), (11, 64)):
        assert torch.equal(linear(rows[first : first + count], weight, bias), whole[first : first + count])


def in_halves_if_many(rows, weight):
    """Return the right sums, but of two halves each where there are more than four rows, as a library may."""
    if len(rows) <= 4:
        return linear(rows, weight)
    half = rows.shape[1] // 2
    return sum(
        linear(rows[:, part].contiguous(), weight[:, part].contiguous()) for part in (slice(half), slice(half, None))
    )


@each_dtype
def test_check_of_bits_rejects_another_order(dtype):
    with pytest.raises(AssertionError):
        assert_rows_are_independent(in_halves_if_many, dtype, (1000, 130))


def test_what_is_not_finite_stays_in_its_row_and_output():
    rows, weight = torch.ones(9, 70), torch.ones(9, 70)
    rows[3, 69], weight[5, 0] = float("nan"), float("inf")
    out = linear(rows, weight)
    assert out[3].isnan().all()
    assert out[[0, 8], 5].isinf().all()
    out[3], out[:, 5] = 70.0, 70.0
    assert (out == 70).all()


WIDE = LlamaConfig(
    vocab_size=97, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=160, initializer_range=0.05, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
PROMPTS = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 9, 17, 30, 5)]


@pytest.fixture(scope="module")
def wide():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(WIDE, dtype=torch.float32).eval()


def test_plain_linears_are_served_and_only_during_a_forward(wide):
    engine = sd.Engine(wide, None, enforce_eager=True)
    linears = engine.target.hf.linears
    served = {name for name, module in wide.named_modules() if module in linears.served(are_chunked=True)}
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    large = {f"model.layers.{i}.{name}" for i in (0, 1) for name in layer}
    assert served == large | {"lm_head"}
    assert len(linears.served(are_chunked=False)) == 14, "without determinism the output layer is too small"
    assert engine.describe()["own_linears"] == 15
    engine.generate(PROMPTS, sd.SamplingParams(max_new_tokens=4))
    assert not any("forward" in module.__dict__ for module in wide.modules())
    assert sd.Engine(wide, None, backend="torch").describe()["own_linears"] == 0


def test_engines_over_one_model_look_past_each_others_forwards():
    """Another thread may begin a call, or make an engine, while a forward has replaced the linears."""
    model = tiny_model("llama")
    program, eager = sd.Engine(model, None), sd.Engine(model, None, enforce_eager=True)
    (expected,) = program.generate([[1, 2, 3]])
    alone = Linears(model, resolve(CPU)).served(True)
    with eager.target.hf.attached():
        (output,) = program.generate([[1, 2, 3]])
        assert Linears(model, resolve(CPU)).served(True) == alone
        late = Watch(model, ())
    assert output.token_ids == expected.token_ids
    assert alone
    assert late.change() is None, "a watch that began meanwhile would take the end of the forward for a change"
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(sd.UnsupportedModelError, match="a forward of one of its modules has been replaced"):
        program.generate([[1, 2, 3]])


def test_what_is_not_a_plain_linear_is_left_alone(wide):
    model = copy.deepcopy(wide)
    layers = model.model.layers
    layers[0].mlp.up_proj.__class__ = type("LoraLinear", (nn.Linear,), {"forward": lambda self, rows: rows})
    layers[0].mlp.gate_proj.forward = layers[0].mlp.gate_proj.forward  # replaced by the user
    weight = layers[1].mlp.up_proj.weight
    layers[1].mlp.up_proj.weight = nn.Parameter(weight.T.contiguous().T)
    served = Linears(model, resolve(CPU)).served(are_chunked=True)
    for left in (layers[0].mlp.up_proj, layers[0].mlp.gate_proj, layers[1].mlp.up_proj):
        assert left not in served
    assert layers[0].mlp.down_proj in served


@pytest.mark.parametrize("dtype", grid(DTYPES, keep=["bf16"]))
def test_wide_model_has_the_same_bits_in_every_batch(wide, dtype):
    target = copy.deepcopy(wide).to(dtype)
    draft = truncated_copy(wide, 1).to(dtype)
    alone = Alone(target, PROMPTS)
    for batch_size, k, method in ((2, 5, "eqspec"), (5, 2, "exspec")):
        assert_same_bits(target, draft, PROMPTS, alone, max_batch_size=batch_size, num_draft_tokens=k, method=method)


def test_greedy_tokens_are_those_of_transformers(wide):
    outputs = sd.Engine(wide, truncated_copy(wide, 1)).generate(PROMPTS, sd.SamplingParams(max_new_tokens=8))
    assert [o.token_ids for o in outputs] == [transformers_greedy(wide, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("part", ["q_proj", "down_proj"])
def test_an_expanded_weight_is_served(part):
    """It has less memory than numbers."""
    model = tiny_model("llama")
    for name, module in model.named_modules():
        if name.endswith(part):
            module.weight = nn.Parameter(module.weight[:1].detach().expand_as(module.weight), requires_grad=False)
    prompts, params = [[5, 6, 7], [8, 9]], sd.SamplingParams(max_new_tokens=5)
    outputs = sd.generate(model, None, prompts, params, enforce_eager=True)
    assert [output.token_ids for output in outputs] == [transformers_greedy(model, ids, 5) for ids in prompts]
