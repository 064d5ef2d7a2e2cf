"""Where the buffers of a program are: apart, if they are needed at the same time."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import combinations

import pytest
import torch

from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.ops import resolve
from specdec_fast.program import compile_forward
from specdec_fast.program.plan.ir import LOGIT_ROWS, ROWS, Gather, Linear, RowOp
from specdec_fast.program.plan.memory import _lives, _steps, placed
from specdec_fast.runner.ragged_model import RaggedModel
from support.models import tiny_model
from support.programs import CPU, NO_LAYERS, WIDTH, Function, needs_programs

pytestmark = needs_programs


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

    def keeping(instructions, buffers, logits, *more):
        kept.update(buffers=buffers, logits=logits)
        return placed(instructions, buffers, logits, *more)

    monkeypatch.setattr("specdec_fast.program.compile.placed", keeping)
    plan = RaggedModel(tiny_model(architecture).to(torch.bfloat16), resolve(CPU)).program._plan
    assert overlapping(plan, **kept, lives_of=lambda steps: steps.__getitem__) == []
    assert sum(buffer.place == 1 for buffer in plan.buffers) > 20, (
        "row operations pass on results in a thread's own memory"
    )
    # negative control: with a clock too coarse to separate all steps, some overlap
    assert overlapping(plan, **kept, lives_of=lambda steps: lambda i: steps[i] // 3)
    domains = {kept["buffers"][i.writes[0]].domain for i in plan.instructions if isinstance(i, RowOp)}
    assert (LOGIT_ROWS in domains) is (architecture == "gemma2")  # whose logits are capped


@torch.inference_mode()
def test_rows_are_taken_before_the_output_layer():
    """Of a model that computes the logits of all rows, a program computes those that are wanted."""
    head = torch.randn(7, WIDTH)
    model = Function(lambda x, p: torch.nn.functional.linear(x, head))
    forward = lambda token_ids, positions, cache, logit_rows: model(token_ids, positions)  # noqa: E731
    plan = compile_forward(model, forward, NO_LAYERS, resolve(CPU), CacheRules())
    *_, gather, linear = plan.instructions
    assert (type(gather), type(linear), linear.source) == (Gather, Linear, gather.out)
    domains = [plan.buffers[each].domain for each in (gather.source, gather.out, linear.out)]
    assert domains == [ROWS, LOGIT_ROWS, LOGIT_ROWS]


@torch.inference_mode()
def test_a_result_that_is_read_elsewhere_is_computed_for_all_rows():
    head, other = torch.randn(WIDTH, WIDTH), torch.randn(7, WIDTH)
    model = Function(lambda x, p: torch.nn.functional.linear(x, head))
    kept = []

    @contextmanager
    def tapped(collect):
        kept.append(collect)
        yield

    def forward(token_ids, positions, cache, logit_rows):
        hidden = model(token_ids, positions)
        kept[-1](0, hidden)
        return torch.nn.functional.linear(hidden[:, logit_rows], other)

    plan = compile_forward(model, forward, NO_LAYERS, resolve(CPU), CacheRules(), tapped)
    kinds = [type(each) for each in plan.instructions if isinstance(each, (Gather, Linear))]
    assert kinds == [Linear, Gather, Linear]
