"""What the masks of structured outputs cost a step of a full batch, on models with random weights.

Times of whole steps vary by more than masks take, so the time in the masks is measured as well: the processor time of
the calls that make them, all of which a step waits for.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import thread_time
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.common import report
from bench.common.pairs import PAIRS, random_pair, random_prompts
from bench.common.timing import median_ratio
from specdec_fast import Engine, SamplingParams
from specdec_fast.commands.common import format_table
from specdec_fast.engine import drafting as engine_drafting
from specdec_fast.runner import drafting, verification

_END = "<end>"
_PROMPT_TOKENS = 32


def random_tokenizer(vocab_size: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: all bytes, random words of letters, half of them behind a space, and an end."""
    draw = random.Random(seed)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < vocab_size - 1:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgk", k=draw.randint(2, 9)))
        words["Ġ" * draw.randrange(2) + word] = None
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)} | {_END: vocab_size - 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)


def cases_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, Any]]:
    """Return by name the fields of all requests of a batch. A bias edits logits, too, but needs no mask."""
    bias = {"logit_bias": {tokenizer.convert_tokens_to_ids('"'): -100.0}}  # so that a string does not end
    return {
        "no field": {},
        "a bias": bias,
        "any text": bias | {"structured_outputs": {"regex": r"[\s\S]*"}},
        "a JSON string": bias | {"structured_outputs": {"json": {"type": "string"}}},
    }


class MaskTime:
    """Processor time of the calls that make masks and draft what they force, of one thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def patches(self) -> list[Any]:
        """Return what counts the calls while it is entered."""
        places = [(verification, "mask_rows"), (drafting, "rows_for_drafts")]
        places += [(engine_drafting, name) for name in ("limits_with_forced", "forced_tokens", "completed")]
        return [mock.patch.object(place, name, self._timed(getattr(place, name))) for place, name in places]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += thread_time() - started

        return timed


def step_seconds(engine: Engine, prompts: list[list[int]], params: SamplingParams, masks: MaskTime) -> dict[str, float]:
    """Decode prompts to their limits; return the seconds per step, and those in masks."""
    masks.seconds = 0.0
    outputs = engine.generate(prompts, params, progress=False)
    ended = [output.raise_for_error().finish_reason for output in outputs]
    if set(ended) != {"length"}:
        sys.exit("a text has ended before its limit, so batches were smaller: lower --max-new-tokens")
    run = engine.last_run
    in_masks = masks.seconds if params.structured_outputs else 0.0
    return {
        "step": (run.seconds - run.timer.seconds["prefill"]) / (run.num_steps - 1),  # that of the first tokens prefills
        "masks": in_masks / run.num_steps,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the steps of every case, one after the other, in every repeat."""
    pair = PAIRS[args.pair]
    target, draft = random_pair(pair, report.DTYPES[args.dtype], torch.device("cpu"))
    config = {"max_batch_size": args.batch_size, "num_draft_tokens": args.num_draft_tokens}
    drafter = draft if args.draft == "model" else None if args.draft == "none" else args.draft
    tokenizer = random_tokenizer(pair.vocab_size)
    engine = Engine(target, drafter, tokenizer=tokenizer, **config)  # type: ignore[arg-type]
    prompts = random_prompts(args.batch_size, _PROMPT_TOKENS, pair.vocab_size)
    limits = {"max_new_tokens": args.max_new_tokens, "stop_token_ids": [pair.vocab_size - 1]}
    cases = {name: SamplingParams(**limits, **fields) for name, fields in cases_of(tokenizer).items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    masks = MaskTime()
    with ExitStack() as stack:
        for patch in masks.patches():
            stack.enter_context(patch)
        for repeat in range(args.repeats + 1):  # the first one compiles grammars
            for name, params in cases.items():
                spent = step_seconds(engine, prompts, params, masks)
                if repeat:
                    found[name].append(spent)
    free = [spent["step"] for spent in found["no field"]]
    rows = []
    for name, times in found.items():
        steps = [spent["step"] for spent in times]
        in_masks = median(spent["masks"] for spent in times)
        rows.append(
            {
                "case": name,
                "step_milliseconds": 1e3 * median(steps),
                "to_no_field": median_ratio(steps, free),
                "mask_milliseconds": 1e3 * in_masks,
                "mask_share": in_masks / median(free),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.masks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", choices=list(PAIRS), default="10m", help="default: %(default)s")
    parser.add_argument("--draft", choices=("none", "model", "ngram"), default="none", help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default: %(default)s")
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    report.prepare(args)
    rows = measure(args)
    lines = [
        (
            row["case"],
            f"{row['step_milliseconds']:.2f}",
            f"{row['to_no_field'] - 1:+.1%}",
            f"{row['mask_milliseconds']:.2f}",
            f"{row['mask_share']:.1%}",
        )
        for row in rows
    ]
    print(f"pair {args.pair}, {args.dtype}, batch {args.batch_size}, drafter {args.draft}, K {args.num_draft_tokens}")
    print(format_table(("requests with", "step, ms", "to no field", "in masks, ms", "share of a step without"), lines))
    names = ("pair", "draft", "dtype", "batch_size", "num_draft_tokens", "max_new_tokens", "repeats")
    settings = {name: getattr(args, name) for name in names}
    described = {"benchmark": "masks", "machine": report.machine(torch.device("cpu")), "settings": settings}
    report.write_json({**described, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
