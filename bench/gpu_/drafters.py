"""Task "drafters" of ``bench.gpu``: the bundled target with what drafts for it, in bf16 and with 4-bit weights.

Every output must be that of plain decoding with the same weights. Each engine decodes twice before its outputs are
compared, so that its graphs are recorded. The MTP layer is cut out of the target (``write_cut_mtp``). Speeds are those
beside other gates, on a small target, and not to be cited.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers.utils import logging

from bench.common.cut_mtp import write_cut_mtp
from bench.common.measurement import Tokens
from bench.gpu_.equivalence import Pair, Sizes
from bench.gpu_.isolated_tasks import Progress, Settings
from specdec_fast import Engine, SamplingParams
from specdec_fast.assets import demo_pair

FULL = Sizes(16, 48, ((), ()), ((8, 1), (5,)))
SMOKE = Sizes(3, 6, ((), ()), ((2,), (3,)))
_WARM_UPS = 2
_EAGLE3 = f"eagle3:{demo_pair() / 'eagle3'}"
PLAIN = "plain"
_DRAFT_MODEL = str(demo_pair() / "draft")
_MTP = "mtp"  # of a checkpoint that ``run`` writes
_INT4 = {"quantization": "int4"}
# What drafts, by name, and the settings of its engine; behind plain decoding with the same weights.
DRAFTERS: dict[str, dict[str, Any]] = {
    PLAIN: {"draft": None},
    "draft model": {"draft": _DRAFT_MODEL},
    "eagle3 chain": {"draft": _EAGLE3},
    "eagle3 chain without graphs": {"draft": _EAGLE3},
    "eagle3 tree": {"draft": _EAGLE3, "draft_tree": 16},
    "eagle3 tree without graphs": {"draft": _EAGLE3, "draft_tree": 16},
    "mtp chain": {"draft": _MTP},
    "mtp chain without graphs": {"draft": _MTP},
    "self": {"draft": "self"},
    "ngram": {"draft": "ngram"},
    "plain, int4": {"draft": None, **_INT4},
    "draft model, int4": {"draft": _DRAFT_MODEL, **_INT4},
    "ngram, int4": {"draft": "ngram", **_INT4},
}
# Each of them must be drafted by graphs where the target has graphs.
OF_GRAPHS = ("eagle3 chain", "eagle3 tree", "mtp chain")
TEMPERATURES = (0.0, 1.0)


def run(settings: Settings, progress: Progress) -> None:
    """Decode with every drafter, greedily and at temperature 1; the equality of outputs is a gate."""
    logging.disable_progress_bar()
    sizes = SMOKE if settings.smoke else FULL
    progress.note(prompts=sizes.num_prompts, new_tokens=sizes.max_new_tokens)
    pair = Pair(torch.bfloat16, settings, sizes)
    with TemporaryDirectory() as folder:
        write_cut_mtp(pair.target, Path(folder))
        _compare_all(pair, f"{_MTP}:{folder}", sizes, progress)


def _compare_all(pair: Pair, mtp: str, sizes: Sizes, progress: Progress) -> None:
    batch_sizes, (num_draft_tokens, *_) = sizes.noisy
    for batch_size, temperature in product(batch_sizes, TEMPERATURES):
        found: dict[str | None, Tokens] = {}  # of plain decoding, by quantization
        for name, options in DRAFTERS.items():
            settings_of = {"max_batch_size": batch_size, "num_draft_tokens": num_draft_tokens, **options}
            if settings_of["draft"] == _MTP:
                settings_of["draft"] = mtp
            what = f"{name} at batch {batch_size}, temperature {temperature:g}"
            decode = partial(_decode, pair, name, settings_of, temperature)
            progress.attempt(what, partial(_compare, decode, name, what, found, progress))


def _decode(pair: Pair, name: str, settings: dict[str, Any], temperature: float) -> tuple[Tokens, float, Engine]:
    """Return outputs, tokens per second and the engine."""
    engine = Engine(pair.target, tokenizer=pair.tokenizer, backend=pair.backend, **settings)
    if name.endswith("without graphs"):
        engine.core.drafting.drafter.graphs = None
    params = [
        SamplingParams(max_new_tokens=pair.max_new_tokens, temperature=temperature, seed=i)
        for i in range(len(pair.prompts))
    ]
    for _ in range(1 + _WARM_UPS):
        started = perf_counter()
        outputs = engine.generate(pair.prompts, params, progress=False)
        seconds = perf_counter() - started
    tokens = [output.raise_for_error().token_ids for output in outputs]
    return tokens, sum(map(len, tokens)) / seconds, engine


def _compare(
    decode: Callable[[], tuple[Tokens, float, Engine]],
    name: str,
    what: str,
    found: dict[str | None, Tokens],
    progress: Progress,
) -> None:
    """Decode, note a row, and fail if an output differs from plain decoding, or if drafting lacked graphs.

    Raises:
        RuntimeError: plain decoding failed before.

    """
    tokens, speed, engine = decode()
    quantization = DRAFTERS[name].get("quantization")
    if DRAFTERS[name]["draft"] is None:
        found[quantization] = tokens
    if quantization not in found:
        raise RuntimeError("there are no outputs of plain decoding to compare with")
    equal = sum(own == wanted for own, wanted in zip(tokens, found[quantization], strict=True))
    stats, described = engine.last_run, engine.describe()["draft"]
    target_graphs = 0 if engine.target.graphs is None else engine.target.graphs.num_captured
    progress.row(
        what=what,
        outputs=len(tokens),
        equal=equal,
        tokens_per_second=speed,
        mean_acceptance_length=stats.decoding.mean_acceptance_length,
        target_graphs=target_graphs,
        draft_graphs=described.get("graphs_captured", 0),
        why_no_graphs=described.get("why_no_graphs"),
        draft_program=described.get("forward_program"),
        why_no_draft_program=described.get("why_no_program"),
        seconds_drafting=stats.timer.seconds.get("draft", 0.0),
        num_steps=stats.num_steps,
    )
    if name in OF_GRAPHS and target_graphs and not described["graphs_captured"]:
        progress.fail(what, f"no graph drafted: {described['why_no_graphs']}")
    if equal < len(tokens):
        progress.fail(what, f"{len(tokens) - equal} of {len(tokens)} outputs differ from plain decoding")
