"""Functions of rows as launches, in Triton's interpreter: a CPU in the place of a GPU."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.ops import resolve
from specdec_fast.program import executors
from specdec_fast.program.executors import Programs
from specdec_fast.runner import row_module
from specdec_fast.runner.graphs.capture import CAPTURES
from specdec_fast.runner.row_module import RowModule
from specdec_fast.trees.rows import rows_of_trees
from support.eagle3 import write_checkpoint
from support.grids import grid
from support.models import tiny_model, truncated_copy
from support.mtp import Case
from support.programs import CPU, needs_programs
from support.repeated import Repeated
from support.row_modules import OPS, VOCAB, WIDTH, function_of, pool_of

pytest.importorskip("triton")

import specdec_fast as sd
from specdec_fast.program.triton.executor import TritonProgram

pytestmark = needs_programs


@pytest.fixture
def on_gpu(monkeypatch):
    """Let programs of row functions be launches, as on a GPU, and models have no programs, which would take longer."""

    def launching(plan):
        return Programs(None, TritonProgram(plan, resolve(CPU, "triton")))

    monkeypatch.setattr(executors, "EXECUTORS", {})
    monkeypatch.setattr(row_module, "executor_for", lambda ops, device: (launching, None))


@pytest.mark.parametrize("dtype", grid([torch.float32, torch.float16], keep=[torch.float32]), ids=str)
def test_launches_compute_what_pytorch_computes(dtype, on_gpu):
    """Chains with the logits of all rows, a tree with those of some."""
    function, found = function_of(dtype), []
    for enforce_eager in (False, True):
        module, pool, results = RowModule(function, OPS, 16, enforce_eager), pool_of(function), []
        assert (module.program, module.has_program) == (None, not enforce_eager)
        forwards = [
            ([Rows("a", 0, 5), Rows("b", 0, 18)], None),
            ([Rows("a", 5, 4), Rows("b", 17, 1)], rows_of_trees([-1, 0, 0], [3, 0])),
        ]
        for rows, trees in forwards:
            tokens = torch.arange(sum(each.count for each in rows)) % VOCAB
            batch = lay_out(pool, rows, tokens, trees=trees)
            carried = torch.linspace(-1, 1, len(tokens) * WIDTH).view(-1, WIDTH).to(dtype)
            results += module(pool, batch, carried, batch.last_rows if trees else None)
        found.append(results)
    for own, other in zip(*found, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own.float(), other.float(), rtol=0, atol=32 * torch.finfo(dtype).eps)


def test_inputs_of_another_size_are_refused(on_gpu):
    function = function_of()
    module, pool = RowModule(function, OPS, 16), pool_of(function)
    batch = lay_out(pool, [Rows("a", 0, 2)], torch.tensor([1, 2]))
    for inputs in (torch.zeros(1, WIDTH), torch.zeros(2, WIDTH + 1), torch.zeros(2, WIDTH, dtype=torch.float64)):
        with pytest.raises(ValueError, match="2 rows take 96 bytes besides their tokens"):
            module.device_program(batch, pool, None, None, inputs)
    with pytest.raises(ValueError, match="not 0"):
        module.device_program(batch, pool, None)


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle3_drafts_with_launches_in_a_graph(tmp_path, temperature, on_gpu, monkeypatch):
    """A whole phase of a step: projection, launches, choices."""
    model = truncated_copy(tiny_model("qwen3"), 2)
    write_checkpoint(tmp_path, model)
    expect_launches(model, f"eagle3:{tmp_path}", temperature, monkeypatch)


@pytest.mark.grid
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next_moe"])
def test_mtp_drafts_with_launches_in_a_graph(tmp_path, architecture, on_gpu, monkeypatch):
    case = Case(architecture)
    case.write(tmp_path, "qwen")
    expect_launches(case.target, f"mtp:{tmp_path}", 1.0, monkeypatch)


def expect_launches(model, draft, temperature, monkeypatch):
    """Decode twice with a drafter whose program is launches in a graph, and compare with plain decoding."""
    prompts, params = [[5, 9, 2], [7, 3]], sd.SamplingParams(max_new_tokens=6, temperature=temperature, seed=3)
    monkeypatch.setitem(CAPTURES, "cpu", Repeated)
    expected = sd.Engine(model, None, enforce_eager=True).generate(prompts, params)
    engine = sd.Engine(model, draft, num_draft_tokens=2)
    described = engine.describe()["draft"]
    assert (described["forward_program"], described["why_no_program"]) == (True, None)
    for _ in range(2):
        outputs = engine.generate(prompts, params)
        assert [o.raise_for_error().token_ids for o in outputs] == [o.token_ids for o in expected]
    assert engine.describe()["draft"]["graphs_captured"] > 0
