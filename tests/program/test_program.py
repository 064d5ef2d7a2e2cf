"""Forward programs: whole models, single operations, what cannot be written down, and where buffers lie."""

from __future__ import annotations

import copy
from itertools import combinations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters.draft_model import ModelDrafter
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.hf_model import RaggedModel
from specdec_fast.ops import resolve
from specdec_fast.ops.registry import all_ops
from specdec_fast.program import NotLowerableError, compile_forward
from specdec_fast.program.executors import executor_for
from specdec_fast.program.ir import LOGIT_ROWS, RowOp
from specdec_fast.program.memory_plan import _lives, _steps, placed
from specdec_fast.request.sequence import Sequence
from support.models import CONFIGS, VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    all_ops()["linear"].why_unavailable("cpp") is not None, reason="programs run in the C++ extension"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def ragged_logits(model, logit_rows=None):
    """Three sequences in two forwards: the second forward's logits."""
    pool = PagePool(model.layout, 512, 16, model.row_padding)
    for owner in "abc":
        pool.reserve(owner, 40)
    ids = torch.arange(41) * 7 % VOCAB_SIZE
    first = [Rows("a", 0, 20), Rows("b", 0, 11), Rows("c", 0, 10)]
    model.forward(lay_out(pool, first, ids), pool)
    second = [Rows("a", 20, 6), Rows("b", 11, 1), Rows("c", 10, 3)]
    return model.forward(lay_out(pool, second, ids[:10]), pool, logit_rows)


@torch.inference_mode()
def dense_logits(model):
    """The same from the Hugging Face model itself, sequence by sequence."""
    first, second = (
        (torch.arange(41) * 7 % VOCAB_SIZE).split([20, 11, 10]),
        (torch.arange(10) * 7 % VOCAB_SIZE).split([6, 1, 3]),
    )
    texts = [torch.cat(pieces) for pieces in zip(first, second, strict=True)]
    return torch.cat([model(text[None]).logits[0, -len(own) :] for text, own in zip(texts, second, strict=True)])


def eager(model):
    """The same model without its program."""
    other = copy.copy(model)
    other.program = None
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_models_are_computed_as_pytorch_does(architecture, dtype):
    """At most twice as far from the fp64 model as PyTorch's own forward of that dtype."""
    model = RaggedModel(tiny_model(architecture).to(dtype), resolve(CPU))
    assert model.program is not None, model.why_no_program
    truth = dense_logits(copy.deepcopy(model.model).double())
    ours, theirs = ((ragged_logits(m).double() - truth).norm() for m in (model, eager(model)))
    assert ours <= 2 * theirs
    assert torch.equal(ragged_logits(model, torch.tensor([3, 0, 9])), ragged_logits(model)[[3, 0, 9]])


def test_what_cannot_be_written_down_runs_in_pytorch():
    llama = tiny_model("llama")
    llama.model.layers[1].mlp.act_fn = torch.nn.Softplus()
    model = RaggedModel(llama, resolve(CPU))
    assert model.program is None
    assert "softplus" in model.why_no_program
    assert sd.Engine(llama, None).describe()["why_no_program"] == model.why_no_program


def test_a_recording_that_fails_leaves_the_model_to_pytorch(monkeypatch):
    def failing(*args):
        raise TypeError("an operation with arguments that nobody has seen")

    monkeypatch.setattr("specdec_fast.models.hf_model.compile_forward", failing)
    model = RaggedModel(tiny_model("llama"), resolve(CPU))
    assert model.program is None
    assert model.why_no_program == "recording it failed: TypeError: an operation with arguments that nobody has seen"
    assert ragged_logits(model).isfinite().all()


WIDTH = 24  # of the rows that single operations get
NO_LAYERS = KVLayout.uniform(num_layers=0, num_kv_heads=1, head_dim=4, dtype=torch.float32, device=CPU)


