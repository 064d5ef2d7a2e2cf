"""One forward in three ways, interleaved: as a forward program, over our pages in PyTorch, and by the unmodified model.

The unmodified model is what a user of ``transformers`` runs: ``model(...)`` with a ``DynamicCache``. "Ours in PyTorch"
is the same model over our pages (``enforce_eager=True``), with our attention and our linears.

The rows are those of a step, over contexts of ``--context`` entries: one token of every sequence (plain decoding), or
K + 1 tokens of every sequence (a verification). The share of recurrences is the time of the recurrent ops of a hybrid
model within the program's. Prefills compute a whole prompt of one sequence, and the logits of its
last row. The gate is that of loading a model: logits within the square root of the dtype's rounding unit of the
unmodified model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from bench.common import report
from bench.common.timing import Clock, median_ratio
from bench.common.workload import add_workload_options, check_workload, load
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.commands.common import format_table
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_arguments import cache_argument
from specdec_fast.ops import Ops, resolve
from specdec_fast.runner.ragged_model import RaggedModel

_PAGE_SIZE = 16
_RECURRENT_OPS = ("conv_rows_", "linear_attention_rows_", "selective_scan_rows_")
PROGRAM, EAGER, UNMODIFIED = "program", "eager", "transformers"


@dataclass(frozen=True)
class Shape:
    """The rows of one forward: the last ``num_rows`` of ``context`` positions of each of ``batch_size`` sequences."""

    batch_size: int
    num_rows: int
    context: int

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a whole prompt, with the logits of the last row only."""
        return self.num_rows == self.context


class Forwards:
    """One model, run in three ways."""

    def __init__(self, model: PreTrainedModel) -> None:
        ops = resolve(model.device)
        self.recurrent_seconds: list[float] = []  # of the recurrent ops, per forward of ours in PyTorch
        self._seconds = 0.0
        started = perf_counter()
        self.unmodified = model
        self.eager = RaggedModel(model, self._timed(ops), enforce_eager=True)
        middle = perf_counter()
        self.compiled = RaggedModel(model, ops)
        self.loading_seconds = middle - started
        self.program_seconds = (
            perf_counter() - middle - self.loading_seconds
        )  # the additional loading time with a program
        if self.compiled.program is None:
            raise SystemExit(f"{self.compiled.name} has no program: {self.compiled.why_no_program}")

    def calls(self, shape: Shape) -> dict[str, Callable[[], Tensor]]:
        """Return the calls to time; each computes the same logits ``[rows, vocab_size]``."""
        token_ids = torch.arange(shape.batch_size * shape.context).view(shape.batch_size, -1) % self.compiled.vocab_size
        return {
            PROGRAM: self._ours(self.compiled, shape, token_ids),
            EAGER: self._ours(self.eager, shape, token_ids),
            UNMODIFIED: self._unmodified(shape, token_ids),
        }

    def _ours(self, model: RaggedModel, shape: Shape, token_ids: Tensor) -> Callable[[], Tensor]:
        """Return the call of one of our ways, on pages and state slots of its own."""
        pool = PagePool(model.layout, shape.batch_size * (shape.context + _PAGE_SIZE), _PAGE_SIZE)
        for owner in range(shape.batch_size):
            pool.add(owner)
        before = shape.context - shape.num_rows
        if before:
            rows = [Rows(owner, 0, before) for owner in range(shape.batch_size)]
            self.eager.forward(lay_out(pool, rows, token_ids[:, :before].flatten()), pool)
        num_drafts = 0 if shape.is_prefill else shape.num_rows - 1
        rows = [Rows(owner, before, shape.num_rows, num_drafts) for owner in range(shape.batch_size)]
        batch = lay_out(pool, rows, token_ids[:, before:].flatten().contiguous())
        wanted = batch.last_rows if shape.is_prefill else None

        def forward() -> Tensor:
            self._seconds = 0.0
            logits = model.forward(batch, pool, wanted)
            if model is self.eager:
                self.recurrent_seconds.append(self._seconds)
            return logits

        return forward

    def _timed(self, ops: Ops) -> Ops:
        """Return ops whose recurrent ones add their time to that of the forward; a program runs the same in C++."""

        def timed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(*args: Any) -> Tensor:
                started = perf_counter()
                result = function(*args)
                self._seconds += perf_counter() - started
                return result

            return call

        assert ops.unchecked is not None
        functions = {name: timed(getattr(ops.unchecked, name)) for name in _RECURRENT_OPS}
        return replace(ops, unchecked=ops.unchecked.replaced(**functions))

    def _unmodified(self, shape: Shape, token_ids: Tensor) -> Callable[[], Tensor]:
        """Return the call of ``transformers``; its cache has the entries before the rows when a call begins.

        A recurrent state cannot be cut back: the contexts of such a model grow by the rows of every call.
        """
        cache = DynamicCache(config=self.unmodified.config)
        argument = cache_argument(self.unmodified)
        before = shape.context - shape.num_rows
        new = token_ids[:, before:]
        keep = {"logits_to_keep": 1} if shape.is_prefill else {}
        is_recurrent = bool(self.compiled.layout.states)

        @torch.inference_mode()
        def forward() -> Tensor:
            past = cache if before else DynamicCache(config=self.unmodified.config)
            logits = self.unmodified(input_ids=new, use_cache=True, **{argument: past}, **keep).logits
            if before and not is_recurrent:
                past.crop(-new.shape[1])
            return logits.flatten(0, 1)

        if before:
            with torch.inference_mode():
                self.unmodified(input_ids=token_ids[:, :before], use_cache=True, **{argument: cache})
        return forward


