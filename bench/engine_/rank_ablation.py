"""How the temperature that gives a drafter's ranks their probabilities changes what dynamic trees emit.

Tokens per step depend on no clock: the bundled target decodes greedily in fp32, with its EAGLE-3 drafter and K 5.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.exactness import bundled_prompts
from specdec_fast import Engine, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.drafters.shared import ranked

TEMPERATURES = (1.25, 1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
NODES = (8, 16, 32)


def rank_rows(num_prompts: int, max_new_tokens: int) -> list[dict[str, Any]]:
    """Decode with trees of several sizes at every temperature; return tokens per step.

    Args:
        num_prompts: of the bundled prompts and their halves, the first so many; 0: all 64.
        max_new_tokens: per prompt.

    """
    folder, prompts = demo_pair(), bundled_prompts()[: num_prompts or None]
    params = SamplingParams(max_new_tokens=max_new_tokens)
    chosen, rows = ranked.GREEDY_TEMPERATURE, []
    try:
        for nodes in NODES:
            options = {"draft_tree": nodes, "num_draft_tokens": 5, "max_batch_size": 8, "dtype": torch.float32}
            engine = Engine(str(folder / "target"), f"eagle3:{folder / 'eagle3'}", **options)
            for temperature in TEMPERATURES:
                ranked.GREEDY_TEMPERATURE = temperature
                engine.generate(prompts, params, progress=False)
                tokens = engine.last_run.decoding.mean_acceptance_length
                rows.append({"nodes": nodes, "temperature": temperature, "tokens_per_step": tokens})
    finally:
        ranked.GREEDY_TEMPERATURE = chosen
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per temperature, one column per size of the trees."""
    found = {(row["nodes"], row["temperature"]): f"{row['tokens_per_step']:.2f}" for row in rows}
    lines = [(temperature, *(found[nodes, temperature] for nodes in NODES)) for temperature in TEMPERATURES]
    print(format_table(("temperature", *(f"{nodes} nodes" for nodes in NODES)), lines))