class Function(torch.nn.Module):
    """A model without layers: ``function`` of the embedded tokens ``[1, T, WIDTH]`` and the positions ``[1, T]``."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.function = function
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, WIDTH, dtype=dtype)
        torch.manual_seed(0)
        self.embedding.weight.data = torch.randn(VOCAB_SIZE, WIDTH).mul(3).to(dtype)
        self.embedding.weight.data[:3] = torch.linspace(-30, 30, 3 * WIDTH).view(3, WIDTH)  # far from 0 as well

    def forward(self, token_ids, positions, cache=None, logit_rows=None):
        out = self.function(self.embedding(token_ids), positions)
        return out if logit_rows is None else out[:, logit_rows]


def compiled(model):
    ops = resolve(CPU)
    executor, _ = executor_for(ops)
    program = executor(compile_forward(model, model, NO_LAYERS, ops, frozenset()))

    def run(token_ids):
        pool = PagePool(NO_LAYERS, 256, 16)
        pool.reserve("a", 200)
        batch = lay_out(pool, [Rows("a", 0, len(token_ids))], token_ids)
        return program(token_ids, batch, pool.pages, None)

    return run


FREQUENCIES = torch.linspace(0.01, 2, 5)
WEIGHT, BIAS = torch.linspace(-2, 2, WIDTH), torch.linspace(0.5, 3, WIDTH)
TABLE = torch.randn(VOCAB_SIZE + 2, WIDTH, generator=torch.Generator().manual_seed(1))
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


def widened(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def group_limited(x):
    """The router of DeepSeek-V3: the best experts of the best two of four groups."""
    scores = widened(x).sigmoid()
    choice = scores + 1e-4 * torch.arange(WIDTH)
    groups = choice.view(-1, 4, 6).topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(choice[:, :4]).scatter_(1, groups, 1).unsqueeze(-1).expand(-1, 4, 6).reshape(-1, WIDTH)
    weights = scores.gather(1, choice.masked_fill(~mask.bool(), float("-inf")).topk(4, dim=-1)[1])
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5


def put_together(x):
    out = x.new_empty(*x.shape[:2], 4, 8)
    out[..., :6] = x.view(1, -1, 4, 6)
    out[..., 6:].copy_(x[:, :, None, :2].expand(-1, -1, 4, -1))
    return out.flatten(2)


def overwritten_after_a_copy(x):
    before = x.clone()
    x[..., :4] = x[..., 4:8]
    return x + before


FUNCTIONS = {
    # functions of one number
    "copy": lambda x, p: x.clone(), "neg": lambda x, p: -x, "abs": lambda x, p: x.abs(),
    "square": lambda x, p: x**2, "cube": lambda x, p: x**3, "sqrt": lambda x, p: (x * x).sqrt(),
    "rsqrt": lambda x, p: (x * x + 0.1).rsqrt(), "reciprocal": lambda x, p: x.abs().add(1).reciprocal(),
    "exp": lambda x, p: x.exp(), "sin": lambda x, p: x.sin(), "cos": lambda x, p: x.cos(),
    "sigmoid": lambda x, p: x.sigmoid(), "silu": lambda x, p: F.silu(x), "tanh": lambda x, p: x.tanh(),
    "relu": lambda x, p: x.relu(), "gelu": lambda x, p: F.gelu(x),
    "gelu_tanh": lambda x, p: F.gelu(x, approximate="tanh"),
    # of two, with constants, scalars and repeated numbers on either side
    "add": lambda x, p: x + WEIGHT, "sub": lambda x, p: WEIGHT - x, "rsub": lambda x, p: 1.5 - x,
    "mul": lambda x, p: 2.5 * x, "div": lambda x, p: x / BIAS, "by_a_number": lambda x, p: x / torch.tensor(3.0),
    "broadcast": lambda x, p: (x.view(1, -1, 4, 6) * x[..., :6].unsqueeze(2)).flatten(2),
    "maximum": lambda x, p: torch.maximum(x, WEIGHT.to(x.dtype)), "clamp": lambda x, p: x.clamp(min=-1.5, max=2),
    "minimum": lambda x, p: torch.minimum(x, x.view(1, -1, 2, 12)[:, :, 0].repeat_interleave(2, -1)),
    "clamp_min": lambda x, p: x.clamp_min(0.5), "clamp_max": lambda x, p: x.clamp_max(0.5),
    # that compare and choose
    "compare": lambda x, p: torch.cat([f(x, WEIGHT).to(x.dtype) for f in COMPARISONS], -1),
    "logic": lambda x, p: (~((x > 0) & (x < 2)) | (x == 0)).float(),
    "where": lambda x, p: torch.where(x > WEIGHT, x, -1.0) + torch.where(x > 1, 2.0, x),
    "masked_fill": lambda x, p: x.masked_fill(~(x > 0).float().bool(), float("-inf")),
    "softmax": lambda x, p: x.softmax(-1), "softmax_wide": lambda x, p: widened(x).softmax(-1),
    "softmax_of_heads": lambda x, p: x.view(1, -1, 4, 6).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
    "topk": lambda x, p: x.view(-1, WIDTH).topk(5, dim=-1)[0][None],
    "places": lambda x, p: (x.float() + 1e-4 * torch.arange(WIDTH)).topk(5).indices.float(),
    "gather": lambda x, p: x.square().gather(-1, (x.float() + 1e-4 * torch.arange(WIDTH)).topk(5).indices),
    "scatter": lambda x, p: torch.full_like(x, -1).scatter(-1, x[..., :8].topk(3).indices, 2.5),
    "scatter_rows": lambda x, p: torch.ones_like(x).scatter_(-1, x[..., :8].topk(3).indices, x[..., :3]),
    "group_limited": lambda x, p: group_limited(x[0])[None],
    "in_place": lambda x, p: x.clone().div_(x.abs().sum(-1, keepdim=True)).add_(1).mul_(WEIGHT.to(x.dtype)),
    # over the last axis
    "mean": lambda x, p: x.mean(-1, keepdim=True), "sum": lambda x, p: x.view(1, -1, 4, 6).sum(-1),
    "layer_norm": lambda x, p: F.layer_norm(x, (WIDTH,), WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "layer_norm_bare": lambda x, p: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x, p: F.rms_norm(x, (WIDTH,), WEIGHT.to(x.dtype), 1e-6),
    "rms_norm_of_heads": lambda x, p: F.rms_norm(x.view(1, -1, 4, 6), (6,)).flatten(2),
    # the same numbers elsewhere
    "rotate_half": lambda x, p: torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1),
    "rotate_pairs": lambda x, p: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "repeat": lambda x, p: x[..., :5].repeat_interleave(2, dim=-1),
    "split": lambda x, p: x.split([8, 4, 12], -1)[2] * x.chunk(2, -1)[0],
    "heads": lambda x, p: (x.view(1, -1, 4, 6).transpose(1, 2) * 2).transpose(1, 2).reshape(1, x.shape[1], WIDTH),
    "swapped": lambda x, p: x.view(1, -1, 4, 6).transpose(2, 3).reshape(1, x.shape[1], WIDTH),
    "expand": lambda x, p: (x[:, :, None, :6].expand(1, -1, 3, 6) + 1).flatten(2),
    "unbind": lambda x, p: x.view(1, -1, 3, 8).unbind(2)[1], "select": lambda x, p: x.view(1, -1, 3, 8)[:, :, -1],
    "put_together": lambda x, p: put_together(x),
    # of positions
    "rotary": lambda x, p: (p[..., None].float() * FREQUENCIES).cos().to(x.dtype),
    "rotary_product": lambda x, p: (FREQUENCIES[None, :, None] @ p[:, None, :].float()).transpose(1, 2),
    "learned_positions": lambda x, p: x + F.embedding(p + 2, TABLE.to(x.dtype)),
    # linear layers
    "linear": lambda x, p: F.linear(x, TABLE[:11].to(x.dtype), WEIGHT[:11].to(x.dtype)),
    "linear_of_heads": lambda x, p: F.linear(x.view(1, -1, 4, 6), TABLE[:5, :6].contiguous().to(x.dtype)).flatten(2),
    "linear_of_gpt2": lambda x, p: torch.addmm(BIAS.to(x.dtype), x[0], TABLE[:WIDTH].to(x.dtype))[None],
    "linear_as_matmul": lambda x, p: x @ TABLE[:WIDTH, :7].contiguous().to(x.dtype),
    "linear_as_matmul_of_heads": lambda x, p: (x.view(1, -1, 4, 6) @ TABLE[:6].to(x.dtype)).flatten(2),
    "linear_of_a_slice": lambda x, p: F.linear(x[..., 3:9], TABLE[:5, :6].contiguous().to(x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.inference_mode()
def test_operations_are_computed_as_pytorch_does(name, dtype):
    """At most twice as far from fp64 as PyTorch's own result, and two units in the last place where that is exact."""
    model = Function(FUNCTIONS[name], dtype)
    token_ids, positions = torch.arange(97), torch.arange(97)[None]
    got, theirs = compiled(model)(token_ids), model(token_ids[None], positions)[0].flatten(1)
    truth = copy.deepcopy(model).double()(token_ids[None], positions)[0].flatten(1).double()
    assert got.shape == theirs.shape
    assert got.dtype == theirs.dtype
    rows = model.embedding.weight[token_ids].double().abs()
    cancelling = {"gelu": rows, "gelu_tanh": rows, "mean": rows.mean(-1, True), "sum": rows.view(-1, 4, 6).sum(-1)}
    if "softmax" in name:  # a rounding of the exponent's argument counts by how large that is
        cancelling[name] = truth.abs() * (1 + 2 * rows.amax(-1, True))
    unit = torch.finfo(dtype).eps * torch.maximum(truth.abs(), cancelling.get(name, truth.abs()))
    allowed = 2 * torch.maximum((theirs.double() - truth).abs(), unit) + torch.finfo(dtype).smallest_normal
    if "norm" in name or "linear" in name:  # sums of numbers larger than the result
        allowed = allowed.amax(dim=-1, keepdim=True)
    finite = theirs.isfinite()
    assert torch.equal(got[~finite], theirs[~finite])
    assert ((got.double() - truth).abs() <= allowed)[finite].all()


