"""Tasks "graphs" and "graph_gates" of ``bench.gpu``: forwards as graphs.

There are three gates: with and without graphs, the bundled pair emits the same tokens; a model that should have graphs
has some; and no step waits for the device, except for the one transfer of its tokens, which PyTorch's own check for
synchronisation verifies. Times are those of a plain step, a verification and a drafting loop at the shapes and
contexts of ``gpu_decoding``, beside the time of reading the weights and the KV at the speed of a copy; and those of the
kernels within. Kernels overlap, and one that waits for the one before it counts that time, so their sum exceeds the
whole. On a CPU there are no graphs, so PyTorch launches the operations one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.common.device import full_precision
from bench.common.pairs import SEED, ModelShape, random_model, random_prompts
from bench.common.timing import Call, Clock
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_.equivalence import FULL as PROMPTS
from bench.gpu_.equivalence import SMOKE as FEW_PROMPTS
from bench.gpu_.equivalence import Pair, Tokens
from bench.gpu_.isolated_tasks import Progress, Settings
from bench.gpu_.timings import FULL as TIMINGS
from bench.gpu_.timings import SMOKE as FEW_TIMINGS
from bench.gpu_.timings import copy_bandwidth
from specdec_fast import Engine, SamplingParams
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters.draft_model.drafter import ROWS_EACH
from specdec_fast.kv_cache.forward_layout import decode_batches, lay_out, lay_out_on_host
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.runner import verification
from specdec_fast.runner.drafting import chosen_tokens
from specdec_fast.runner.graphs.buckets import GraphLimits
from specdec_fast.runner.graphs.capture import CAPTURES
from specdec_fast.runner.ragged_model import RaggedModel

BATCH_SIZE, NUM_DRAFT_TOKENS, SAMPLES, CALLS = 4, 3, 5, 8
MOST_KERNELS = 8  # of a call, in the report


# Gates


def run_gates(settings: Settings, progress: Progress) -> None:
    """Decode the bundled pair with every method and dtype."""
    full_precision()
    sizes = FEW_PROMPTS if settings.smoke else PROMPTS
    for dtype in (torch.float32, torch.bfloat16):
        pair = Pair(dtype, settings, sizes)
        for method in ("eqspec", "exspec"):
            name = f"{method} in {str(dtype).removeprefix('torch.')}"
            progress.attempt(name, partial(_check, name, method, pair, progress))


def _check(name: str, method: str, pair: Pair, progress: Progress) -> None:
    """Decode greedily and sampled, with and without graphs; then once more while waiting raises an error."""
    params = [
        SamplingParams(max_new_tokens=pair.max_new_tokens, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(pair.prompts))
    ]
    graphed, eager = (_engine(pair, method, has_graphs) for has_graphs in (True, False))
    _tokens(graphed, pair, params)  # a shape is recorded when it occurs for the second time
    expected, outputs = _tokens(eager, pair, params), _tokens(graphed, pair, params)
    equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
    description = graphed.describe()
    for model, of in (("target", description), ("draft", description["draft"])):
        if pair.target.device.type in CAPTURES and not of["graphs_captured"]:
            progress.fail(name, f"the {model} has no graphs: {of['why_no_graphs']}")
    if equal < len(outputs):
        progress.fail(name, f"{len(outputs) - equal} of {len(outputs)} outputs differ with graphs")
    try:
        with nothing_waits(graphed):
            _tokens(graphed, pair, params)
    except RuntimeError as error:
        progress.fail(name, f"a step waits for the device: {error}")
    captured = {
        "target_graphs": description["graphs_captured"],
        "draft_graphs": description["draft"]["graphs_captured"],
    }
    progress.row(what=name, outputs=len(outputs), equal=equal, **captured)


def _engine(pair: Pair, method: str, has_graphs: bool) -> Engine:
    """Make an engine. ``enforce_eager`` would not do: without a program, bits in bf16 would be others."""
    engine = Engine(
        pair.target,
        pair.draft,
        tokenizer=pair.tokenizer,
        method=method,
        max_batch_size=BATCH_SIZE,
        num_draft_tokens=NUM_DRAFT_TOKENS,
    )
    if not has_graphs:
        for model in (engine.target, engine.drafter.model):  # type: ignore[attr-defined]
            model.use_these_graphs(None)
    return engine


def _tokens(engine: Engine, pair: Pair, params: list[SamplingParams]) -> Tokens:
    outputs = engine.generate(pair.prompts, params, progress=False)
    return [output.raise_for_error().token_ids for output in outputs]


@contextmanager
def nothing_waits(engine: Engine) -> Iterator[None]:
    """Let PyTorch raise an error if a step of ``engine`` waits for the device, except in ``to_host``; not on a CPU."""
    if engine.target.layout.device.type != "cuda":
        yield
        return
    core, to_host, mode = engine.core, verification.to_host, torch.cuda.get_sync_debug_mode()
    stages = core._launch, core._finish

    def watched(stage: Any, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return stage(*args)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def allowed(tensors: Any) -> list[list[int]]:
        torch.cuda.set_sync_debug_mode("default")
        values = to_host(tensors)
        torch.cuda.set_sync_debug_mode("error")
        return values

    core._launch, core._finish = (partial(watched, stage) for stage in stages)  # type: ignore[method-assign]
    verification.to_host = allowed
    try:
        yield
    finally:
        del core._launch, core._finish  # the methods of the class apply again
        verification.to_host = to_host


# Times


def run(settings: Settings, progress: Progress) -> None:
    """Time the forwards of a target and of a draft model."""
    full_precision()
    device, sizes = torch.device(settings.device), gpu_decoding.SMOKE if settings.smoke else gpu_decoding.FULL
    bandwidth = copy_bandwidth((FEW_TIMINGS if settings.smoke else TIMINGS).copy_bytes, device)
    progress.note(copy_gigabytes_per_second=bandwidth / 1e9)
    k, most = sizes.num_draft_tokens, max(sizes.prompts)
    target = _model(sizes.target, sizes, device, GraphLimits(most, k + 1))
    for batch_size in sizes.prompts:
        for what, count in (("plain step", 1), ("verification", k + 1)):
            check = partial(_time_forward, what, target, (batch_size, count), sizes, bandwidth, progress)
            progress.attempt(f"{what} at batch {batch_size}", check)
    del target, check
    draft = _model(sizes.draft, sizes, device, GraphLimits(most, ROWS_EACH, k))
    for batch_size in sizes.prompts:
        check = partial(_time_drafting, draft, batch_size, sizes, bandwidth, progress)
        progress.attempt(f"drafting at batch {batch_size}", check)


def _time_forward(
    what: str,
    target: RaggedModel,
    shape: tuple[int, int],
    sizes: gpu_decoding.Sizes,
    bandwidth: float,
    progress: Progress,
) -> None:
    bench = _Forward(target, *shape, sizes)
    _time(what, bench, bench.forward, bandwidth, progress)


def _time_drafting(
    draft: RaggedModel, batch_size: int, sizes: gpu_decoding.Sizes, bandwidth: float, progress: Progress
) -> None:
    bench = _Forward(draft, batch_size, 1, sizes, num_forwards=sizes.num_draft_tokens)
    _time("drafting", bench, bench.draft, bandwidth, progress)


def _model(shape: ModelShape, sizes: gpu_decoding.Sizes, device: torch.device, limits: GraphLimits) -> RaggedModel:
    module = random_model(shape, sizes.vocab_size, sizes.dtype, device, SEED)
    # If the device has no graphs, PyTorch runs the forwards: graphs are not to be compared with a CPU's programs.
    model = RaggedModel(module, resolve(device, dtype=module.dtype), enforce_eager=device.type not in CAPTURES)
    model.use_graphs(limits)
    return model


class _Forward:
    """One batch of a model, over random keys and values at the contexts of ``gpu_decoding``."""

    def __init__(
        self, model: RaggedModel, batch_size: int, count: int, sizes: gpu_decoding.Sizes, num_forwards: int = 1
    ) -> None:
        context, ahead = sizes.prompt_tokens, num_forwards - 1
        self.model, self.batch_size, self.num_forwards = model, batch_size, num_forwards
        page_size = gpu_decoding.PAGE_SIZE
        self.pool = PagePool(model.layout, batch_size * (context + count + num_forwards + page_size), page_size)
        device = model.layout.device
        for tensor in (tensor for layer in self.pool.layers for tensor in layer):
            tensor.normal_()
        for owner in range(batch_size):
            self.pool.add(owner)
            lay_out(self.pool, [Rows(owner, 0, context)], torch.zeros(context, dtype=torch.int64, device=device))
        self.rows = [Rows(owner, context, count) for owner in range(batch_size)]
        (self.fed,) = random_prompts(1, batch_size * count, sizes.vocab_size, SEED)
        self.batch = lay_out(self.pool, self.rows, torch.tensor(self.fed, device=device), ahead)
        weights = sum(p.numel() * p.itemsize for p in model.model.parameters())
        read_by_row = model.model.get_input_embeddings().weight
        tied = model.model.config.tie_word_embeddings
        weights -= 0 if tied else read_by_row.numel() * read_by_row.itemsize
        self.bytes_read = num_forwards * (weights + batch_size * context * model.layout.bytes_per_token)

    def forward(self) -> Tensor:
        """Run the forward as an engine does."""
        return self.model.forward(self.batch, self.pool)

    def draft(self) -> Tensor:
        """Run the forwards as a drafter does: in one graph, if there is one."""
        graphs, layout = self.model.graphs, lay_out_on_host(self.pool, self.rows, self.num_forwards - 1)
        if graphs is not None:
            tokens = graphs.draft(layout, self.fed, self.num_forwards, {}, self.pool, self.model.vocab_size)
            if tokens is not None:
                return tokens
        tokens, chosen = self.batch.token_ids, []
        for batch_of in decode_batches(self.pool, self.rows, self.num_forwards):
            logits = self.model.hf.forward(batch_of(token_ids=tokens), self.pool, None)
            tokens = chosen_tokens(self.model.ops, logits, self.model.vocab_size, None)
            chosen.append(tokens)
        return torch.stack(chosen, dim=1)


@torch.inference_mode()
def _time(what: str, bench: _Forward, call: Call, bandwidth: float, progress: Progress) -> None:
    device = bench.model.layout.device
    with bench.model.attached():
        clock = Clock(device)
        clock.seconds(call, 3)  # the second call records
        seconds = median(clock.seconds(call, CALLS) for _ in range(SAMPLES))
        kernels = _kernels(call, device)
    floor = bench.bytes_read / bandwidth
    progress.row(
        what=what,
        batch=bench.batch_size,
        microseconds=seconds * 1e6,
        floor_microseconds=floor * 1e6,
        share_of_copy=floor / seconds,
        kernels=kernels,
        graphs_captured=0 if bench.model.graphs is None else bench.model.graphs.num_captured,
    )


def _kernels(call: Call, device: torch.device) -> dict[str, dict[str, float]]:
    """Return how often each kernel runs in a call, and its microseconds in all; the longest ones."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    times, counts = Counter[str](), Counter[str]()
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    return {name: {"launches": counts[name], "microseconds": spent} for name, spent in times.most_common(MOST_KERNELS)}
