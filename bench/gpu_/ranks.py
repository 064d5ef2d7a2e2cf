"""Task "ranks" of ``bench.gpu``: the bundled target, sharded by ``tp_size`` over two processes on the one GPU.

Every output must be that of plain decoding at batch 1 by the same two ranks. NCCL refuses two ranks on one GPU, so the
ranks exchange numbers by Gloo, which copies them through the host, between the pieces of a CUDA graph: NCCL is not
checked, and the speeds, measured beside other gates, say nothing about two GPUs. On a CPU the ranks are two processes
as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

from torch import distributed
from transformers.utils import logging

from bench.common.measurement import Tokens
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast import DecodingStats, Engine, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.runner.graphs.capture import CAPTURES
from specdec_fast.runner.loading import load_sharded


@dataclass(frozen=True)
class Sizes:
    """The sizes of the comparison.

    Attributes:
        num_prompts: number of bundled prompts, from the first on.
        new_tokens: new tokens per prompt.
        num_draft_tokens: K.
        engines: what each engine decodes by. Without a draft model, a GPU's engine overlaps steps in another way.

    """

    num_prompts: int
    new_tokens: int
    num_draft_tokens: int
    engines: tuple[tuple[str, ...], ...]


NUM_RANKS = 2
PLAIN, DRAFT_MODEL = "plain", "draft model"
FULL = Sizes(8, 48, 5, ((PLAIN,), (DRAFT_MODEL,)))
SMOKE = Sizes(2, 4, 3, ((PLAIN, DRAFT_MODEL),))  # starting ranks takes most of the time
BATCH_SIZES = (1, 4)
TEMPERATURES = (0.0, 1.0)
_WARM_UPS = 1


@dataclass(frozen=True)
class Case:
    """One way to decode."""

    name: str
    batch_size: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.name} at batch {self.batch_size}, temperature {self.temperature:g}"


class OneGpuEngine(Engine):
    """An engine whose ranks share the first GPU."""

    _load_sharded = staticmethod(partial(load_sharded, on_one_gpu=True))


def run(settings: Settings, progress: Progress) -> None:
    """Start the ranks, and compare what they emit in every way with plain decoding."""
    logging.disable_progress_bar()
    sizes = SMOKE if settings.smoke else FULL
    progress.note(prompts=sizes.num_prompts, new_tokens=sizes.new_tokens, ranks=NUM_RANKS)
    found: dict[float, Tokens] = {}  # of plain decoding at batch 1, by temperature
    for names in sizes.engines:
        what = f"{NUM_RANKS} ranks, {' and '.join(names)}"
        progress.attempt(what, partial(_compare_all, settings, sizes, names, found, progress))


def _compare_all(
    settings: Settings, sizes: Sizes, names: tuple[str, ...], found: dict[float, Tokens], progress: Progress
) -> None:
    """Make an engine, and decode by ``names`` at all batch sizes and temperatures."""
    folder = demo_pair()
    lines = (folder / "prompts.jsonl").read_text().splitlines()[: sizes.num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    started = perf_counter()
    with OneGpuEngine(
        str(folder / "target"),
        str(folder / "draft") if DRAFT_MODEL in names else None,
        tp_size=NUM_RANKS,
        device=settings.device,
        dtype="bfloat16",
        num_draft_tokens=sizes.num_draft_tokens,
        max_batch_size=max(BATCH_SIZES),
    ) as engine:
        progress.note(start_seconds=perf_counter() - started, **_facts_of(engine))
        for temperature, name, batch_size in product(TEMPERATURES, names, BATCH_SIZES):
            params = params_of(sizes.num_prompts, sizes.new_tokens, temperature, 0 if name == PLAIN else None)
            decode = partial(decode_all, engine, prompts, params, batch_size)
            case = Case(name, batch_size, temperature)
            progress.attempt(str(case), partial(compare, decode, case, found, progress))
        described = engine.describe()
        if engine.target.layout.device.type in CAPTURES and not described["graphs_captured"]:
            progress.fail(f"graphs of the target, {names}", f"there are none: {described['why_no_graphs']}")


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


def params_of(
    num_prompts: int, new_tokens: int, temperature: float, num_draft_tokens: int | None
) -> list[SamplingParams]:
    """Return the parameters of so many requests; with ``num_draft_tokens`` 0 they are decoded plainly."""
    rules = {"max_new_tokens": new_tokens, "temperature": temperature, "num_draft_tokens": num_draft_tokens}
    return [SamplingParams(**rules, seed=i) for i in range(num_prompts)]


def decode_all(
    engine: Engine, prompts: list[Any], params: list[SamplingParams], batch_size: int
) -> tuple[Tokens, float, DecodingStats, dict[str, int]]:
    """Return outputs, tokens per second, counts, and the graphs of target and draft, of the last of several runs."""
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
    described = engine.describe()
    graphs = {
        "target_graphs": described["graphs_captured"],
        "draft_graphs": described["draft"].get("graphs_captured", 0),
    }
    return tokens, sum(map(len, tokens)) / seconds, stats, graphs


def compare(
    decode: Callable[[], tuple[Tokens, float, DecodingStats, dict[str, int]]],
    case: Case,
    found: dict[float, Tokens],
    progress: Progress,
) -> None:
    """Decode, note a row, and fail if an output differs from plain decoding at batch 1, which ``found`` keeps.

    Raises:
        RuntimeError: plain decoding at batch 1 failed before.

    """
    tokens, speed, stats, graphs = decode()
    if (case.name, case.batch_size) == (PLAIN, 1):
        found[case.temperature] = tokens
    if case.temperature not in found:
        raise RuntimeError("there are no outputs of plain decoding at batch 1 to compare with")
    equal = sum(own == wanted for own, wanted in zip(tokens, found[case.temperature], strict=True))
    progress.row(
        what=str(case),
        outputs=len(tokens),
        equal=equal,
        tokens_per_second=speed,
        mean_acceptance_length=stats.mean_acceptance_length,
        **graphs,
    )
    if equal < len(tokens):
        progress.fail(
            str(case), f"{len(tokens) - equal} of {len(tokens)} outputs differ from plain decoding at batch 1"
        )
