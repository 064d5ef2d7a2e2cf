"""Runs of ``bench.engine`` that are small enough for tests: their options, and their methods."""

from __future__ import annotations

import json

import torch

from bench import engine as bench
from bench.common.pairs import PAIRS, random_pair, random_prompts
from bench.common.workload import Workload

CPU = torch.device("cpu")
SMOKE = ["--pair", "smoke", "--prompt-tokens", "5", "--max-new-tokens", "9", "--repeats", "1"]
DEFAULT = [
    "autoregressive",
    "eqspec",
    "exspec",
    "oracle-eqspec",
    "oracle-exspec",
    "transformers",
    "transformers-assisted",
]


def run(capsys, options):
    """Run the command; return its tables and its last line."""
    bench.main(options)
    *text, last = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(last)


def workload(count=5, new_tokens=12, dtype=torch.float32):
    target, draft = random_pair(PAIRS["smoke"], dtype, CPU)
    return Workload("smoke", target, draft, random_prompts(count, 5, 97), new_tokens)
