"""A target sharded over two processes of one thread, relative to one process of two threads: same cores, same rows.

The shape of Qwen3-0.6B with random weights, in bf16, on a CPU. The command starts the processes itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import specdec_fast as sd
from bench.common import report
from bench.common.pairs import PAIRS, random_model, random_prompts

_CPU = torch.device("cpu")
_NUM_DRAFT_TOKENS = 4


def tokens_per_second(target: Any, draft: Any, batch_size: int, num_tokens: int, repeats: int) -> list[float]:
    """Return the speed of every repeat, after one that is not counted."""
    prompts = random_prompts(batch_size, 32, target.config.vocab_size)
    engine = sd.Engine(target, draft, max_batch_size=batch_size, num_draft_tokens=_NUM_DRAFT_TOKENS)
    params = sd.SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    speeds = []
    for _ in range(repeats + 1):
        started = perf_counter()
        outputs = engine.generate(prompts, params, progress=False)
        speeds.append(sum(len(each.token_ids) for each in outputs) / (perf_counter() - started))
    return speeds[1:]


def measured(target: Any, pair: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the speeds by batch size, plainly and with a draft."""
    draft = random_model(PAIRS[pair].draft, PAIRS[pair].vocab_size, torch.bfloat16, _CPU, 1)
    return {
        f"batch {size}, {name}": tokens_per_second(target, each, size, args.tokens, args.repeats)
        for size in (1, 8)
        for name, each in (("plain", None), ("draft", draft))
    }


def as_process(args: argparse.Namespace) -> None:
    """Measure in one process: sharded if there is a process group to join."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(2 // num_processes)
    plan = {}
    if num_processes > 1:
        distributed.init_process_group("gloo")
        plan = {"distributed_config": DistributedConfig(tp_size=num_processes)}
    target = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, **plan).eval()
    found = measured(target, args.pair, args)
    if os.environ.get("RANK", "0") == "0":
        Path(args.out).write_text(json.dumps(found))
    if num_processes > 1:
        distributed.destroy_process_group()


def main() -> None:
    """Measure both in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", choices=PAIRS, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.model:
        as_process(args)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        pair = PAIRS[args.pair]
        random_model(pair.target, pair.vocab_size, torch.bfloat16, _CPU, 0).save_pretrained(folder)
        found: dict[str, Any] = {}
        for name, words in (("one process", []), ("two processes", launcher)):
            out = f"{folder}/{len(found)}.out"
            own = ["--pair", args.pair, "--tokens", str(args.tokens), "--repeats", str(args.repeats)]
            command = [sys.executable, *words, "-m", "bench.sharded", *own, "--model", folder, "--out", out]
            subprocess.run(command, check=True)
            found[name] = json.loads(Path(out).read_text())
    for case, one in found["one process"].items():
        two = found["two processes"][case]
        print(f"{case}: {median(one):.1f} -> {median(two):.1f} tokens/s ({median(two) / median(one):.2f}x)")
    report.write_json({"machine": report.machine(_CPU), "speeds": report.rounded(found)}, args.json)


if __name__ == "__main__":
    main()
