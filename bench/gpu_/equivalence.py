"""Task "equivalence" of ``bench.gpu``: the bundled pair on the device, compared token by token with plain decoding.

In fp32 the reference is ``transformers`` at batch 1. A difference is a failure, unless the two best logits at the
divergence are within fp32 noise of each other. In bf16 the reference is the engine's own plain decoding. The task
counts differences, and beside them those between plain batched decoding in ``transformers`` and its own batch 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from bench.common.device import full_precision
from bench.common.measurement import Tokens
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast import Engine, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.equivalence.compare import (
    Comparison,
    Setting,
    compare,
    transformers_greedy,
    transformers_greedy_batch,
)
from specdec_fast.models.loading import load_model
from specdec_fast.ops.registry import AUTO
from specdec_fast.request.detokenizer import load_tokenizer

FP32_NOISE = 1e-4  # relative to the largest logit: about a hundred times the error of fp32 sums of these lengths
PLAIN = "plain"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the comparison.

    Attributes:
        num_prompts: number of bundled prompts, from the first on.
        max_new_tokens: new tokens per prompt.
        exact: (batch sizes, Ks) in fp32, with every scheduler.
        noisy: the same in bf16.

    """

    num_prompts: int
    max_new_tokens: int
    exact: tuple[tuple[int, ...], tuple[int, ...]]
    noisy: tuple[tuple[int, ...], tuple[int, ...]]


FULL = Sizes(32, 64, ((1, 4, 8), (3, 5)), ((1, 8), (5,)))
SMOKE = Sizes(3, 6, ((2,), (3,)), ((2,), (3,)))


class Pair:
    """The bundled pair in one dtype, on one device, and its prompts; engines over it run on ``backend``."""

    def __init__(self, dtype: torch.dtype, settings: Settings, sizes: Sizes, backend: str = AUTO) -> None:
        self.backend = backend
        folder, device = demo_pair(), torch.device(settings.device)
        self.target = load_model(str(folder / "target"), dtype, device)
        self.draft = load_model(str(folder / "draft"), dtype, device)
        self.max_new_tokens = sizes.max_new_tokens
        self.tokenizer = load_tokenizer(str(folder / "target"))
        lines = (folder / "prompts.jsonl").read_text().splitlines()[: sizes.num_prompts]
        self.prompts: Tokens = [self.tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]

    def decode(self, method: str, batch_size: int, num_draft_tokens: int) -> tuple[Tokens, Engine]:
        """Decode all prompts with an engine; return the emitted tokens, and the engine."""
        plain = method == PLAIN
        engine = Engine(
            self.target,
            None if plain else self.draft,
            tokenizer=self.tokenizer,
            method="eqspec" if plain else method,
            max_batch_size=batch_size,
            num_draft_tokens=num_draft_tokens,
            backend=self.backend,
        )
        outputs = engine.generate(self.prompts, SamplingParams(max_new_tokens=self.max_new_tokens), progress=False)
        return [output.raise_for_error().token_ids for output in outputs], engine

    def transformers(self, batch_size: int) -> Tokens:
        """Decode all prompts with ``generate()``."""
        if batch_size == 1:
            return [transformers_greedy(self.target, prompt, self.max_new_tokens) for prompt in self.prompts]
        batches = [self.prompts[at : at + batch_size] for at in range(0, len(self.prompts), batch_size)]
        return [out for batch in batches for out in transformers_greedy_batch(self.target, batch, self.max_new_tokens)]


def run(settings: Settings, progress: Progress) -> None:
    """Decode in fp32, which is a gate, then in bf16, which gives figures only."""
    full_precision()
    logging.disable_progress_bar()
    sizes = SMOKE if settings.smoke else FULL
    progress.note(prompts=sizes.num_prompts, new_tokens=sizes.max_new_tokens, fp32_noise=FP32_NOISE)
    progress.attempt("float32", partial(_compare_exact, settings, sizes, progress))
    progress.attempt("bfloat16", partial(_compare_noisy, settings, sizes, progress))