def shapes(args: argparse.Namespace, max_positions: int | None) -> Iterator[Shape]:
    """Yield the forwards of steps, then those of prefills for which the model has enough positions."""
    for batch_size in args.batch_sizes:
        for num_rows in (1, args.num_draft_tokens + 1):
            yield Shape(batch_size, num_rows, args.context)
    for length in args.prefill:
        if max_positions is None or length <= max_positions:
            yield Shape(1, length, length)


def measure(forwards: Forwards, args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Time every shape; one row each."""
    clock, rows = Clock(torch.device("cpu")), []
    bound = torch.finfo(forwards.compiled.layout.dtype).eps ** 0.5
    for shape in shapes(args, forwards.compiled.max_positions):
        calls = forwards.calls(shape)
        logits = {way: call().float() for way, call in calls.items()}
        truth = logits[UNMODIFIED]
        distance = max(float((logits[way] - truth).norm() / truth.norm()) for way in (PROGRAM, EAGER))
        if not distance <= bound:
            raise SystemExit(f"{name}: logits {distance:.1e} apart, {bound:.1e} are allowed; no speed is reported.")
        forwards.recurrent_seconds.clear()
        seconds = clock.interleave([calls] * args.repeats)
        recurrent = median(forwards.recurrent_seconds)
        rows.append(
            {
                "model": name,
                "batch_size": shape.batch_size,
                "rows_per_sequence": shape.num_rows,
                "context": shape.context,
                **{f"{way}_milliseconds": 1e3 * median(seconds[way]) for way in calls},
                "recurrent_milliseconds": 1e3 * recurrent,
                "recurrent_share": recurrent / median(seconds[PROGRAM]),
                "speedup_over_transformers": median_ratio(seconds[UNMODIFIED], seconds[PROGRAM]),
                "speedup_over_eager": median_ratio(seconds[EAGER], seconds[PROGRAM]),
                "logit_distance": distance,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure target and draft, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.forwards", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 4, 8, 16])
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="KV entries of a sequence (default: 128)")
    parser.add_argument(
        "--prefill",
        type=report.integers,
        default=[128, 512, 2048],
        metavar="N,N",
        help="prompts, in tokens (default: 128,512,2048, as long as the model has positions)",
    )
    parser.add_argument("--models", type=report.names, default=["target", "draft"], help="default: target,draft")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch and of the C++ ops (default: torch's own choice)")
    parser.add_argument("--json", type=report.Path, help="also write the result to this file")
    args = parser.parse_args(argv)
    check_workload(parser, args)
    if unknown := set(args.models) - {"target", "draft"}:
        parser.error(f"--models {', '.join(sorted(unknown))}: expected target, draft or both")
    if args.threads:
        torch.set_num_threads(args.threads)
    workload = load(args, 1)
    models = {"target": workload.target, "draft": workload.draft}
    rows, start_up = [], {}
    for name in args.models:
        forwards = Forwards(models[name])
        start_up[name] = {"loading_seconds": forwards.loading_seconds, "program_seconds": forwards.program_seconds}
        rows += measure(forwards, args, name)
    print_table(rows)
    settings = {"pair": workload.name, "dtype": args.dtype, "start_up": start_up}
    report.write_json({"machine": report.machine(torch.device("cpu")), **settings, "rows": rows}, args.json)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per shape."""
    keys = ("model", "batch_size", "rows_per_sequence", "context", f"{PROGRAM}_milliseconds", f"{EAGER}_milliseconds")
    keys = (*keys, f"{UNMODIFIED}_milliseconds", "speedup_over_transformers", "speedup_over_eager", "recurrent_share")
    lines = [[f"{row[key]:.3g}" if isinstance(row[key], float) else row[key] for key in keys] for row in rows]
    columns = ("model", "batch", "rows each", "context", "program ms", "ours in PyTorch ms", "transformers ms")
    print(format_table((*columns, "x transformers", "x ours in PyTorch", "recurrences"), lines))


if __name__ == "__main__":
    main()
