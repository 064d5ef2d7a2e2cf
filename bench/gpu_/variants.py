"""Task "variants" of ``bench.gpu``: other choices of launches beside the defaults, in the graph of a whole forward.

The forwards are a draft forward, one row per sequence, and verifications, at the shapes of ``gpu_decoding``. All
variants of a forward are timed in turn. There are two gates. Logits, keys and values must be the bits of the defaults,
also after many replays. And whatever is chosen, a row of ``linear`` must have the same bits among any number of rows.
In Triton's interpreter nothing is timed. Elsewhere a CPU cannot run the kernels.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.common.device import captures, free_memory
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
from specdec_fast.triton_kernels.linear_tiles import chosen

_SAMPLES = 15
_PROBE_TOKENS = 8
_COUNTS = (1, 3, 8, 9, 15, 16, 17, 32, 48, 64, 65, 128, 192, 256, 300)  # rows of ``linear``
_SHAPES = ((2048, 1024), (3072, 1024), (4096, 4096), (4096, 12_288))  # features and outputs
_TINY_SHAPES = ((2048, 48),)


DEFAULT = "default"
# By name, the fields of ``linear_tiles.TileChoices`` that differ from the default.
VARIANTS: dict[str, dict[str, int]] = {
    DEFAULT: {},
    "tiles of 64 outputs": {"has_low_tiles": False},
    "3 stages": {"most_stages": 3},
    "4 stages": {"most_stages": 4},
    "no descriptors": {"has_descriptors": False},
    "two tiles for many rows": {"has_large_tiles": False},
}


def run(settings: Settings, progress: Progress) -> None:
    """Check rows of ``linear``, then compare and time the forwards."""
    device = torch.device(settings.device)
    if device.type != "cuda" and not INTERPRETING:
        progress.note(variants="only a GPU or Triton's interpreter runs these kernels")
        return
    sizes = gpu_decoding.SMOKE if settings.smoke else gpu_decoding.FULL
    dtype = torch.float16 if INTERPRETING else torch.bfloat16
    for in_features, out_features in _TINY_SHAPES if settings.smoke else _SHAPES:
        check = partial(_check_rows, in_features, out_features, dtype, device, progress)
        progress.attempt(f"rows of linear {in_features}x{out_features}", check)
    few, many = (1, 1) if settings.smoke else (8, 32)
    verified = sizes.num_draft_tokens + 1
    for what, shape, batch_size, count in (
        ("draft forward", sizes.draft, few, 1),
        ("verification", sizes.target, few, verified),
        ("large verification", sizes.target, many, verified),
    ):
        compare = partial(_compare, what, shape, (batch_size, count), sizes, device, progress)
        progress.attempt(f"variants of a {what}", compare)
        free_memory(device)


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
    context, page_size = sizes.prompt_tokens, gpu_decoding.PAGE_SIZE
    pool = PagePool(hf.layout, batch_size * (context + count + page_size), page_size)
    generator = torch.Generator(device).manual_seed(SEED)
    for tensor in (tensor for layer in pool.layers for tensor in layer):
        tensor.normal_(generator=generator)
    for owner in range(batch_size):
        pool.add(owner)
        lay_out(pool, [Rows(owner, 0, context)], torch.zeros(context, dtype=torch.int64, device=device))
    rows = [Rows(owner, context, count) for owner in range(batch_size)]
    ids = torch.arange(batch_size * count, device=device) * 7 % sizes.vocab_size
    return pool, lay_out(pool, rows, ids)


def _check_rows(
    in_features: int, out_features: int, dtype: torch.dtype, device: torch.device, progress: Progress
) -> None:
    """Compare rows among few with the same rows among many, with every choice of tiles."""
    from specdec_fast.triton_kernels.linear import linear

    generator = torch.Generator().manual_seed(SEED)
    counts = _COUNTS[:1] if INTERPRETING else _COUNTS
    rows = torch.randn(17 if INTERPRETING else 600, in_features, generator=generator).to(dtype).to(device)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype).to(device)
    default = linear(rows, weight)
    for name, variant in VARIANTS.items():
        with chosen(**variant):
            other = [count for count in counts if not torch.equal(linear(rows[:count], weight), default[:count])]
        if other:
            progress.fail(f"rows of linear {in_features}x{out_features}", f"{name}: other bits at {other} rows")


@torch.inference_mode()
def _compare(
    what: str,
    shape: ModelShape,
    rows: tuple[int, int],
    sizes: gpu_decoding.Sizes,
    device: torch.device,
    progress: Progress,
) -> None:
    """Compare and time the variants of a forward; ``rows``: sequences, and rows of each."""
    batch_size, count = rows
    hf, ops, plan = plan_of(random_model(shape, sizes.vocab_size, sizes.dtype, device, SEED), sizes.vocab_size, device)
    bench = _Variants(hf, ops, plan, rows, sizes, device)
    for name, variant in VARIANTS.items():
        progress.attempt(f"{name} of a {what}", partial(bench.add, name, variant))
    times = {} if INTERPRETING else Clock(device).interleave([bench.calls] * _SAMPLES)
    for name in bench.calls:
        equal = {"first": bench.equal[name], "replayed": bench.again(name)}
        if not all(equal.values()):
            progress.fail(f"{what}: {name}", f"other logits, keys or values: equal {equal}")
        row = {"what": what, "variant": name, "rows": batch_size * count, "equal_bits": equal}
        if times:
            row["microseconds"] = median(times[name]) * 1e6
            row["speedup"] = median_ratio(times[DEFAULT], times[name])
        progress.row(**row)


class _Variants:
    """One batch of a model, and what every variant makes of it."""

    def __init__(
        self,
        hf: HFModel,
        ops: Ops,
        plan: Plan,
        rows: tuple[int, int],
        sizes: gpu_decoding.Sizes,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.ops = ops
        self.device = device
        self.pool, self.batch = batch_of(hf, *rows, sizes, device)
        self.calls: dict[str, Call] = {}
        self.equal: dict[str, bool] = {}  # whether the first results had the bits of the default
        self._expected: list[Tensor] = []
        self._outputs: dict[str, Tensor] = {}

    def add(self, name: str, variant: dict[str, int]) -> None:
        """Compute the forward once, and record it."""
        with chosen(**variant):
            program = TritonProgram(self.plan, self.ops)
            forward = partial(program, self.batch, self.pool)
            logits = forward()
            if name == DEFAULT:
                self._expected = _result(logits, self.pool)
            self.equal[name] = self._has_default_bits(logits)
            make = captures().get(self.device.type)
            if make is None:
                self.calls[name] = forward
                self._outputs[name] = logits
                return
            captured = make(self.device)(lambda: (forward(),))
        self.calls[name] = captured.replay
        (self._outputs[name],) = captured.output

    def again(self, name: str) -> bool:
        """Replay a variant over poisoned logits; return whether it computes the bits of the default."""
        if self.device.type == "cuda":
            self._outputs[name].fill_(float("nan"))
            self.calls[name]()
        return self._has_default_bits(self._outputs[name])

    def _has_default_bits(self, logits: Tensor) -> bool:
        return all(map(torch.equal, _result(logits, self.pool), self._expected))


def _result(logits: Tensor, pool: PagePool) -> list[Tensor]:
    """Return logits, keys and values."""
    return [logits.clone(), *(tensor.clone() for layer in pool.layers for tensor in layer)]