def changed_through_a_view(x):
    head = x[..., :5]
    head.add_(1)
    return x


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("size", "count"), [(8, 2), (24, 5), (24, 24), (256, 3), (256, 8)])
@torch.inference_mode()
def test_topk_chooses_among_equal_numbers_as_pytorch_does(size, count, is_sorted):
    """Scores of 16 bits tie; a program and PyTorch should then ask the same experts. NaN counts as the largest."""
    model = Function(lambda x, p: x.topk(count, sorted=is_sorted).indices.float())
    scores = torch.randint(6, (VOCAB_SIZE, size), generator=torch.Generator().manual_seed(size)).float()
    scores[7, 5] = scores[7, 3] = float("nan")
    scores[8] = 0.0
    model.embedding = torch.nn.Embedding.from_pretrained(scores)
    assert torch.equal(compiled(model)(torch.arange(97)), model(torch.arange(97)[None], None)[0])


@torch.inference_mode()
def test_transposed_weights_are_read_where_they_are():
    """GPT-2 keeps its linears as ``[in_features, out_features]``; a copy would not see them change."""
    model = RaggedModel(tiny_model("gpt2"), resolve(CPU))
    before = ragged_logits(model)
    model.model.transformer.h[1].mlp.c_fc.weight.mul_(1.5)
    changed = ragged_logits(model)
    assert not torch.equal(changed, before)
    assert torch.equal(ragged_logits(RaggedModel(model.model, resolve(CPU))), changed)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, p: x.softmax(1), "softmax over anything but the last axis"),
        (lambda x, p: x - x.mean(1, keepdim=True), "anything but the last axis"),
        (lambda x, p: x.flip(1), "flip"),
        (lambda x, p: x[:, :5], "rows are cut out"),
        (lambda x, p: torch.cat((x, x), 1), "appended"),
        (lambda x, p: x.erf_(), "erf_"),
        (lambda x, p: changed_through_a_view(x), "changed in place through another tensor"),
        (lambda x, p: torch.zeros(1, x.shape[1], 5).add_(x[..., :5]), "add_"),
        (lambda x, p: x.topk(3).indices + 1, "add of integers"),
        (lambda x, p: x.int(), "cut to whole ones"),
        (lambda x, p: ~x.topk(3).indices, "logical operation on numbers"),
        (lambda x, p: x.topk(3, largest=False)[0], "smallest"),
        (lambda x, p: x.scatter(-1, x.topk(3).indices, x), "some numbers of a tensor"),
        (lambda x, p: x.view(1, -1, 4, 6) @ x.view(1, -1, 6, 4), "no linear layer"),
        (lambda x, p: overwritten_after_a_copy(x), "overwritten of which there is a copy"),
        (lambda x, p: x.new_empty(x.shape[1], x.shape[1]), "no one axis counts the rows"),
        (lambda x, p: x * p.max(), "max"),
        (lambda x, p: x.flatten(0, 2), "axis of their own"),
        (lambda x, p: x * x.shape[1], "not computed in the same way"),
        (lambda x, p: x * torch.arange(x.shape[1])[:, None].float(), "shape"),
        (lambda x, p: F.dropout(x, 0.5), "dropout"),
        (lambda x, p: x**1.7, "power"),
        (lambda x, p: x if bool((x > 0).all()) else -x, "all"),
        (lambda x, p: p[..., None] * 2, "integers"),
    ],
)
def test_what_a_program_cannot_express_is_refused(function, message):
    with pytest.raises(NotLowerableError, match=message):
        compiled(Function(function))


