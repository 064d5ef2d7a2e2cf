"""Task "decoding" of ``bench.gpu``: whole runs at the shapes of Qwen3-8B and Qwen3-0.6B, with random weights.

Costs are those of the shapes; the acceptance is chosen: a ``ReplayDrafter`` runs the small model, or an EAGLE-3 layer
of the large model's sizes, and proposes tokens that the large model emits. Outputs are compared with plain decoding at
the largest batch size, and a difference is a failure.

Speeds are those of decoding alone: every setting also computes its prompts with one new token each, and that time is
subtracted. A real EAGLE-3 drafter and a real draft model have other acceptances; compare within one acceptance only.

The large model's random weights make ties rare: its next token is mostly a function of the last one. That would hide
wrong attention, so the logits of a verification are also compared with the stock model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.common.device import ForwardMeter, free_memory, full_precision, synchronize
from bench.common.measurement import Tokens
from bench.common.pairs import (
    QWEN3_06B,
    QWEN3_8B,
    SEED,
    TINY_DRAFT,
    TINY_TARGET,
    ModelShape,
    random_model,
    random_prompts,
)
from bench.common.random_eagle3 import write_random_eagle3
from bench.common.replay import ReplayDrafter
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast import Engine, SamplingParams
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.drafters.draft_model.drafter import ROWS_EACH, ModelDrafter
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.runner.graphs.buckets import GraphLimits
from specdec_fast.runner.prefill import prefill
from specdec_fast.runner.ragged_model import RaggedModel

PLAIN = "plain"
PLAIN_WAITING = "plain, every step read before the next is launched"
DRAFT_MODEL, EAGLE3, EAGLE3_TREE = "draft model", "eagle3", "eagle3 tree"
TREE_NODES = 16
# How often the second child of a node has the target's token if the first has not. At an acceptance of 0.8 a tree with
# two children of every node then emits 4.7 tokens a step where a chain of K 5 emits 3.7; those of the bundled drafter,
# with 16 nodes, emit 4.99 and 3.94 (docs/performance.md).
AMONG_SIBLINGS = 0.5
PAGE_SIZE = 64


@dataclass(frozen=True)
class Sizes:
    """The sizes of the decoding runs.

    Attributes:
        target, draft: shapes of the models.
        vocab_size: vocabulary size of both.
        dtype: dtype of the weights.
        prompt_tokens, new_tokens: tokens per prompt.
        prompts: number of prompts at each batch size.
        num_draft_tokens: K.
        eagle3_ids: number of ids that the EAGLE-3 layer can propose.
        acceptance: probabilities that a draft token is the target's own.
        warm_up_tokens: tokens per prompt in each of two runs before each measured one; as many as measured where there
            are graphs, which are recorded when they are needed for the second time.

    """

    target: ModelShape
    draft: ModelShape
    vocab_size: int
    dtype: torch.dtype
    prompt_tokens: int
    new_tokens: int
    prompts: dict[int, int]
    num_draft_tokens: int
    eagle3_ids: int
    acceptance: tuple[float, ...]
    warm_up_tokens: int


FULL = Sizes(
    QWEN3_8B,
    QWEN3_06B,
    vocab_size=151_936,
    dtype=torch.bfloat16,
    prompt_tokens=1024,
    new_tokens=128,
    prompts={8: 16, 1: 2, 32: 32},
    num_draft_tokens=5,
    eagle3_ids=32_000,
    acceptance=(0.8, 0.6),
    warm_up_tokens=128,
)
SMOKE = Sizes(
    TINY_TARGET,
    TINY_DRAFT,
    vocab_size=97,
    dtype=torch.float32,
    prompt_tokens=6,
    new_tokens=12,
    prompts={2: 4, 1: 1},
    num_draft_tokens=3,
    eagle3_ids=97,
    acceptance=(0.8,),
    warm_up_tokens=2,
)


def run(settings: Settings, progress: Progress) -> None:
    """Build the pair, decode the transcripts, check the logits, then measure."""
    full_precision()
    device, sizes = torch.device(settings.device), SMOKE if settings.smoke else FULL
    target = random_model(sizes.target, sizes.vocab_size, sizes.dtype, device, SEED)
    draft = random_model(sizes.draft, sizes.vocab_size, sizes.dtype, device, SEED + 1)
    progress.note(target_parameters=target.num_parameters(), draft_parameters=draft.num_parameters())
    began = monotonic()
    count = max(sizes.prompts.values())
    prompts: Tokens = random_prompts(count, sizes.prompt_tokens, sizes.vocab_size, SEED)
    with TemporaryDirectory() as folder:
        write_random_eagle3(target, sizes.eagle3_ids, Path(folder))
        bench = Bench(target, draft, folder, prompts, sizes)
        largest = max(sizes.prompts)
        bench.transcripts = bench.engine(DecodingSetting(PLAIN, largest)).decode(sizes.new_tokens)
        progress.note(transcript_seconds=monotonic() - began)
        texts = [p + t for p, t in zip(prompts, bench.transcripts, strict=True)][: min(8, count)]
        progress.attempt("logits of a verification", partial(_check_logits, bench, texts, progress))
        measure_all(bench, progress)


@dataclass(frozen=True)
class DecodingSetting:
    """One way to decode.

    Attributes:
        method: name of a scheduler, ``PLAIN`` or ``PLAIN_WAITING``.
        batch_size: largest number of sequences in a step.
        acceptance: probability that a draft token is the target's own; None for plain decoding.
        drafter: ``DRAFT_MODEL``, ``EAGLE3`` or ``EAGLE3_TREE``; None for plain decoding.

    """

    method: str
    batch_size: int
    acceptance: float | None = None
    drafter: str | None = None

    def __str__(self) -> str:
        acceptance = "" if self.acceptance is None else f", {self.drafter}, acceptance {self.acceptance}"
        return f"{self.method} at batch {self.batch_size}{acceptance}"


class Run:
    """One engine of the bench, and the figures of its last run."""

    def __init__(self, engine: Engine, models: list[RaggedModel], prompts: Tokens) -> None:
        self.engine, self.models, self.prompts = engine, models, prompts
        self.forward_seconds = 0.0

    def decode(self, new_tokens: int) -> Tokens:
        """Decode the prompts, to exactly ``new_tokens`` tokens each."""
        device = self.engine.target.layout.device
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        synchronize(device)
        with ForwardMeter(self.models, device) as meter:
            outputs = self.engine.generate(self.prompts, params, progress=False)
        self.forward_seconds = meter.seconds()
        return [output.raise_for_error().token_ids for output in outputs]


class Bench:
    """A pair, an EAGLE-3 checkpoint, prompts, and the tokens that the target emits for them."""

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, eagle3: str, prompts: Tokens, sizes: Sizes
    ) -> None:
        self.target, self.eagle3, self.sizes, self.prompts = target, eagle3, sizes, prompts
        self.draft = RaggedModel(draft, resolve(draft.device, dtype=draft.dtype))
        self.draft.use_graphs(GraphLimits(max(sizes.prompts), ROWS_EACH, sizes.num_draft_tokens))
        self.transcripts: Tokens = []

    def engine(self, setting: DecodingSetting) -> Run:
        """Make an engine."""
        vocab_size, batch_size = self.sizes.vocab_size, setting.batch_size
        drafters: dict[str | None, Any] = {
            None: None,
            DRAFT_MODEL: ModelDrafter(self.draft, vocab_size),
            EAGLE3: f"eagle3:{self.eagle3}",
            EAGLE3_TREE: f"eagle3:{self.eagle3}",
        }
        engine = Engine(
            self.target,
            drafters[setting.drafter],
            method="eqspec" if setting.drafter is None else setting.method,
            max_batch_size=batch_size,
            num_draft_tokens=self.sizes.num_draft_tokens,
            draft_tree=TREE_NODES if setting.drafter == EAGLE3_TREE else None,
            page_size=PAGE_SIZE,
            # one pool for all runs, because graphs belong to a pool
            kv_cache_tokens=2 * batch_size * (self.sizes.prompt_tokens + self.sizes.new_tokens + PAGE_SIZE),
        )
        if setting.method == PLAIN_WAITING:
            engine.core._can_be_followed = lambda step: False  # type: ignore[method-assign]
        if setting.acceptance is not None:
            core, device = engine.core, self.target.device
            core.drafting.drafter = ReplayDrafter(
                core.drafting.drafter, self.transcripts, setting.acceptance, vocab_size, device, SEED, AMONG_SIBLINGS
            )
        models = [engine.target, self.draft] if setting.drafter == DRAFT_MODEL else [engine.target]
        return Run(engine, models, self.prompts[: self.sizes.prompts[batch_size]])


def decoding_settings(sizes: Sizes) -> Iterator[DecodingSetting]:
    """Yield the settings to measure, the most important first, in case time runs out."""
    first, *others = sizes.acceptance
    for batch_size in sizes.prompts:
        yield DecodingSetting(PLAIN, batch_size)
        yield DecodingSetting("eqspec", batch_size, first, EAGLE3)
        yield DecodingSetting("eqspec", batch_size, first, DRAFT_MODEL)
        yield DecodingSetting("eqspec", batch_size, first, EAGLE3_TREE)
        yield DecodingSetting(PLAIN_WAITING, batch_size)
    for batch_size in sizes.prompts:
        yield DecodingSetting("exspec", batch_size, first, DRAFT_MODEL)
        for acceptance in others:
            yield DecodingSetting("eqspec", batch_size, acceptance, EAGLE3)
            yield DecodingSetting("eqspec", batch_size, acceptance, DRAFT_MODEL)


def measure_all(bench: Bench, progress: Progress) -> None:
    """Time every setting once, after runs that record its shapes; one row each."""
    plain: dict[int, float] = {}
    longest = 0.0  # seconds of a setting so far, including all before its timing: an estimate for the next one
    for setting in decoding_settings(bench.sizes):
        began = monotonic()
        progress.attempt(str(setting), partial(_measure, bench, setting, plain, progress), longest)
        longest = max(longest, monotonic() - began)
        free_memory(bench.target.device)


def _measure(bench: Bench, setting: DecodingSetting, plain: dict[int, float], progress: Progress) -> None:
    began = monotonic()
    run = bench.engine(setting)
    made = monotonic()
    for _ in range(2):
        run.decode(bench.sizes.warm_up_tokens)
    before = {"engine_seconds": made - began, "warm_up_seconds": monotonic() - made}
    row = _measured(run, bench)
    if setting.method == PLAIN:
        plain[setting.batch_size] = row["tokens_per_second"]
    speed = plain.get(setting.batch_size)
    speedup = None if speed is None else row["tokens_per_second"] / speed
    asked = {
        "method": setting.method,
        "batch": setting.batch_size,
        "acceptance": setting.acceptance,
        "drafter": setting.drafter,
    }
    progress.row(**asked, **row, **before, speedup_over_plain=speedup)
    if row["equal_share"] < 1:
        progress.fail(str(setting), f"{row['equal_share']:.1%} of the outputs are those of plain decoding")


def _measured(run: Run, bench: Bench) -> dict[str, Any]:
    run.decode(1)
    prompt_seconds = run.engine.last_run.seconds
    outputs = run.decode(bench.sizes.new_tokens)
    stats, expected = run.engine.last_run, bench.transcripts[: len(outputs)]
    equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
    decoded = len(outputs) * (bench.sizes.new_tokens - 1)
    return {
        "tokens_per_second": decoded / (stats.seconds - prompt_seconds),
        "prompt_seconds": prompt_seconds,
        "seconds": stats.seconds,
        "outputs": len(outputs),
        "equal_share": equal / len(outputs),
        "steps": stats.num_steps,
        "mean_acceptance_length": stats.decoding.mean_acceptance_length,
        "acceptance_rate": stats.decoding.acceptance_rate,
        "host_seconds_by_stage": dict(stats.timer.seconds),
        "graphs_captured": run.engine.describe()["graphs_captured"],
        "share_outside_forwards": 1 - run.forward_seconds / stats.seconds,
    }


def _check_logits(bench: Bench, texts: Tokens, progress: Progress) -> None:
    """Compare the logits of a verification at the ends of ``texts`` with the stock model's, dense and batched.

    The bound is that of loading a model: the square root of the dtype's rounding unit.
    """
    num_rows = bench.sizes.num_draft_tokens + 1
    ragged = ragged_logits(
        bench.engine(DecodingSetting(PLAIN, max(bench.sizes.prompts))).engine.target, texts, num_rows
    )
    with torch.inference_mode():
        token_ids = torch.tensor(texts, device=bench.target.device)
        dense = bench.target(token_ids, logits_to_keep=num_rows).logits.flatten(0, 1).float()
    distance = float(((ragged - dense).norm(dim=1) / dense.norm(dim=1)).max())
    best = dense.topk(2).values
    gap = ((best[:, 0] - best[:, 1]) / dense.abs().amax(dim=1)).median()
    bound = torch.finfo(bench.sizes.dtype).eps ** 0.5
    progress.note(logit_distance=distance, logit_distance_bound=bound, median_relative_gap=float(gap))
    if not distance <= bound:
        progress.fail("logits of a verification", f"{distance:.2g} off the stock model's; {bound:.2g} are allowed")


def ragged_logits(model: RaggedModel, texts: Tokens, num_rows: int) -> Tensor:
    """Prefill texts except their last rows, then compute these as a verification does: ``[B * num_rows, V]`` fp32."""
    pool = PagePool(model.layout, sum(len(text) + PAGE_SIZE for text in texts), PAGE_SIZE)
    for index in range(len(texts)):
        pool.add(index)
    prefill(model, pool, {index: text[:-num_rows] for index, text in enumerate(texts)})
    rows = [Rows(index, len(text) - num_rows, num_rows) for index, text in enumerate(texts)]
    token_ids = torch.tensor([token for text in texts for token in text[-num_rows:]], device=model.layout.device)
    return model.forward(lay_out(pool, rows, token_ids), pool).float()
