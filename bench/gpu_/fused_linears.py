"""A part of task "programs" of ``bench.gpu``: programs of fewer launches beside those that engines run.

In some of them linears compute row operations, and in some of these attention merges its pieces in one launch, too. The
gate is equality: logits, keys and values must be the same bits, with few rows (a draft forward) and with more (a
verification). The times as graphs, interleaved, decide what ``TritonProgram`` does by default. In Triton's interpreter
nothing is timed. Elsewhere a CPU cannot run these programs.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.common.device import as_graph, free_memory
from bench.common.pairs import SEED, ModelShape, random_model
from bench.common.timing import Call, Clock, median_ratio
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops, resolve
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.program import compile_forward
from specdec_fast.program.plan.ir import Plan
from specdec_fast.program.triton.executor import TritonProgram
from specdec_fast.runner.hf_model import HFModel

_SEPARATE = "separate"
_WAYS = {  # what is asked of ``TritonProgram``
    _SEPARATE: {},
    "fused linears": {"fuses_linears": True},
    "fused linears and attention": {"fuses_linears": True, "merges_attention": True},
}
# Batch sizes whose bits are compared, too: one row per sequence, so also the numbers of rows at which tiles change.
_MORE_SIZES = (3, 9, 15, 16, 17)
_SAMPLES = 15
_PROBE_TOKENS = 8
_LEAST_CONTEXT = 1024  # positions: attention splits contexts from 513 on


def run(settings: Settings, progress: Progress) -> None:
    """Compare draft forwards and verifications at the shapes and batch sizes of ``gpu_decoding``."""
    device = torch.device(settings.device)
    if device.type != "cuda" and not INTERPRETING:
        progress.note(fused_linears="only a GPU or Triton's interpreter runs programs of launches")
        return
    sizes = gpu_decoding.SMOKE if settings.smoke else gpu_decoding.FULL
    for what, shape, count in (
        ("draft forward", sizes.draft, 1),
        ("verification", sizes.target, sizes.num_draft_tokens + 1),
    ):
        name = f"{what} with fused linears"
        progress.attempt(name, partial(_compare_model, what, shape, count, sizes, device, progress))
        free_memory(device)


@torch.inference_mode()
def _compare_model(
    what: str, shape: ModelShape, count: int, sizes: gpu_decoding.Sizes, device: torch.device, progress: Progress
) -> None:
    hf, ops, plan = plan_of(random_model(shape, sizes.vocab_size, sizes.dtype, device, SEED), sizes.vocab_size, device)
    programs = {name: TritonProgram(plan, ops, **options) for name, options in _WAYS.items()}
    for batch_size in (*sizes.prompts, *(() if INTERPRETING or count > 1 else _MORE_SIZES)):
        pool, batch = batch_of(hf, batch_size, count, sizes, device)
        calls: dict[str, Call] = {name: partial(program, batch, pool) for name, program in programs.items()}
        results = {name: _result(call, pool) for name, call in calls.items()}
        expected = results.pop(_SEPARATE)
        equal = {name: all(map(torch.equal, result, expected)) for name, result in results.items()}
        for name in (name for name, same in equal.items() if not same):
            progress.fail(f"{what} at batch {batch_size}", f"{name}: other logits, keys or values")
        times = _times(calls, device) if batch_size in sizes.prompts else {}
        progress.row(what=what, batch=batch_size, rows=batch_size * count, equal_bits=equal, **times)


def plan_of(model: PreTrainedModel, vocab_size: int, device: torch.device) -> tuple[HFModel, Ops, Plan]:
    """Return the model as this package calls it, the ops, and the plan of its forward."""
    ops = resolve(device, "triton")
    hf = HFModel(model, ops, torch.arange(_PROBE_TOKENS, device=device) % vocab_size)
    with hf.hooked():
        return hf, ops, compile_forward(model, hf.call, hf.layout, ops, hf.rules)


def batch_of(
    hf: HFModel, batch_size: int, count: int, sizes: gpu_decoding.Sizes, device: torch.device
) -> tuple[PagePool, RaggedBatch]:
    """Lay out ``count`` rows of every sequence, over random keys and values."""
    context = sizes.prompt_tokens if INTERPRETING else max(sizes.prompt_tokens, _LEAST_CONTEXT)
    pool = PagePool(hf.layout, batch_size * (context + count + 16), 16)
    generator = torch.Generator(device).manual_seed(SEED)
    for tensor in (tensor for layer in pool.layers for tensor in layer):
        tensor.normal_(generator=generator)
    for owner in range(batch_size):
        pool.add(owner)
        lay_out(pool, [Rows(owner, 0, context)], torch.zeros(context, dtype=torch.int64, device=device))
    rows = [Rows(owner, context, count) for owner in range(batch_size)]
    ids = torch.arange(batch_size * count, device=device) * 7 % sizes.vocab_size
    return pool, lay_out(pool, rows, ids)


def _result(call: Call, pool: PagePool) -> list[Tensor]:
    """Return logits, keys and values."""
    logits = call().clone()
    return [logits, *(tensor.clone() for layer in pool.layers for tensor in layer)]


def _times(calls: dict[str, Call], device: torch.device) -> dict[str, dict[str, float]]:
    """Return microseconds of every way as a graph, and how much faster than separate launches it is."""
    if INTERPRETING:
        return {}
    recorded = {name: as_graph(lambda call=call: (call(),), device) or call for name, call in calls.items()}
    samples = Clock(device).interleave([recorded] * _SAMPLES)
    return {
        "microseconds": {name: median(seconds) * 1e6 for name, seconds in samples.items()},
        "speedup": {name: median_ratio(samples[_SEPARATE], samples[name]) for name in samples if name != _SEPARATE},
    }
