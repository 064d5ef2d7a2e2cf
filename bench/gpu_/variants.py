"""Task "variants" of ``bench.gpu``: other choices of launches beside the defaults, in the graph of a whole forward.

The forwards are a draft forward, one row per sequence, and a verification, at the shapes of ``gpu_decoding``. All
variants of a forward are timed in turn. There are two gates. Logits, keys and values must be the bits of the defaults,
after many replays, unless the variant adds pieces of sums. And whatever is chosen, a row of ``linear`` must have the
same bits among any number of rows. In Triton's interpreter nothing is timed. Elsewhere a CPU cannot run the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from bench.common.device import captures, free_memory
from bench.common.pairs import SEED, ModelShape, random_model
from bench.common.timing import Call, Clock, median_ratio
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_.fused_linears import batch_of, plan_of
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.program.plan.ir import Plan
from specdec_fast.program.triton.executor import TritonProgram
from specdec_fast.runner.hf_model import HFModel

_SAMPLES = 15
_COUNTS = (1, 3, 8, 9, 15, 16, 17, 32, 48, 64, 65, 128, 192, 256, 300)  # rows of ``linear``
_SHAPES = ((2048, 1024), (3072, 1024), (4096, 4096), (4096, 12_288))  # features and outputs
_TINY_SHAPES = ((2048, 48),)


@dataclass(frozen=True)
class LaunchVariant:
    """Choices that differ from the defaults."""

    tiles: dict[str, int] = field(default_factory=dict)  # fields of ``linear_tiles.TileChoices``
    triggers_first: bool = False  # whether a kernel lets the next one start before it waits
    options: dict[str, bool] = field(default_factory=dict)  # of ``TritonProgram``

    @property
    def has_default_bits(self) -> bool:
        """Whether results must be those of the defaults."""
        return "num_pieces" not in self.tiles


DEFAULT = "default"
VARIANTS = {
    DEFAULT: LaunchVariant(),
    "trigger first": LaunchVariant(triggers_first=True),
    "tiles of 64 outputs": LaunchVariant({"has_low_tiles": False}),
    "3 stages": LaunchVariant({"most_stages": 3}),
    "4 stages": LaunchVariant({"most_stages": 4}),
    "prefetch 1024": LaunchVariant({"prefetched": 1024}),
    "trigger first, 4 stages": LaunchVariant({"most_stages": 4}, triggers_first=True),
    "trigger first, prefetch 1024": LaunchVariant({"prefetched": 1024}, triggers_first=True),
    "trigger first, 4 stages, prefetch 1024": LaunchVariant({"most_stages": 4, "prefetched": 1024}, True),
    "narrow tiles for many rows": LaunchVariant({"has_wide_tiles": False}),
    "2 pieces": LaunchVariant({"num_pieces": 2}),
    "4 pieces": LaunchVariant({"num_pieces": 4}),
    "fused linears": LaunchVariant(options={"fuses_linears": True}),
    "fused linears, trigger first": LaunchVariant({}, True, {"fuses_linears": True}),
    "fused linears, trigger first, prefetch 1024": LaunchVariant({"prefetched": 1024}, True, {"fuses_linears": True}),
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
    batch_size = 1 if settings.smoke else 8
    for what, shape, count in (
        ("draft forward", sizes.draft, 1),
        ("verification", sizes.target, sizes.num_draft_tokens + 1),
    ):
        compare = partial(_compare, what, shape, (batch_size, count), sizes, device, progress)
        progress.attempt(f"variants of a {what}", compare)
        free_memory(device)


@contextmanager
def launching(variant: LaunchVariant) -> Iterator[None]:
    """Make the choices of a variant for launches within."""
    from specdec_fast.triton_kernels import linear_tiles, overlap

    order = overlap.TRIGGER_FIRST if variant.triggers_first else overlap.WAIT_FIRST
    with linear_tiles.chosen(**variant.tiles), overlap.ordered(order):
        yield


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
    choices = {
        name: variant for name, variant in VARIANTS.items() if not variant.triggers_first and not variant.options
    }
    for name, variant in choices.items():
        with launching(variant):
            whole = default if variant.has_default_bits else linear(rows, weight)
            other = [count for count in counts if not torch.equal(linear(rows[:count], weight), whole[:count])]
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
    for name, variant in ((name, VARIANTS[name]) for name in bench.calls):
        equal = {"first": bench.equal[name], "replayed": bench.again(name)}
        if variant.has_default_bits and not all(equal.values()):
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

    def add(self, name: str, variant: LaunchVariant) -> None:
        """Compute the forward once, and record it."""
        with launching(variant):
            program = TritonProgram(self.plan, self.ops, **variant.options)
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
