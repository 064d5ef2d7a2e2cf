"""A layer of experts in the shape of Qwen3-30B-A3B: our forward against those of transformers.

The model has one layer (``--layers``) with random weights and a small vocabulary, so nearly all of its time is spent in
that layer. The rows are those of one text, without a context. The gate is that of loading a model: logits within the
square root of the dtype's rounding unit of those of transformers' own loop over experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from bench.common import report
from bench.common.timing import Clock, median_ratio
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.commands.common import format_table
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel

_PAGE_SIZE = 16
_VOCAB_SIZE = 1000
THEIRS = ("eager", "batched_mm", "grouped_mm")  # transformers uses the last one by default
_MOST_COPIES = 512  # batched_mm copies an expert's weights for every choice of every row, which takes gigabytes
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    },
    "smoke": {
        "hidden_size": 32, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    },
}  # fmt: skip


def layered(shape: str, num_layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of ``num_layers`` such layers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPES[shape], num_hidden_layers=num_layers, vocab_size=_VOCAB_SIZE)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Layers:
    """A model's forward over one text, by every method."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.ragged = RaggedModel(model, resolve(model.device))
        if self.ragged.program is None:
            raise SystemExit(f"{self.ragged.name} has no program: {self.ragged.why_no_program}")

    def calls(self, num_rows: int) -> dict[str, Callable[[], Tensor]]:
        """Return the calls to time."""
        token_ids = torch.arange(num_rows, device=self.model.device) * 7 % _VOCAB_SIZE
        pool = PagePool(self.ragged.layout, num_rows + _PAGE_SIZE, _PAGE_SIZE)
        pool.add("text")
        batch = lay_out(pool, [Rows("text", 0, num_rows)], token_ids)

        def theirs(implementation: str) -> Tensor:
            self.model.set_experts_implementation(implementation)
            return self.model(token_ids[None], use_cache=False).logits[0]

        copies = num_rows * self.model.config.num_experts_per_tok
        fitting = [name for name in THEIRS if name != "batched_mm" or copies <= _MOST_COPIES]
        others = {name: lambda name=name: theirs(name) for name in fitting}
        return {"ours": lambda: self.ragged.forward(batch, pool), **others}


@torch.inference_mode()
def measure(layers: Layers, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every number of rows."""
    clock, rows = Clock(torch.device("cpu")), []
    for num_rows in args.rows:
        calls = layers.calls(num_rows)
        ours, reference = calls["ours"]().float(), calls["eager"]().float()
        distance = float((ours - reference).norm() / reference.norm())
        bound = torch.finfo(layers.ragged.layout.dtype).eps ** 0.5
        if not distance <= bound:
            raise SystemExit(
                f"{num_rows} rows: logits {distance:.1e} apart, {bound:.1e} are allowed; no speed reported."
            )
        seconds = clock.interleave([calls] * args.repeats)
        row: dict[str, Any] = {"rows": num_rows, "logit_distance": distance}
        row |= {f"{name}_milliseconds": 1e3 * median(each) for name, each in seconds.items()}
        others = [name for name in THEIRS if name in seconds]
        row |= {f"speedup_over_{name}": median_ratio(seconds[name], seconds["ours"]) for name in others}
        rows.append(row)
    return rows


def _shown(row: dict[str, Any], name: str) -> str:
    if f"{name}_milliseconds" not in row:
        return "-"
    return f"{row[f'{name}_milliseconds']:.3g} ({row[f'speedup_over_{name}']:.2f}x)"


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=1, help="layers of the model (default: %(default)s)")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="bfloat16")
    parser.add_argument(
        "--rows", type=report.integers, default=[1, 6, 48, 256], help="rows of a forward, comma-separated"
    )
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch and of the C++ ops (default: torch's own choice)")
    parser.add_argument("--json", type=report.Path, help="also write the result to this file")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = measure(Layers(layered(args.shape, args.layers, report.DTYPES[args.dtype])), args)
    lines = [[row["rows"], f"{row['ours_milliseconds']:.3g}", *(_shown(row, name) for name in THEIRS)] for row in rows]
    print(format_table(("rows", "ours, ms", *(f"{name}, ms" for name in THEIRS)), lines))
    settings = {"shape": args.shape, "layers": args.layers, "dtype": args.dtype}
    report.write_json({"machine": report.machine(torch.device("cpu")), **settings, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
