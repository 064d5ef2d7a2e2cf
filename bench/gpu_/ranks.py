"""Task "ranks" of ``bench.gpu``: the bundled target, sharded by ``tp_size`` over two processes on the one GPU.

Every output must be that of plain decoding at batch 1 by the same two ranks. NCCL refuses two ranks on one GPU, so the
ranks exchange numbers by Gloo, which copies them through the host: NCCL is not checked, and the speeds, measured beside
other gates, say nothing about two GPUs. On a CPU the ranks are two processes as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from torch import distributed
from transformers.utils import logging

from bench.common.measurement import Tokens
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast import DecodingStats, Engine, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.runner.loading import load_sharded


@dataclass(frozen=True)
class Sizes:
    """The sizes of the comparison: number of prompts, new tokens of each, and K."""

    num_prompts: int
    new_tokens: int
    num_draft_tokens: int


FULL = Sizes(8, 48, 5)
SMOKE = Sizes(2, 4, 3)
NUM_RANKS = 2
PLAIN, DRAFT_MODEL = "plain", "draft model"
CASES = ((PLAIN, 1), (PLAIN, 4), (DRAFT_MODEL, 1), (DRAFT_MODEL, 4))  # and batch sizes; the first is the reference
TEMPERATURES = (0.0, 1.0)
_WARM_UPS = 1


class OneGpuEngine(Engine):
    """An engine whose ranks share the first GPU."""

    _load_sharded = staticmethod(partial(load_sharded, on_one_gpu=True))


def run(settings: Settings, progress: Progress) -> None:
    """Start the ranks, and compare what they emit in every way with plain decoding."""
    logging.disable_progress_bar()
    sizes = SMOKE if settings.smoke else FULL
    progress.note(prompts=sizes.num_prompts, new_tokens=sizes.new_tokens, ranks=NUM_RANKS)
    progress.attempt(f"{NUM_RANKS} ranks", partial(_compare_all, settings, sizes, progress))


def _compare_all(settings: Settings, sizes: Sizes, progress: Progress) -> None:
    folder = demo_pair()
    lines = (folder / "prompts.jsonl").read_text().splitlines()[: sizes.num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    started = perf_counter()
    with OneGpuEngine(
        str(folder / "target"),
        str(folder / "draft"),
        tp_size=NUM_RANKS,
        device=settings.device,
        dtype="bfloat16",
        num_draft_tokens=sizes.num_draft_tokens,
        max_batch_size=max(batch_size for _, batch_size in CASES),
    ) as engine:
        progress.note(start_seconds=perf_counter() - started, **_facts_of(engine))
        for temperature in TEMPERATURES:
            expected: Tokens = []
            for name, batch_size in CASES:
                what = f"{name} at batch {batch_size}, temperature {temperature:g}"
                params = _params(sizes, temperature, None if name == DRAFT_MODEL else 0)
                decode = partial(_decode, engine, prompts, params, batch_size)
                progress.attempt(what, partial(_compare, decode, what, expected, progress))


def _facts_of(engine: Engine) -> dict[str, Any]:
    """Return how the ranks run and exchange numbers."""
    target, described = engine.target, engine.describe()
    leader = target.leader
    assert leader is not None, "rank 0 leads the others"
    ranks = leader.workers.ranks
    return {
        "processes": 1 + len(leader.workers.processes),
        "kv_heads_of_a_rank": target.layout.shapes[0].num_kv_heads,
        "exchange": type(ranks).__name__,
        "process_group": str(distributed.get_backend()) if distributed.is_initialized() else None,
        "ops": dict(described["ops"]),
        "forward_program": described["forward_program"],
        "why_no_program": described["why_no_program"],
        "rows_one_by_one": described["rows_one_by_one"],
    }


def _params(sizes: Sizes, temperature: float, num_draft_tokens: int | None) -> list[SamplingParams]:
    rules = {"max_new_tokens": sizes.new_tokens, "temperature": temperature, "num_draft_tokens": num_draft_tokens}
    return [SamplingParams(**rules, seed=i) for i in range(sizes.num_prompts)]


def _decode(
    engine: Engine, prompts: list[str], params: list[SamplingParams], batch_size: int
) -> tuple[Tokens, float, DecodingStats, int]:
    """Return outputs, tokens per second, counts, and graphs of the draft model, of the last of several runs."""
    for _ in range(1 + _WARM_UPS):
        started = perf_counter()
        outputs = []
        for at in range(0, len(prompts), batch_size):
            batch = slice(at, at + batch_size)
            outputs += engine.generate(prompts[batch], params[batch], progress=False)
        seconds = perf_counter() - started
    stats = DecodingStats()
    for output in outputs:
        stats.add(output.raise_for_error().stats)
    tokens = [output.token_ids for output in outputs]
    return tokens, sum(map(len, tokens)) / seconds, stats, engine.describe()["draft"].get("graphs_captured", 0)


def _compare(
    decode: Callable[[], tuple[Tokens, float, DecodingStats, int]], what: str, expected: Tokens, progress: Progress
) -> None:
    """Decode, note a row, and fail if an output differs from plain decoding at batch 1, which ``expected`` receives.

    Raises:
        RuntimeError: plain decoding at batch 1 failed before.

    """
    tokens, speed, stats, draft_graphs = decode()
    if what.startswith(f"{PLAIN} at batch 1,"):
        expected += tokens
    if not expected:
        raise RuntimeError("there are no outputs of plain decoding at batch 1 to compare with")
    equal = sum(own == wanted for own, wanted in zip(tokens, expected, strict=True))
    progress.row(
        what=what,
        outputs=len(tokens),
        equal=equal,
        tokens_per_second=speed,
        mean_acceptance_length=stats.mean_acceptance_length,
        draft_graphs=draft_graphs,
    )
    if equal < len(tokens):
        progress.fail(what, f"{len(tokens) - equal} of {len(tokens)} outputs differ from plain decoding at batch 1")