def test_hooks_are_not_passed_over():
    """A program would not call them, so a model that has some stays with PyTorch."""
    model = tiny_model("llama")
    calls = []
    model.model.layers[1].register_forward_hook(lambda *args: calls.append(args))
    ragged = RaggedModel(model, resolve(CPU))
    assert "hooks" in ragged.why_no_program
    calls.clear()
    ragged_logits(ragged)
    assert len(calls) == 2


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


@pytest.mark.parametrize("which", ["target", "draft"])
def test_weights_that_have_been_moved_are_noticed(which):
    """A program would go on reading the old ones."""
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


def add_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0)


def add_pre_hook(model):
    model.model.layers[1].register_forward_pre_hook(lambda module, args: None)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (scaled_llama, change_scalar, "in place"),
        (scaled_llama, change_scalar_behind_the_counter, "in place"),
        (lambda: tiny_model("gemma2"), change_norm, "in place"),
        (lambda: tiny_model("llama"), exchange_buffer, "exchanged"),
        (lambda: tiny_model("llama"), exchange_module, "exchanged"),
        (lambda: tiny_model("llama"), add_hook, "hooks"),
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


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt-neox"])
def test_a_program_keeps_numbers_of_little(architecture):
    """Matrices are read where they are; a change of one in place must not be refused."""
    model = RaggedModel(tiny_model(architecture), resolve(CPU))
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.5)
    model.expect_same_weights()


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_tokens_outside_the_vocabulary_are_refused(token_id):
    with pytest.raises(IndexError, match=f"token id {token_id} lies outside a table of {VOCAB_SIZE} rows"):
        compiled(Function(lambda x, p: x))(torch.tensor([1, token_id, 2]))