def _compare_exact(settings: Settings, sizes: Sizes, progress: Progress) -> None:
    pair = Pair(torch.float32, settings, sizes)
    compare_all(pair, pair.transformers(1), sizes.exact, progress, gate=True)


def _compare_noisy(settings: Settings, sizes: Sizes, progress: Progress) -> None:
    pair = Pair(torch.bfloat16, settings, sizes)
    compare_all(pair, pair.decode(PLAIN, 1, 0)[0], sizes.noisy, progress, gate=False)
    _noise_floor(pair, sizes.noisy[0], progress)


def compare_all(
    pair: Pair, expected: Tokens, settings: tuple[tuple[int, ...], tuple[int, ...]], progress: Progress, gate: bool
) -> None:
    """Compare plain and speculative decoding, every scheduler, batch size and K, with the expected tokens."""
    batch_sizes, ks = settings
    speculative = [(method, b, k) for method in ("eqspec", "exspec") for b in batch_sizes for k in ks]
    plain = [(PLAIN, b, 0) for b in batch_sizes if gate or b > 1]  # in bf16 plain decoding at batch 1 is the reference
    for method, batch_size, k in plain + speculative:
        setting = Setting(method, batch_size, k or None)
        check = partial(_compare, pair, setting, expected, progress, gate)
        progress.attempt(name_of(pair, method, batch_size, k), check)


def _compare(pair: Pair, setting: Setting, expected: Tokens, progress: Progress, gate: bool) -> None:
    method, batch_size, k = setting.method, setting.batch_size, setting.num_draft_tokens or 0
    outputs, engine = pair.decode(method, batch_size, k)
    found = compare(setting, pair.target, pair.prompts, outputs, expected)
    shown = _shown(found, pair, expected)
    stats = engine.last_run
    decoded = {"mean_acceptance_length": stats.decoding.mean_acceptance_length, "seconds": stats.seconds}
    progress.row(**_described(found, pair), **decoded, ops=dict(engine.describe()["ops"]), divergences=shown)
    wrong = [one for one in shown if not one["relative_gap"] <= FP32_NOISE]  # a NaN is wrong, too
    if gate and wrong:
        why = f"{len(wrong)} of {len(expected)} outputs differ where the best logit leads by more than fp32 noise"
        progress.fail(name_of(pair, method, batch_size, k), why, divergences=wrong)


def _noise_floor(pair: Pair, batch_sizes: tuple[int, ...], progress: Progress) -> None:
    """Compare plain batched decoding in transformers with its own batch 1."""
    if not progress.has_time("noise floor"):
        return
    expected = pair.transformers(1)
    for batch_size in (b for b in batch_sizes if b > 1):
        if progress.has_time(f"noise floor at batch {batch_size}"):
            setting = Setting("transformers", batch_size)
            found = compare(setting, pair.target, pair.prompts, pair.transformers(batch_size), expected)
            progress.row(**_described(found, pair), divergences=_shown(found, pair, expected))


def name_of(pair: Pair, method: str, batch_size: int, k: int) -> str:
    """Return the name of a check."""
    return f"{method} at batch {batch_size}, K {k}, {str(pair.target.dtype).removeprefix('torch.')}"


def _described(found: Comparison, pair: Pair) -> dict[str, Any]:
    return {
        "method": found.setting.method,
        "batch": found.setting.batch_size,
        "num_draft_tokens": found.setting.num_draft_tokens,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "outputs": len(pair.prompts),
        "equal": len(pair.prompts) - len(found.divergences),
    }


def _shown(found: Comparison, pair: Pair, expected: Tokens) -> list[dict[str, Any]]:
    """Describe where each text diverges, and the gap of the two best logits there, relative to the largest."""
    rows = []
    for one in found.divergences:
        context = pair.prompts[one.index] + expected[one.index][: one.position]
        relative_gap = one.gap / _largest(pair.target, context)
        rows.append({"prompt": one.index, "position": one.position, "relative_gap": relative_gap})
    return rows


@torch.inference_mode()
def _largest(model: PreTrainedModel, token_ids: list[int]) -> float:
    logits = model(torch.tensor([token_ids], device=model.device)).logits[0, -1]
    return float(logits.float().abs().max())
