"""A target sharded over two processes of one thread, relative to one process of two threads: same cores, same rows.

The shape of Qwen3-0.6B with random weights, in bf16 or rounded, on a CPU. One process makes both engines, one with
``tp_size=2``, and lets them decode in turn.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import specdec_fast as sd
from bench.common import report
from bench.common.pairs import PAIRS, random_model, random_prompts
from specdec_fast.quantization.rounding import ROUNDINGS

_CPU = torch.device("cpu")
_NUM_DRAFT_TOKENS = 4
_ENGINES = {"one process": 1, "two processes": 2}


def tokens_per_second(engine: sd.Engine, prompts: list[list[int]], num_tokens: int) -> float:
    """Return the speed of one call."""
    params = sd.SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    started = perf_counter()
    outputs = engine.generate(prompts, params, progress=False)
    return sum(len(each.raise_for_error().token_ids) for each in outputs) / (perf_counter() - started)


def measured(folder: str, draft: Any, vocab_size: int, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the speeds of every repeat, by engine and batch size, after one that is not counted."""
    settings: dict[str, Any] = {
        "max_batch_size": max(args.batch_sizes),
        "num_draft_tokens": _NUM_DRAFT_TOKENS,
        "quantization": args.quantization,
    }
    engines = {name: sd.Engine(folder, draft, tp_size=size, **settings) for name, size in _ENGINES.items()}
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in _ENGINES}
    for batch_size in args.batch_sizes:
        prompts = random_prompts(batch_size, 32, vocab_size)
        case = f"batch {batch_size}, {'plain' if draft is None else 'draft'}"
        for repeat in range(args.repeats + 1):
            for name, engine in engines.items():
                speed = tokens_per_second(engine, prompts, args.tokens)
                if repeat:
                    speeds[name].setdefault(case, []).append(speed)
    for engine in engines.values():
        engine.close()
    return speeds


def main() -> None:
    """Measure both in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", choices=PAIRS, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--quantization", choices=ROUNDINGS, help="rounds the target's weights (default: bf16)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(2)
    pair = PAIRS[args.pair]
    draft = random_model(pair.draft, pair.vocab_size, torch.bfloat16, _CPU, 1)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in _ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        random_model(pair.target, pair.vocab_size, torch.bfloat16, _CPU, 0).save_pretrained(folder)
        for drafter in (None, draft):
            for name, speeds in measured(folder, drafter, pair.vocab_size, args).items():
                found[name] |= speeds
    for case, one in found["one process"].items():
        two = found["two processes"][case]
        ratio = median(b / a for a, b in zip(one, two, strict=True))
        print(f"{case}: {median(one):.1f} -> {median(two):.1f} tokens/s ({ratio:.2f}x)")
    report.write_json({"machine": report.machine(_CPU), "speeds": report.rounded(found)}, args.json)


if __name__ == "__main__":
    main()
