"""Whole models as launches, in Triton's interpreter; and their kernels, compiled ahead of time."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.program import executors
from specdec_fast.program.executors import Programs, executor_for
from specdec_fast.runner.graphs.capture import CAPTURES
from specdec_fast.runner.ragged_model import RaggedModel
from support.experts import CONFIGS as EXPERTS
from support.experts import tiny_mixture
from support.graphs import LIMITS, Everything
from support.grids import grid
from support.models import CONFIGS, TINY_GROUPED, VOCAB_SIZE, WITH_CHUNKS, tiny_model, truncated_copy
from support.programs import CPU, needs_programs
from support.repeated import Repeated

pytest.importorskip("triton")

from specdec_fast.program.triton import launches
from specdec_fast.program.triton.executor import TritonProgram
from specdec_fast.triton_kernels import linear_tiles
from support.device_programs import interpreted

pytestmark = needs_programs
IDS = torch.arange(12) * 7 % VOCAB_SIZE


def logits_of(model, spans, pool=None):
    """Compute spans of one text of ``IDS``, forward after forward; return the logits of all its rows."""
    pool = PagePool(model.layout, 64, 16)
    pool.add("a")
    starts = [sum(spans[:i]) for i in range(len(spans))]
    rows = [(start, Rows("a", start, count)) for start, count in zip(starts, spans, strict=True)]
    return torch.cat([model.forward(lay_out(pool, [r], IDS[s : s + r.count]), pool) for s, r in rows])


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    grid(
        [(architecture, dtype) for architecture in WITH_CHUNKS for dtype in (torch.float32, torch.float16)],
        keep=[("qwen3", torch.float16)],
    ),
    ids=str,
)
@torch.inference_mode()
def test_models_are_computed_as_pytorch_does(architecture, dtype):
    """At most twice as far from the fp64 model as PyTorch, and bits of a row are its own."""
    model = truncated_copy(tiny_model(architecture), 1).to(dtype)
    ours = interpreted(model)
    together = logits_of(ours, [3, 2])
    assert torch.equal(together, logits_of(ours, [4, 1]))
    truth = copy.deepcopy(model).double()(IDS[None, :5]).logits[0]
    theirs = model(IDS[None, :5]).logits[0]
    assert (together.double() - truth).norm() <= 2 * (theirs.double() - truth).norm()


@pytest.mark.grid
@pytest.mark.parametrize("name", EXPERTS)
@torch.inference_mode()
def test_mixtures_of_experts_are_computed_as_pytorch_does(name):
    """Routers choose the same experts in fp32: another one moves logits by 1e-2. In fp16, bits of a row are its own."""
    model = tiny_mixture(name)
    together = logits_of(interpreted(model), [3, 2])
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the default has no fp64
    truth = exact(IDS[None, :5]).logits[0]
    assert (together.double() - truth).norm() <= 1e-5 * truth.norm()
    ours = interpreted(model.half())
    assert torch.equal(logits_of(ours, [3, 2]), logits_of(ours, [4, 1]))


def model_with_biases():
    """Build a layer of Qwen2: queries, keys and values have biases, and two heads of four have no keys of their own."""
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{**TINY_GROUPED, "num_hidden_layers": 1})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_()
    return model


@pytest.mark.grid
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: truncated_copy(tiny_model("llama"), 1), torch.float32),
        (model_with_biases, torch.float16),
    ],
    ids=["llama", "qwen2"],
)
@torch.inference_mode()
def test_linears_of_one_launch_have_the_bits_of_separate_launches(make, dtype, monkeypatch):
    """In fp32, tiles of both heights occur: they are those that sizes such as 1024 and 4096 have."""
    monkeypatch.setattr(linear_tiles, "_ENOUGH_PROGRAMS", 1)
    model = make().to(dtype)
    together = interpreted(model)
    monkeypatch.setattr(launches, "MAX_WEIGHTS", 1)
    apart = interpreted(model)
    assert len(apart.device_program._steps) - len(together.device_program._steps) == 3  # q, k and v; gate and up
    for spans in ([5], [3, 2]):
        assert torch.equal(logits_of(together, spans), logits_of(apart, spans))


def test_only_gpus_launch_programs():
    """On a CPU the interpreter would be far slower than PyTorch, so the tests ask for it."""
    executor, reason = executor_for(resolve(CPU, "triton"), CPU)
    assert executor is None
    assert "programs run on cpp, here triton serves" in reason
    executor, reason = executor_for(resolve(CPU, "triton"), torch.device("cuda"))
    assert executor is not None


def test_engines_whose_linears_pytorch_computes_record_nothing():
    """In fp32 the op ``linear`` is PyTorch's on a GPU by default: the model would be recorded in vain."""
    ops = resolve(CPU, "triton")
    executor, reason = executor_for(replace(ops, chosen={**ops.chosen, "linear": "torch"}), torch.device("cuda"))
    assert executor is None
    assert reason.startswith("programs run on triton, here torch serves linear")