def test_logit_rows_outside_the_batch_are_refused():
    with pytest.raises(IndexError, match=r"logit_rows\[1\] is 10; there are 10 rows"):
        ragged_logits(RaggedModel(tiny_model("llama"), resolve(CPU)), torch.tensor([0, 10]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 40])
def test_drafting_in_one_call_drafts_the_same(temperature, vocab_size):
    """As forward after forward from Python: all the tokens, and the KV entries."""
    params = sd.SamplingParams(max_new_tokens=30, temperature=temperature, top_k=20, seed=3)
    texts = [[5, 6, 7, 8, 9], [11, 12], [1] * 17]
    found = []
    for enforce_eager in (False, True):
        drafter = ModelDrafter(RaggedModel(tiny_model("llama"), resolve(CPU)), vocab_size)
        if enforce_eager:
            program, drafter.model.program = drafter.model.program, None
            drafter.model.forward = lambda batch, pool, rows=None, p=program: p(
                batch.token_ids, batch, pool.pages, rows
            )
        drafter.prepare(512, 16)
        sequences = [
            Sequence(i, list(text), len(text), len(text) + 30, params, frozenset(), seed=3 + i)
            for i, text in enumerate(texts)
        ]
        with torch.inference_mode():
            drafter.admit(sequences)
            drafts = [drafter.propose(sequences, [4, 4, 4])]
            for sequence in sequences:
                sequence.token_ids += [3, 4]
            drafter.commit(sequences)
            drafts.append(drafter.propose(sequences, [5, 0, 2]))
        assert max(int(draft.token_ids.max()) for draft in drafts) < vocab_size
        found.append(([draft.token_ids.tolist() for draft in drafts], drafter.pool.tensors[0]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_drafting_chooses_the_first_token_where_logits_are_nan():
    model = RaggedModel(tiny_model("llama"), resolve(CPU))
    with torch.no_grad():
        model.model.lm_head.weight[7] = float("nan")
    drafter = ModelDrafter(model, VOCAB_SIZE)
    drafter.prepare(64, 16)
    sequence = Sequence(0, [1, 2, 3], 3, 20, sd.SamplingParams(), frozenset())
    drafter.admit([sequence])
    assert drafter.propose([sequence], [3]).token_ids.tolist() == [0, 0, 0]


def test_engine_can_be_told_to_run_pytorch(prompts, target, draft):
    params = sd.SamplingParams(max_new_tokens=12)
    eagerly = sd.Engine(target, draft, enforce_eager=True)
    assert eagerly.describe()["forward_program"] is False
    assert eagerly.describe()["why_no_program"] == "enforce_eager=True"
    expected = [output.token_ids for output in eagerly.generate(prompts[:4], params)]
    engine = sd.Engine(target, draft)
    assert engine.describe()["forward_program"] is True
    assert [output.token_ids for output in engine.generate(prompts[:4], params)] == expected


def overlapping(plan, buffers, logits, lives_of):
    """Pairs of buffers that lie at the same place while both are needed."""
    steps = _steps(plan.instructions, buffers)
    by_step, by_operation = _lives(plan.instructions, lives_of(steps)), _lives(plan.instructions, lambda i: i)
    found = []
    for a, b in combinations(sorted(by_step), 2):
        one, other = plan.buffers[a], plan.buffers[b]
        if (one.place, one.domain * (one.place == 0)) != (other.place, other.domain * (other.place == 0)) or logits in (
            a,
            b,
        ):
            continue
        lives = by_step if one.place == 0 else by_operation
        meet = lives[a].first <= lives[b].last and lives[b].first <= lives[a].last
        apart = one.offset + one.row_bytes <= other.offset or other.offset + other.row_bytes <= one.offset
        if meet and not apart:
            found.append((a, b))
    return found


@pytest.mark.parametrize("architecture", ["llama", "glm4", "gemma2"])
def test_buffers_that_are_needed_together_lie_apart(architecture, monkeypatch):
    kept = {}

    def keeping(instructions, buffers, logits):
        kept.update(buffers=buffers, logits=logits)
        return placed(instructions, buffers, logits)

    monkeypatch.setattr("specdec_fast.program.compile.placed", keeping)
    plan = RaggedModel(tiny_model(architecture).to(torch.bfloat16), resolve(CPU)).program._plan
    assert overlapping(plan, **kept, lives_of=lambda steps: steps.__getitem__) == []
    assert sum(buffer.place == 1 for buffer in plan.buffers) > 20, "row operations hand on in a thread's own memory"
    # negative control: by a clock too slow to tell some steps apart, some do meet
    assert overlapping(plan, **kept, lives_of=lambda steps: lambda i: steps[i] // 3)
    domains = {kept["buffers"][i.writes[0]].domain for i in plan.instructions if isinstance(i, RowOp)}
    assert (LOGIT_ROWS in domains) is (architecture == "gemma2")  # whose logits are capped
