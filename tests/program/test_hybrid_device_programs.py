"""Models with recurrent layers as launches, in Triton's interpreter; and their kernels, compiled ahead of time."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.program import NotLowerableError
from specdec_fast.program.executors import executor_for
from specdec_fast.program.plan.ir import Recurrent
from specdec_fast.program.plan.working_memory import working_bytes
from specdec_fast.runner.graphs.capture import CAPTURES
from support.graphs import LIMITS, Everything
from support.grids import grid
from support.hybrid_programs import HYBRIDS, tiny_hybrid
from support.models import VOCAB_SIZE
from support.programs import CPU, needs_programs
from support.repeated import Repeated

pytest.importorskip("triton")

from specdec_fast.program.triton.device_forward import DeviceForward
from specdec_fast.program.triton.executor import dtypes_of
from support.device_programs import interpreted, plan_of

pytestmark = needs_programs
IDS = torch.arange(12) * 7 % VOCAB_SIZE
WRONG = 9
# The first forward has two draft tokens, of which the second one accepts the first: it replays that one's row.
WITH_REJECTED_DRAFTS = [(0, 4, 2), (3, 2, 1)]
# Of each recurrent op, a model that has it.
OPS = {"conv_rows_": "lfm2", "linear_attention_rows_": "qwen3_5", "selective_scan_rows_": "mamba"}


def batches_of(pool, spans):
    """Yield spans of one text of ``IDS``: first position, rows, and draft tokens, of which the last one is wrong."""
    pool.add("a")
    for start, count, drafts in spans:
        token_ids = IDS[start : start + count].clone()
        if drafts:
            token_ids[-1] = WRONG
        yield lay_out(pool, [Rows("a", start, count, drafts)], token_ids)


def logits_of(model, forward, spans):
    """Compute spans one after the other; return the logits of all rows but those of wrong draft tokens."""
    pool = PagePool(model.layout, 64, 16)
    computed = [forward(batch, pool).clone() for batch in batches_of(pool, spans)]
    return torch.cat([logits[:-1] if drafts else logits for logits, (*_, drafts) in zip(computed, spans, strict=True)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    grid(
        product(HYBRIDS, (torch.float32, torch.float16)),
        keep=[("qwen3_5", torch.float16)],
    ),
    ids=str,
)
@torch.inference_mode()
def test_models_are_computed_as_pytorch_does(name, dtype):
    """At most twice as far from PyTorch in fp32 as PyTorch in 16 bits."""
    model = tiny_hybrid(name)
    exact = interpreted(model)
    truth = logits_of(exact, exact.hf.forward, [(0, 4, 0)])
    ours = exact if dtype == torch.float32 else interpreted(model.to(dtype))
    found = logits_of(ours, ours.forward, WITH_REJECTED_DRAFTS)
    theirs = logits_of(ours, ours.hf.forward, WITH_REJECTED_DRAFTS)
    allowed = 1e-5 * truth.norm() if dtype == torch.float32 else 2 * (theirs - truth).norm()
    assert (found - truth).norm() <= allowed


@pytest.mark.grid
@pytest.mark.parametrize("name", list(HYBRIDS))
@torch.inference_mode()
def test_bits_of_a_row_are_its_own(name):
    """Of rows that are computed together, and of replayed ones."""
    model = tiny_hybrid(name).half()
    ours = interpreted(model)
    together = logits_of(ours, ours.forward, [(0, 4, 0)])
    assert torch.equal(logits_of(ours, ours.forward, WITH_REJECTED_DRAFTS), together)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["mamba", "qwen3_5"])
@torch.inference_mode()
def test_programs_in_graphs_have_the_bits_of_launches(name, monkeypatch):
    """The first forward is recorded, and the second one replays it; their bucket has more rows."""
    monkeypatch.setitem(CAPTURES, "cpu", Repeated)
    model = interpreted(tiny_hybrid(name))
    expected = logits_of(model, model.forward, [(0, 3, 1), (2, 3, 0)])
    model.use_graphs(LIMITS)
    model.graphs.asked = Everything()
    assert torch.equal(logits_of(model, model.forward, [(0, 3, 1), (2, 3, 0)]), expected)
    assert (model.graphs.why_not, model.graphs.num_captured) == (None, 1)


@torch.inference_mode()
def test_dtypes_of_buffers_are_known():
    """A scan computes fp32 in a model of 16 bits; kernels are compiled for these dtypes ahead of time."""
    model = interpreted(tiny_hybrid("mamba").half())
    program = model.device_program
    pool = PagePool(model.layout, 64, 16)
    (batch,) = batches_of(pool, [(0, 1, 0)])
    forward = DeviceForward(program._plan, batch, pool, None, None)
    for step, _ in program._steps:
        step(forward)
    dtypes = dtypes_of(program._plan)
    assert {tensor.dtype for tensor in forward.memory.values()} == {torch.float32, torch.float16}
    assert {buffer: tensor.dtype for buffer, tensor in forward.memory.items()} == {
        buffer: dtypes[buffer] for buffer in forward.memory
    }


@pytest.mark.parametrize("op", OPS)
def test_recurrent_ops_of_another_backend_make_no_program(op):
    ops = resolve(CPU)
    executor, _ = executor_for(replace(ops, chosen={**ops.chosen, op: "torch"}), CPU)
    with pytest.raises(NotLowerableError, match=f"programs run on cpp, here torch serves {op}"):
        executor(plan_of(tiny_hybrid(OPS[op])))


@pytest.mark.parametrize("op", OPS)
def test_recurrent_ops_have_working_memory(op):
    """Each thread has some of its own, whatever the number of rows."""
    plan = plan_of(tiny_hybrid(OPS[op]))
    (step, *_) = (step for step in plan.instructions if isinstance(step, Recurrent))
    alone = replace(plan, instructions=[step])
    of_one, of_four = (working_bytes(alone, 8, 1, threads, lambda *_: 0, lambda *_: 0) for threads in (1, 4))
    assert 0 < 4 * of_one == of_four


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", grid(list(HYBRIDS), keep=[]))
def test_kernels_compile_without_spills(compiler, name):
    targets = "sm_80,sm_90,sm_100,gfx942"
    printed = compiler.run("from support.device_programs import main; main()", targets, f"hybrid.{name}")
    rows = json.loads(printed.splitlines()[-1])
    assert [row for row in rows if row["error"] or row["spill_bytes"]] == []
    assert len(rows) >= 4 * len(targets.split(",")), "it has several kernels"