def test_launches_go_to_the_device_of_the_batch(monkeypatch):
    """Triton launches on the current device, which need not be the model's."""
    program, current = interpreted(truncated_copy(tiny_model("llama"), 1)).device_program, []

    @contextmanager
    def device(entered):
        current.append(entered)
        yield
        current.pop()

    found = []
    note = lambda forward: found.append([*current]) or forward.memory.update({program._logits: None})  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(program, "_steps", [(note, [])])
    token_ids = SimpleNamespace(device=torch.device("cuda", 1), shape=(3,))
    program(SimpleNamespace(token_ids=token_ids), None)
    assert (found, current) == ([[torch.device("cuda", 1)]], [])


@torch.inference_mode()
def test_no_logits_are_asked_for():
    model = interpreted(truncated_copy(tiny_model("llama"), 1))
    pool = PagePool(model.layout, 64, 16)
    pool.add("a")
    logits = model.forward(lay_out(pool, [Rows("a", 0, 3)], IDS[:3]), pool, torch.empty(0, dtype=torch.int64))
    assert logits.shape == (0, VOCAB_SIZE)


@torch.inference_mode()
def test_models_on_gpus_are_programs_in_graphs(monkeypatch):
    """A CPU in the place of a GPU: the model makes the program, a graph records its launches, taps are written."""
    launching = lambda plan, ops: Programs(None, TritonProgram(plan, resolve(CPU, "triton")))  # noqa: E731
    monkeypatch.setattr(executors, "EXECUTORS", {"cpp": ("cpu", launching)})
    monkeypatch.setitem(CAPTURES, "cpu", Repeated)
    model = RaggedModel(truncated_copy(tiny_model("llama"), 1), resolve(CPU))
    assert model.why_no_program is None
    assert (model.program, model.has_program, model.has_fused_step) == (None, True, False)
    model.use_taps((0, "final"))
    model.use_graphs(LIMITS)
    pool, launched = PagePool(model.layout, 64, 16), []
    pool.add("a")
    for asked in (set(), Everything()):  # nothing is recorded at first
        model.graphs.asked = asked
        hidden = model.empty_hidden_states(3)
        logits = model.forward(lay_out(pool, [Rows("a", 0, 3)], IDS[:3]), pool, None, hidden)
        launched.append((logits.clone(), hidden))
        assert torch.equal(hidden[:, 0], model.model.model.embed_tokens(IDS[:3]))
        assert torch.equal(model.model.lm_head(hidden[:, 1]).argmax(-1), logits.argmax(-1))
    assert (model.graphs.why_not, model.graphs.num_captured) == (None, 1)
    assert all(map(torch.equal, *launched))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("targets", "models"),
    [
        *(
            pytest.param("sm_80,sm_90,sm_100,gfx942", [f"tiny.{each}", f"wide.{each}"], id=each, marks=pytest.mark.grid)
            for each in CONFIGS
        ),
        pytest.param(
            "sm_80,sm_90,sm_100,gfx942",
            ["experts.qwen3-moe", "experts.deepseek-v3", *(f"mixture.{each}" for each in EXPERTS)],
            id="experts",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_kernels_compile_without_spills(compiler, targets, models):
    """``wide`` are the sizes of a model of 8 billion parameters, ``experts`` routers of 128 and 256 experts."""
    printed = compiler.run("from support.device_programs import main; main()", targets, *models)
    rows = json.loads(printed.splitlines()[-1])
    assert [row for row in rows if row["error"] or row["spill_bytes"]] == []
    assert len(rows) >= 4 * len(models) * len(targets.split(",")), "each of them has several kernels"
